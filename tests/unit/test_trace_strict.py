"""Every kind of damage to a trace folder is refused by name: which file, which column, both values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from trace_cases import meta_of, rank_tensors, write_file, write_meta

from moe_course.errors import TraceError
from moe_course.trace import Trace
from moe_course.trace.record import Recorder
from moe_course.trace.schema import COLUMNS
from moe_course.trace.trace import write_rank

E, RANKS = 6, 2
NAN = float("nan")


def columns_of(rank: int) -> dict[str, torch.Tensor]:
    """Two rows with two routes each."""
    return {"row": torch.tensor([0, 0, 1, 1]), "k": torch.tensor([0, 1, 0, 1]), "layer": torch.ones(4).long(),
            "expert": torch.tensor([rank, 5, 3, 2]), "weight": torch.full((4,), 0.5)}  # fmt: skip


def tensors_of(rank: int, values: bool) -> dict[str, torch.Tensor]:
    found = rank_tensors(rank, RANKS, E, columns_of(rank))
    found |= {"span_begin_ns": torch.tensor([1, 5]), "span_end_ns": torch.tensor([5, 9])}
    found |= {f"span_{name}": torch.zeros(2).long() for name in ("step", "stage")} | {
        "span_layer": torch.ones(2).long()
    }
    if values:
        found |= {"contribution": torch.rand(4, 16), "output": torch.rand(2, 16), "output_row": torch.arange(2)}
        found |= {"output_step": torch.zeros(2).long(), "output_layer": torch.ones(2).long()}
    return found


@pytest.fixture
def write(tmp_path):
    """Write a correct folder with rank 1's tensors and the meta changed; returns the folder."""

    def write(change=lambda tensors: None, meta=None, values: bool = True) -> Path:
        for rank in range(RANKS):
            tensors = tensors_of(rank, values)
            if rank == 1:
                change(tensors)
            write_file(tmp_path, rank, tensors)
        write_meta(tmp_path, meta_of(RANKS, E), [4, 4], values)
        if meta is not None:
            content = json.loads((tmp_path / "meta.json").read_text())
            meta(content)
            (tmp_path / "meta.json").write_text(json.dumps(content))
        return tmp_path

    return write


def put(name: str, at, value):
    def change(tensors):
        tensors[name][at] = value

    return change


def replace_by(name: str, make):
    def change(tensors):
        tensors[name] = make(tensors[name])

    return change


DAMAGE = {
    "missing column": (lambda t: t.pop("via_rank"), "column via_rank is missing; it has contribution, expert, "),
    "missing span": (lambda t: t.pop("span_stage"), "column span_stage is missing"),
    "missing output": (lambda t: t.pop("output"), "column output is missing"),
    "unknown column": (lambda t: t.update(extra=torch.zeros(4)), "column extra is not known; known: contribution, "),
    "wrong dtype": (replace_by("expert", torch.Tensor.int), "column expert is torch.int32, expected torch.int64"),
    "wrong weight dtype": (replace_by("weight", torch.Tensor.double), "column weight is torch.float64, expected torch"),
    "wrong shape": (replace_by("row", lambda t: t.view(2, 2)), r"column row has shape \[2, 2\], expected \['n'\]"),
    "wrong width": (replace_by("output", lambda t: t[:, :8].contiguous()), r"\[2, 8\], expected \['n', 16\]"),
    "length": (replace_by("k", lambda t: t[:3].clone()), "column k has 3 entries, expected 4"),
    "span length": (replace_by("span_step", lambda t: t[:1].clone()), "column span_layer has 2 entries, expected 1"),
    "a route was lost": (lambda t: t.update({n: t[n][:3].clone() for n in (*COLUMNS, "contribution")}),
                         "column step has 3 entries, expected 4"),
    "expert out of range": (put("expert", 2, 6), "column expert, entry 2, is 6, expected 0 to 5"),
    "expert of -1": (put("expert", 2, -1), "column expert, entry 2, is -1, expected 0 to 5"),
    "k out of range": (put("k", 1, 6), "column k, entry 1, is 6, expected 0 to 5"),
    "another rank's rows": (put("source_rank", 0, 0), "column source_rank, entry 0, is 0, expected 1 to 1"),
    "owner contradicts the plan": (put("owner_rank", 1, 0),
                                   r"column owner_rank, entry 1, is 0 for expert 5; the plan \(linear, 2 EP .* says 1"),
    "local id contradicts the plan": (put("local_expert", 3, 0),
                                      "column local_expert, entry 3, is 0 for expert 2; the plan .* says 2"),
    "NaN weight": (put("weight", 1, NAN), "column weight, entry 1, holds nan, expected finite numbers"),
    "NaN contribution": (put("contribution", (2, 7), NAN), "column contribution, entry 2, holds nan"),
    "infinite output": (put("output", (1, 0), float("inf")), "column output, entry 1, holds inf, expected finite"),
    "a route twice": (put("k", 1, 0), "column k has 2 entries of 0 for row 0 of step 0, layer 1, expected 1"),
    "prompt that was not given": (put("prompt", 0, 1), "column prompt, entry 0, is 1, expected 0 to 0"),
    "position behind the text": (put("position", 0, 65), "column position, entry 0, is 65, expected 0 to 64"),
    "position behind its own text": (put("position", 0, 65), "column position, entry 0, is 65"),
    "another token": (put("token_id", 2, 7), "column token_id, entry 2, is 7; position 1 of prompt 0 is token 1"),
    "a place nobody said": (put("receive_row", 1, -1), "column receive_row, entry 1, is -1, expected 0 or more: val"),
    "no place to leave from": (put("send_row", 3, -1), "column send_row, entry 3, is -1, expected 0 or more"),
    "stage": (put("span_stage", 1, 5), "column span_stage, entry 1, is 5, expected 0 to 4"),
    "time runs backwards": (put("span_begin_ns", 1, 4), "column span_begin_ns, entry 1, is 4: before the span ahead"),
    "a pass left out": (put("span_step", 1, 2), "column span_step, entry 1, is 2, expected 0 or 1: passes come one"),
    "first pass left out": (put("span_step", slice(0, 2), 1), "column span_step, entry 0, is 1, expected 0$"),
    "a layer that was not entered": (put("layer", 3, 9), "entry 3, are 0 and 9: the rank has no span there; it"),
    "a pass that was not made": (put("step", 3, 1), r"entry 3, are 1 and 1: .* layers \[1\] in 1 passes"),
    "a stage without a layer": (put("span_layer", 0, -1), "column span_layer, entry 0, is -1 in stage 'route', exp"),
    "a row of two tokens": (lambda t: (put("position", 3, 2)(t), put("token_id", 3, 2)(t)),
                            r"columns prompt and position of row 1 of step 0 are \(0, 1\) and \(0, 2\); a row is one"),
    "a token in two rows": (lambda t: (put("position", slice(2, 4), 0)(t), put("token_id", slice(2, 4), 0)(t)),
                            "column row has 2 rows of step 0 for position 0 of prompt 0, expected 1"),
    "ends before it begins": (put("span_end_ns", 1, 4), "entry 1, is 5: .* after its own end 4"),
}  # fmt: skip


