"""Every field of `meta.json` that somebody looks up is checked, and what follows from another follows from it."""

from __future__ import annotations

import pytest
from trace_cases import change_folder

from moe_course.errors import TraceError
from moe_course.trace import Trace


@pytest.fixture
def write(tmp_path):
    """Write a correct folder with the meta changed; returns the folder."""
    return lambda **options: change_folder(tmp_path, **options)


def to(name, value):
    return lambda meta: meta.update({name: value})


def within(outer, name, value):
    return lambda meta: meta[outer].update({name: value})


of_three = {"world_size": 3, "ep_size": 3, "dp": 3, "nodes": [3]}
of_one = {"world_size": 1, "ep_size": 1, "dp": 1, "nodes": [1], "dispatch_group": None}
STAY = {"backend": "no_dp_ep", "shape": "no_dp_ep"}

META = {
    "no such backend": (to("backend", "pigeons"), "field backend is 'pigeons' and shape is 'all_to_all': no backend"),
    "backend of another shape": (to("backend", "deepep_v2"), "shape is 'all_to_all': it runs as 'two_hop'"),
    "another schema": (to("schema", "moe_course.trace/2"), "schema is 'moe_course.trace/2', this version reads 'moe_c"),
    "missing field": (lambda meta: meta.pop("backend"), "field backend is missing"),
    "unknown field": (to("surplus", 1), "field surplus is not known"),
    "type": (to("hidden_size", "16"), "field hidden_size is '16', expected int"),
    "not a flag": (to("values", 1), "field values is 1, expected bool"),
    "null": (to("capacity", "many"), "field capacity is 'many', expected int or null"),
    "more ranks than files": (lambda m: m.update(world_size=3, plan=m["plan"] | of_three, routes=[6] * 3),
                              "rank0002.safetensors is missing: meta.json says world_size 3, there are 2 files"),
    "two numbers of ranks": (to("world_size", 3), "the number of ranks differs: {'world_size': 3, 'plan.world_size': "),
    "fewer ranks than files": (lambda m: m.update(world_size=1, plan=m["plan"] | of_one, routes=[6], **STAY),
                               "rank0001.safetensors belongs to no rank: meta.json says world_size 1"),
    "routes": (to("routes", [6, 5]), "rank0001.safetensors: column step has 6 entries, expected 5"),
    "no values": (to("values", False), r"column contribution is not known \(meta.json says values: false\)"),
    "plan": (lambda meta: meta["plan"].pop("placement"), "field plan has no placement; it has world_size, "),
    "experts": (to("experts", 7), r"plan.experts_per_rank is \[3, 3\], 7 experts placed linear .* are \[4, 3\]"),
    "strategy": (lambda meta: meta["plan"].update(placement="magic"), "plan cannot be read: .*magic"),
    "sizes": (to("sizes", {"dispatch": 4}), "field sizes has no partial; it has dispatch"),
    "prompt": (to("prompts", ["x"]), "prompt 0 is 'x', expected its text and its tokens"),
    "texts": (to("new_tokens", []), "2 prompts, and new_tokens of 0"),
    "dtype": (to("rows_dtype", "load"), "field rows_dtype is 'load', expected float32 or bfloat16"),
    "dtype home": (to("combine_dtype", "zz"), "field combine_dtype is 'zz', expected auto or float32 or bfloat16"),
    "shape": (to("shape", "nope"), "field shape is 'nope', expected no_dp_ep or allgather_reducescatter or "),
    "reduce group": (within("plan", "reduce_group", "zz"), "field plan.reduce_group is 'zz', expected null or tp"),
    "reduce group of a list": (within("plan", "reduce_group", []), r"plan.reduce_group is \[\], expected str or null"),
    "no tp": (within("plan", "tp", 0), "field plan.tp is 0, expected 1 or more"),
    "dp of text": (within("plan", "dp", "2"), "field plan.dp is '2', expected int"),
    "EP of a flag": (within("plan", "ep_size", True), "field plan.ep_size is True, expected int"),
    "bytes of text": (within("sizes", "partial", "x"), "field sizes.partial is 'x', expected int"),
    "bytes below 0": (within("sizes", "dispatch", -1), "field sizes.dispatch is -1, expected 0 or more"),
    "clock": (within("clock", "comparable", "no"), "field clock.comparable is 'no', expected bool"),
    "new tokens that are no lists": (to("new_tokens", [1]), r"field new_tokens\[0\] is 1, expected a list of token"),
    "new tokens of text": (to("new_tokens", [["a"]]), r"field new_tokens\[0\] is \['a'\], expected a list of token"),
    "tokens of text": (to("prompts", [{"prompt": "x", "tokens": ["a"]}]), "prompt 0 is .*, expected its text and its"),
    "a prompt of numbers": (to("prompts", [{"prompt": 1, "tokens": [1]}]), "prompt 0 is .*, expected its text and its"),
    "a node more": (within("plan", "nodes", [1, 1]), "field plan.nodes is .1, 1., expected those of the option ra"),
    "a token without text": (lambda meta: meta["token_text"].pop("71"), "token_text has no text for token 71, which"),
    "text of a token": (to("token_text", {"5": 3}), r"field token_text\['5'\] is 3, expected the text of a token"),
    "routes of text": (to("routes", ["4", 4]), r"field routes is \['4', 4\], expected a list with a number for each"),
    "experts without end": (to("experts", 2**40), "field experts is 1099511627776, expected 1 to 65536"),
    "no experts": (to("top_k", 0), "field top_k is 0, expected 1 to 65536"),
    "reduced in no node": (to("reduce_in_node", True), "reduce_in_node is True and shape is 'all_to_all', expected"),
    "dispatch group": (within("plan", "dispatch_group", "x"), "field plan.dispatch_group is 'x', expected null or ep"),
    "dispatch group of a list": (within("plan", "dispatch_group", []), r"dispatch_group is \[\], expected str or null"),
    "no dispatch group": (within("plan", "dispatch_group", None), "dispatch_group is None, expected 'ep' with plan.dp"),
    "another dispatch group": (within("plan", "dispatch_group", "dp"), "dispatch_group is 'dp', expected 'ep' with pl"),
    "split group": (within("plan", "split_group", "x"), "field plan.split_group is 'x', expected null or tp or pcp"),
    "split where none is": (within("plan", "split_group", "pcp"), "plan.split_group is 'pcp', expected null with plan"),
    "sums where none are": (within("plan", "reduce_group", "tp"), "plan.reduce_group is 'tp', expected null with plan"),
    "no nodes": (lambda meta: meta["plan"].pop("nodes"), "field plan has no nodes; it has world_size, "),
    "nodes of text": (within("plan", "nodes", "x"), "field plan.nodes is 'x', expected list"),
    "nodes of null": (within("plan", "nodes", [None]), r"plan.nodes is \[None\], expected a list with a number for ea"),
    "nodes of a number": (within("plan", "nodes", 3), "field plan.nodes is 3, expected list"),
    "too many ranks on a node": (within("plan", "nodes", [5]), r"meta.json: field plan.nodes is \[5\], expected the n"),
    "a node without ranks": (within("plan", "nodes", [2, 0]), r"plan.nodes is \[2, 0\], expected the number of ranks"),
    "nodes of nobody": (within("plan", "nodes", []), r"field plan.nodes is \[\], expected the number of ranks of each"),
    "more TP ranks": (within("plan", "tp", 2), "fields plan.dp x .* are 2 x 1 x 1 x 2 = 4, expected world_size 2"),
    "fewer DP ranks": (within("plan", "dp", 1), "fields plan.dp x .* are 1 x 1 x 1 x 1 = 1, expected world_size 2"),
    "a pipeline": (within("plan", "pp", 2), "field plan.pp is 2, expected 1 to 1"),
    "fewer EP ranks": (within("plan", "ep_size", 1), "field plan.ep_size is 1, expected 2, the world_size"),
    "rows stay, says the shape": (lambda m: m.update(STAY), "field shape is 'no_dp_ep', expected another than 'no_dp_"),
    "a byte a row": (within("sizes", "dispatch", 1), "field sizes.dispatch is 1, expected 64 for hidden_size 16, rows"),
    "a row without end": (within("sizes", "partial", 2**70), "field sizes.partial is 1180591620717411303424, expected"),
    "outputs of another size": (within("sizes", "contribution", 32), "sizes.contribution is 32, expected 64"),
    "bf16 rows": (to("rows_dtype", "bfloat16"), "field sizes.dispatch is 64, expected 32 for .* rows_dtype 'bfloat16'"),
    "no prefill": (to("prefill_passes", 0), "field prefill_passes is 0, expected 1 or more"),
    "prefill in parts": (to("prefill_passes", 2), "field prefill_passes is 2, expected 1: the prompts go in so many p"),
    "a capacity of nothing": (to("capacity", 2**40), "capacity is 1099511627776, expected null: it has no fixed place"),
    "transport": (to("transport", "zeppelin"), "field transport is 'zeppelin', expected threads or gloo or shm or ncc"),
    "transport of a GPU": (to("transport", "nccl"), "field transport is 'nccl', expected another than 'nccl' on 'cpu'"),
    "format": (to("dispatch_quant", "banana"), "field dispatch_quant is 'banana', expected none or fp8_group or "),
    "a format that does not fit": (to("dispatch_quant", "fp8_group"), "field dispatch_quant is 'fp8_group': .*16"),
    "a format nobody asked for": (lambda m: m.update(dispatch_quant="fp8_token", sizes=m["sizes"] | {"dispatch": 20}),
                                  "field options.dispatch_quant is None, expected 'fp8_token', the dispatch_quant"),
    "sums nobody asked for": (lambda m: m.update(combine_dtype="float32"), "options.combine_dtype is None, expected '"),
    "device": (to("device", "mars"), "field device is 'mars', expected cpu or cuda"),
    "clocks of three hosts": (within("clock", "hosts", 2), "clock.comparable is True, expected False with clock.hosts"),
    "more hosts than ranks": (lambda m: m["clock"].update(hosts=3, comparable=False), "hosts is 3, expected at most w"),
    "a clock that differs from itself": (within("clock", "comparable", False), "expected True with clock.hosts 1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", META)
def test_a_meta_that_does_not_fit_is_refused(write, kind):
    change, message = META[kind]
    with pytest.raises(TraceError, match=message):
        Trace.load(write(meta=change))


@pytest.mark.parametrize("capacity", [None, -1, 2**40])
def test_fixed_places_are_as_many_as_the_run_asked_for(write, capacity):
    told = {"shape": "low_latency", "backend": "deepep_low_latency", "capacity": 8}
    assert len(Trace.load(write(**told))) == 12
    told_none = f"field capacity is {capacity}, expected 8, the run's max_num_batched_tokens"
    with pytest.raises(TraceError, match=told_none):
        Trace.load(write(meta=to("capacity", capacity), **told))


def test_memory_of_peers_is_not_reached_over_gloo(write):
    told = {"shape": "one_sided", "backend": "flashinfer_nvlink_one_sided", "capacity": 8}
    assert len(Trace.load(write(**told))) == 12
    with pytest.raises(TraceError, match="field transport is 'gloo': one_sided writes into the memory of its peers"):
        Trace.load(write(meta=to("transport", "gloo"), **told))
