"""The player's data against the run it comes from: tokens, routes, and rows on the wire as the ledger counted them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from layer_cases import fixed_route, make_batch, make_config, make_layer, make_weights

from moe_course import viz
from moe_course.backends import BACKENDS
from moe_course.backends.configure import configure
from moe_course.comm.ledger import Ledger
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError, TraceError
from moe_course.expert_map import make_placement
from moe_course.trace.record import COLUMNS, Recorder
from moe_course.trace.trace import Trace
from moe_course.viz.flow_data import flow_data
from moe_course.viz.token_flow_pen import Pen
from moe_course.viz.token_flow_still import DISPATCH

EXPERTS, TOP_K, HIDDEN, CAPACITY = 8, 2, 64, 8
#: Rows of each rank: ragged, with an empty rank, and on uneven nodes.
COUNTS, NODES = [3, 0, 5, 2], (3, 1)
SHAPES = sorted(name for name in BACKENDS if name != "no_dp_ep")


def record(
    shape: str,
    counts: list[int] = COUNTS,
    nodes: tuple[int, ...] = NODES,
    dtype: torch.dtype = torch.float32,
    **options,
) -> tuple[Trace, Ledger]:
    """One layer of one step on threads, recorded; and what its ledger counted."""
    ranks = len(counts)
    weights = make_weights(make_config(EXPERTS, TOP_K, HIDDEN, 48), dtype)
    placement = make_placement(ranks, EXPERTS, ranks_per_node=nodes)
    shared = shape == "no_dp_ep"  # all ranks hold the same rows
    batch = make_batch(counts[:1] if shared else counts, weights.config, dtype, seed=3)
    fixed = {"max_num_tokens": CAPACITY} if hasattr(BACKENDS[shape], "MAX_NUM_TOKENS") else {}
    module = configure(shape, **fixed, **options)

    def rank_function(comm):
        mine, recorder = 0 if shared else comm.rank, Recorder()
        stages = fixed_route(batch.topk_weights[mine], batch.topk_ids[mine])
        layer = make_layer(weights, placement, comm, module, stages=stages, shared=False, layer=1, on_event=recorder)
        rows = batch.hidden_states[mine]
        recorder.on_pass(0, torch.arange(len(rows)) + 65, [(mine, position) for position in range(len(rows))])
        comm.step, comm.ledger = 0, Ledger()
        layer(rows)
        ledger, comm.ledger = comm.ledger, Ledger()
        return recorder.columns(), ledger

    found = run_threads(ranks, rank_function)
    columns = {name: torch.cat([columns[name] for columns, _ in found]) for name in COLUMNS}
    prompts = counts[:1] if shared else counts
    meta = {
        "world_size": ranks, "experts": EXPERTS, "top_k": TOP_K, "backend": shape, "shape": shape,
        "transport": "threads", "hidden_size": HIDDEN, "rows_dtype": str(dtype).removeprefix("torch."),
        "sizes": {"dispatch": HIDDEN * dtype.itemsize, "partial": HIDDEN * 4, "contribution": HIDDEN * dtype.itemsize},
        "capacity": module.capacity, "prefill_passes": 1, "token_text": {},
        "reduce_in_node": options.get("reduce_in_node", False),
        "prompts": [{"prompt": "x", "tokens": [*range(65, 65 + n)]} for n in prompts],
        "new_tokens": [[33] for _ in prompts],
        "plan": {
            "ep_size": ranks, "placement": "linear", "nodes": list(nodes), "dp": 1 if shared else ranks,
            "tp": ranks if shared else 1, "dispatch_group": None if shared else "ep",
            "reduce_group": "tp" if shared else None, "split_group": None,
        },
    }  # fmt: skip
    return Trace(meta, columns), Ledger.merge(ledger for _, ledger in found)


def counted(ledger: Ledger) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Rows, payload and padding from rank to rank, both ways together, as the ledger has them."""
    found: dict = {}
    for (_, _, source, destination), entry in ledger.entries.items():
        rows, payload, padding = found.get((source, destination), (0, 0, 0))
        found[source, destination] = (rows + entry.rows, payload + entry.payload, padding + entry.padding)
    return {pair: numbers for pair, numbers in found.items() if any(numbers) and pair[0] != pair[1]}