def test_what_is_whole_is_read(write):
    trace = Trace.load(write())
    assert len(trace) == 8 and len(trace.ranks) == 2
    assert trace.spans(1)["span_end_ns"].tolist() == [5, 9]
    assert trace.values(0)["contribution"].shape == (4, 16)
    assert len(Trace.load(write(values=False))) == 8

    def leave(tensors):  # a rank that had no rows
        tensors |= {name: tensor[:0].clone() for name, tensor in tensors.items()}

    assert len(Trace.load(write(leave, to("routes", [4, 0])))) == 4
    with pytest.raises(TraceError, match="no column 'owner'; it has step, layer"):
        trace.where(owner=1)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_columns_are_refused(write, kind):
    change, message = DAMAGE[kind]
    with pytest.raises(TraceError, match=message) as refused:
        Trace.load(write(change))
    assert "rank0001.safetensors" in str(refused.value)


def to(name, value):
    return lambda meta: meta.update({name: value})


def within(outer, name, value):
    return lambda meta: meta[outer].update({name: value})


META = {
    "no such backend": (to("backend", "pigeons"), "field backend is 'pigeons' and shape is 'all_to_all': no backend"),
    "backend of another shape": (to("backend", "deepep_v2"), "shape is 'all_to_all': it runs as 'two_hop'"),
    "another schema": (to("schema", "moe_course.trace/2"), "schema is 'moe_course.trace/2', this version reads 'moe_c"),
    "missing field": (lambda meta: meta.pop("backend"), "field backend is missing"),
    "unknown field": (to("surplus", 1), "field surplus is not known"),
    "type": (to("hidden_size", "16"), "field hidden_size is '16', expected int"),
    "not a flag": (to("values", 1), "field values is 1, expected bool"),
    "null": (to("capacity", "many"), "field capacity is 'many', expected int or null"),
    "more ranks than files": (lambda m: m.update(world_size=3, plan=m["plan"] | {"world_size": 3}, routes=[4] * 3),
                              "rank0002.safetensors is missing: meta.json says world_size 3, there are 2 files"),
    "two numbers of ranks": (to("world_size", 3), "the number of ranks differs: {'world_size': 3, 'plan.world_size': "),
    "fewer ranks than files": (lambda m: m.update(world_size=1, plan=m["plan"] | {"world_size": 1}, routes=[4]),
                               "rank0001.safetensors belongs to no rank: meta.json says world_size 1"),
    "routes": (to("routes", [4, 5]), "rank0001.safetensors: column step has 4 entries, expected 5"),
    "no values": (to("values", False), r"column contribution is not known \(meta.json says values: false\)"),
    "plan": (lambda meta: meta["plan"].pop("placement"), "field plan has no placement; it has world_size, "),
    "experts": (to("experts", 7), r"plan.experts_per_rank is \[3, 3\], 7 experts placed linear .* are \[4, 3\]"),
    "strategy": (lambda meta: meta["plan"].update(placement="magic"), "plan cannot be read: .*magic"),
    "sizes": (to("sizes", {"dispatch": 4}), "field sizes has no partial; it has dispatch"),
    "prompt": (to("prompts", ["x"]), "prompt 0 is 'x', expected its text and its tokens"),
    "texts": (to("new_tokens", []), "1 prompts, and new_tokens of 0"),
    "dtype": (to("rows_dtype", "load"), "field rows_dtype is 'load', expected float32 or bfloat16"),
    "dtype home": (to("combine_dtype", "zz"), "field combine_dtype is 'zz', expected auto or float32 or bfloat16"),
    "shape": (to("shape", "nope"), "field shape is 'nope', expected no_dp_ep or allgather_reducescatter or "),
    "reduce group": (within("plan", "reduce_group", "zz"), "field plan.reduce_group is 'zz', expected null or dp or "),
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
    "text of a token": (to("token_text", {"5": 3}), r"field token_text\['5'\] is 3, expected the text of a token"),
    "routes of text": (to("routes", ["4", 4]), r"field routes is \['4', 4\], expected a list with a number for each"),
    "experts without end": (to("experts", 2**40), "field experts is 1099511627776, expected 1 to 65536"),
    "no experts": (to("top_k", 0), "field top_k is 0, expected 1 to 65536"),
    "reduced in no node": (to("reduce_in_node", True), "reduce_in_node is True and shape is 'all_to_all', expected"),
}  # fmt: skip


@pytest.mark.parametrize("kind", META)
def test_a_meta_that_does_not_fit_is_refused(write, kind):
    change, message = META[kind]
    with pytest.raises(TraceError, match=message):
        Trace.load(write(meta=change))


def test_a_dispatch_of_ones_own_leaves_all_places_open(write):
    def leave_open(tensors):
        tensors |= {name: torch.full_like(tensors[name], -1) for name in ("send_row", "receive_row")}

    assert len(Trace.load(write(leave_open, values=False))) == 8
    with pytest.raises(TraceError, match="column send_row, entry 0, is -1, expected 0 or more: values are recorded"):
        Trace.load(write(leave_open))
    with pytest.raises(TraceError, match="receive_row, entry 1, is -1, .* more: places of other routes are known"):
        Trace.load(write(put("receive_row", 1, -1), values=False))


def test_a_new_recording_takes_the_figures_of_an_earlier_one_away(tmp_path):
    """Else a run that fails leaves a folder with the text of another."""
    for name in ("meta.json", "run.json"):
        (tmp_path / name).write_text("{}")
    write_rank(tmp_path, 1, Recorder(), {})
    assert {path.name for path in tmp_path.iterdir()} == {"meta.json", "run.json", "rank0001.safetensors"}
    write_rank(tmp_path, 0, Recorder(), {})
    assert {path.name for path in tmp_path.iterdir()} == {"rank0000.safetensors", "rank0001.safetensors"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


FILES = {
    "truncated": (lambda f: cut(f / "rank0001.safetensors"), "rank0001.safetensors of rank 1 cannot be read"),
    "empty": (lambda f: (f / "rank0000.safetensors").write_bytes(b""), "rank0000.safetensors of rank 0 cannot be read"),
    "text": (lambda f: (f / "rank0000.safetensors").write_text("hello"), "rank0000.safetensors of rank 0 cannot be"),
    "gone": (lambda f: (f / "rank0000.safetensors").unlink(), "rank0000.safetensors is missing: .* there are 1 files"),
    "one too many": (lambda f: (f / "rank0007.safetensors").write_bytes(b""), "rank0007.safetensors belongs to no ran"),
    "two swapped": (lambda f: swap(f / "rank0000.safetensors", f / "rank0001.safetensors"),
                    "rank0000.safetensors: column source_rank, entry 0, is 1, expected 0 to 0"),
    "no meta": (lambda f: (f / "meta.json").unlink(), "no readable meta.json"),
    "meta that is no JSON": (lambda f: (f / "meta.json").write_text("{"), "no readable meta.json"),
    "meta that is a list": (lambda f: (f / "meta.json").write_text("[]"), r"schema is \[\]"),
    "meta without end": (lambda f: (f / "meta.json").write_text("[" * 100_000), "no readable meta.json"),
    "meta of bytes": (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe"), "no readable meta.json"),
    "no folder": (lambda f: f.rename(f.with_name("elsewhere")), "no readable meta.json"),
}  # fmt: skip


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_refused(write, kind):
    change, message = FILES[kind]
    folder = write()
    change(folder)
    with pytest.raises(TraceError, match=message):
        Trace.load(folder)