def shown(data: dict) -> dict[tuple[int, int], tuple[int, int, int]]:
    """The same from the picture's data."""
    found: dict = {}
    for way, width in (("dispatch", data["row_bytes"]), ("combine", data["partial_bytes"])):
        for source, destination, n, empty, nbytes in data["passes"][0]["wire"][way]:
            assert source != destination and nbytes == n * width
            rows, payload, padding = found.get((source, destination), (0, 0, 0))
            found[source, destination] = (rows + n, payload + nbytes, padding + empty * width)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "counts, dtype", [(COUNTS, torch.float32), ([0, 0, 1, 0], torch.float32), (COUNTS, torch.bfloat16)],
    ids=["ragged", "one row", "bf16, where sums are wider than rows"],
)  # fmt: skip
def test_rows_on_the_wire_are_those_of_the_ledger(shape, counts, dtype):
    trace, ledger = record(shape, counts, dtype=dtype)
    wire, expected = shown(flow_data(trace)), counted(ledger)
    if shape == "one_sided":  # its ledger pads each row to 16 bytes, the picture counts rows
        wire, expected = ({pair: n[:2] for pair, n in found.items()} for found in (wire, expected))
    assert wire == expected


def test_two_hops_with_sums_in_the_node_are_counted_as_such():
    trace, ledger = record("two_hop", reduce_in_node=True)
    assert shown(flow_data(trace)) == counted(ledger)


def test_ranks_that_share_rows_move_partial_sums_and_no_rows():
    trace, ledger = record("no_dp_ep", [5, 5, 5], (3,))
    data = flow_data(trace)
    assert data["passes"][0]["wire"]["dispatch"] == []
    assert shown(data) == counted(ledger) != {}
    tokens = data["passes"][0]["tokens"]  # every rank holds every row, also those it has no expert for
    assert [(token["rank"], token["row"]) for token in tokens] == [(rank, row) for rank in range(3) for row in range(5)]
    assert "3 ranks, 5 tokens, 10 routes" in viz.token_flow(trace).text()


@pytest.mark.parametrize("kind, after", [("split_group", "gather"), ("reduce_group", "sum"), (None, None)])
def test_what_follows_a_combine_is_counted_and_named(kind, after):
    trace, _ = record("all_to_all")
    meta = trace.meta | {"plan": trace.meta["plan"] | ({kind: "dp"} if kind else {})}
    plain, data = flow_data(trace), flow_data(Trace(meta, trace.columns))
    rows = [sum(n for _, _, n, *_ in one["passes"][0]["wire"]["combine"]) for one in (plain, data)]
    assert data["after"] == after and plain["after"] is None
    assert (rows[1] > rows[0]) == bool(after)


def test_shared_memory_sends_no_empty_places():
    trace, _ = record("low_latency")
    memory = Trace(trace.meta | {"transport": "shm"}, trace.columns)
    padding = [sum(entry[3] for entry in flow_data(t)["passes"][0]["wire"]["dispatch"]) for t in (trace, memory)]
    assert padding[0] > 0 == padding[1]
    assert flow_data(memory)["capacity"] == CAPACITY


@pytest.mark.parametrize("shape", SHAPES)
def test_routes_and_tokens_are_those_of_the_trace(shape):
    trace, _ = record(shape)
    data = flow_data(trace)
    (only,) = data["passes"]
    tokens, routes = only["tokens"], only["routes"]
    rows = [
        (tokens[token]["rank"], tokens[token]["row"], *rest)
        for token, *rest in zip(*(routes[name] for name in ("token", "k", "expert", "owner")), strict=True)
    ]
    names = ("source_rank", "row", "k", "expert", "owner_rank")
    expected = sorted(zip(*(trace.columns[name].tolist() for name in names), strict=True))
    assert rows == expected
    assert Counter(token["rank"] for token in tokens) == {rank: n for rank, n in enumerate(COUNTS) if n}
    assert [data["owner"][expert] for expert in routes["expert"]] == routes["owner"]
    assert routes["weight"] == pytest.approx(
        [r["weight"] for r in sorted(trace.routes(), key=lambda r: (r["source_rank"], r["row"], r["k"]))], abs=1e-4
    )


def test_fields_are_the_schema():
    data = flow_data(record("two_hop")[0])
    assert data["schema"] == "moe_course.flow/1"
    assert list(data) == [
        "schema", "ranks", "experts", "owner", "backend", "shape", "transport", "nodes", "capacity", "reduce_in_node",
        "reduce", "after", "row_bytes", "partial_bytes", "prompts", "passes",
    ]  # fmt: skip
    (only,) = data["passes"]
    assert list(only) == ["step", "layer", "phase", "tokens", "routes", "wire"]
    assert list(only["tokens"][0]) == ["rank", "row", "text", "prompt", "position"]
    assert list(only["routes"]) == ["token", "k", "expert", "weight", "owner", "send_row", "receive_row", "via"]
    assert max(only["routes"]["via"]) >= 0 and json.loads(json.dumps(data)) == data


def several_steps() -> Trace:
    """Two layers, one step of prefill and one of decoding, of one prompt on two ranks."""
    n = 8
    columns = {name: torch.zeros(n, dtype=torch.int64) for name in COLUMNS} | {"weight": torch.full((n,), 0.5)}
    columns |= {
        "step": torch.tensor([1, 1, 0, 0, 0, 0, 1, 1]),
        "layer": torch.tensor([2, 2, 1, 1, 2, 2, 1, 1]),
        "k": torch.tensor([1, 0] * 4),
        "expert": torch.tensor([0, 5] * 4),
        "owner_rank": torch.tensor([0, 1] * 4),
        "position": torch.tensor([4, 4, 0, 0, 0, 0, 4, 4]),
    }
    trace, _ = record("all_to_all", [1, 0], (2,))
    text = "é\n<"  # 3 characters, 4 bytes
    prompts = [{"prompt": text, "tokens": [*text.encode()]}]
    return Trace(trace.meta | {"prompts": prompts, "new_tokens": [[0, 200]]}, columns)


def test_prompts_have_their_rank_and_how_they_go_on():
    (only,) = flow_data(several_steps())["prompts"]
    assert only == {"text": "é\n<", "length": 4, "rank": 0, "continuation": "\0\\xc8"}
    assert [prompt["rank"] for prompt in flow_data(record("two_hop")[0])["prompts"]] == [0, 1, 2, 3]


def test_steps_and_layers_are_chosen_and_in_order():
    trace = several_steps()
    every = [(p["step"], p["layer"], p["phase"]) for p in flow_data(trace)["passes"]]
    assert every == [(0, 1, "prefill"), (0, 2, "prefill"), (1, 1, "decode"), (1, 2, "decode")]
    assert flow_data(trace)["passes"][3]["routes"]["k"] == [0, 1]  # written as 1, 0
    assert [(p["step"], p["layer"]) for p in flow_data(trace, steps=[1], layers=range(2, 9))["passes"]] == [(1, 2)]
    with pytest.raises(ConfigError, match=r"step in \[7\] and layer in any; this trace has steps 0–1 and layers 1–2"):
        flow_data(trace, steps=[7])


def test_tokens_can_be_seen():
    trace = several_steps()
    texts = []
    for position in range(6):
        columns = trace.columns | {"position": torch.full((8,), position)}
        texts.append(flow_data(Trace(trace.meta, columns))["passes"][0]["tokens"][0]["text"])
    assert texts == ["é₁", "é₂", "\\n", "<", "·start", "\\xc8"]
    told = {"token_text": {"195": " the", "169": "\u202e"}, "new_tokens": [[900, 901]]}
    data = flow_data(Trace(trace.meta | told, trace.columns))
    assert [data["passes"][number]["tokens"][0]["text"] for number in (0, 2)] == ["␣the", "#900"]


def test_a_route_of_no_prompt_is_refused():
    trace = several_steps()
    with pytest.raises(TraceError, match="prompt 0, position 9; the prompts have .6. tokens"):
        flow_data(Trace(trace.meta, trace.columns | {"position": torch.full((8,), 9)}))


def test_line_of_text():
    trace = several_steps()
    picture = viz.token_flow(trace)
    assert (
        picture.text()
        == repr(picture)
        == (
            "TokenFlow: 2 ranks, 1 token, 2 routes in layer 1 step 0; 1 to another rank; routes per rank 1 1 "
            "(busiest: ranks 0, 1)"
        )
    )
    picture.state = {"step": 1, "layer": 2}
    assert "in layer 2 step 1;" in picture.text()


def test_still_is_the_same_small_file_each_time():
    first, second = (viz.token_flow(record("two_hop")[0], phase="dispatch").still() for _ in range(2))
    assert first == second and first.startswith(b"\x89PNG") and len(first) <= 80_000
    assert viz.token_flow(record("all_to_all")[0]).still() != first


@pytest.mark.parametrize("shape", BACKENDS)
def test_still_says_what_this_backend_does_with_rows(shape, monkeypatch):
    """All-gather brings every row to every rank; a word of ranks that own experts would be another backend's."""
    said = []
    monkeypatch.setattr(Pen, "text", lambda self, x, y, text, **look: said.append(text))
    viz.token_flow(record(shape, [5, 5, 5], (3,))[0]).still()
    found = [text for text in said if text in DISPATCH.values()]
    assert found == [DISPATCH[shape]] and len(set(DISPATCH.values())) == len(BACKENDS)
    wanted_only = any(word in found[0] for word in ("with one of its experts", "for each route", "for each node"))
    assert wanted_only == (shape not in ("allgather_reducescatter", "no_dp_ep"))
    browser = (Path(viz.__file__).parent / "token_flow_model.js").read_text()
    assert set(re.findall(r"^  (\w+): \"", browser.split("const TRAVEL")[1], re.M)) == set(BACKENDS)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("shape", [*SHAPES, "no_dp_ep", "two_hop with sums in the node"])
def test_rows_that_fly_are_those_on_the_wire(shape, tmp_path: Path):
    """The browser works out for itself which rows to draw: as many, between the same ranks, as the backend counts."""
    if shape == "no_dp_ep":
        trace, _ = record(shape, [5, 5, 5], (3,))
    elif shape.startswith("two_hop"):  # rows enough for some to have both experts on one other node
        trace, _ = record("two_hop", [6, 0, 9, 6], (2, 2), reduce_in_node=shape != "two_hop")
    else:
        trace, _ = record(shape)
    data = flow_data(trace)
    model = (Path(viz.__file__).parent / "token_flow_model.js").read_text()
    (tmp_path / "flow.mjs").write_text(
        f"{model}\nconst data = {json.dumps(data)};\nconst model = readPass(data, data.passes[0]);\n"
        "const found = travelling(data, model, () => true);\n"
        "console.log(JSON.stringify([found, [...model.load], model.busiest]));"
    )
    done = subprocess.run(["node", tmp_path / "flow.mjs"], capture_output=True, text=True, timeout=60, check=True)
    found, load, busiest = json.loads(done.stdout)
    for drawn, way in ((found["there"], "dispatch"), (found["home"], "combine")):
        expected: Counter = Counter()
        for source, destination, rows, _, _ in data["passes"][0]["wire"][way]:
            expected[source, destination] += rows
        assert Counter((source, destination) for _, source, destination, _, _ in drawn) == +expected, way
    owners = Counter(data["passes"][0]["routes"]["owner"])
    assert load == [owners[rank] for rank in range(data["ranks"])] and all(load[rank] == max(load) for rank in busiest)
