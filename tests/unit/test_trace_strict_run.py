"""What only all files together can tell: nothing is lost, nothing is there twice, and places are those of the shape."""

from __future__ import annotations

import json

import pytest
import torch
from trace_cases import both, change_folder, put

from moe_course.backends import BACKENDS
from moe_course.backends.capabilities import SHAPES, names_of
from moe_course.errors import TraceError
from moe_course.options import RunOptions
from moe_course.trace import Trace
from moe_course.trace.schema import COLUMNS, LOOSE, SPANS
from moe_course.trace.simulate import run_here
from moe_course.trace.strict.rows import planned_rows, prefill_passes
from moe_course.trace.strict.run import check_owners

MOVING = sorted(set(BACKENDS) - {"no_dp_ep"})


def leave_out(which):
    """A change of rank 1: routes for which `which(columns)` holds are gone, and nothing else tells of them."""

    def change(tensors):
        keep = ~which(tensors)
        tensors |= {name: tensors[name][keep].clone() for name in (*COLUMNS, "contribution")}

    return change


LOST = {
    "one route": (
        lambda t: (t["row"] == 1) & (t["k"] == 1) & (t["step"] == 0),
        "k = 1 for row 1 of step 0, layer 1; 5 ",
    ),
    "the last route": (
        lambda t: (t["step"] == 1) & (t["k"] == 1),
        "k = 1 for row 0 of step 1, layer 1; 5 routes, expec",
    ),
    "a row": (lambda t: (t["row"] == 0) & (t["step"] == 0), "k = 0 for row 0 of step 0, layer 1; 4 routes, expected 6"),
    "a pass": (lambda t: t["step"] == 1, "k = 0 for row 0 of step 1, layer 1; 4 routes, expected 6"),
    "all": (lambda t: t["step"] >= 0, "k = 0 for row 0 of step 0, layer 1; 0 routes, expected 6: top_k is 2"),
}


@pytest.mark.parametrize("what", LOST)
def test_routes_that_nobody_left_out_are_missed(tmp_path, what):
    which, message = LOST[what]
    with pytest.raises(TraceError, match=f"rank0001.safetensors: no route of {message}"):
        Trace.load(lost(tmp_path, which))


@pytest.mark.parametrize("option", LOOSE)
def test_a_router_of_ones_own_may_leave_routes_out(tmp_path, option):
    """Its last route has no place in the middle of the others, so that theirs stay."""
    folder = lost(tmp_path, LOST["the last route"][0], options={option: "x"})
    assert len(Trace.load(folder)) == 11


def lost(folder, which, **options):
    def count(meta):
        meta["routes"][1] = 6 - int(which(rank_one).sum())

    rank_one = {"row": torch.tensor([0, 0, 1, 1, 0, 0]), "step": torch.tensor([0, 0, 0, 0, 1, 1]),
                "k": torch.tensor([0, 1] * 3)}  # fmt: skip
    return change_folder(folder, leave_out(which), count, **options)


def test_an_expert_twice_and_a_weight_below_zero_need_a_router_of_ones_own(tmp_path):
    twice = both(put("expert", 5, 4), put("owner_rank", 5, 1), put("local_expert", 5, 1))
    with pytest.raises(TraceError, match="column expert has 2 of 4 for row 0 of step 1, layer 1, expected 1"):
        Trace.load(change_folder(tmp_path, twice))
    with pytest.raises(TraceError, match="column weight is -5 for row 1 of step 0, layer 1, expected 0 or more"):
        Trace.load(change_folder(tmp_path, put("weight", 2, -5.0)))
    own = {"options": {"stages": "my_moe"}}
    assert len(Trace.load(change_folder(tmp_path, put("weight", 2, -5.0), **own))) == 12


def told(shape: str) -> dict:
    fixed = {"capacity": 4} if SHAPES[shape].fixed else {}
    return {"shape": shape, "backend": names_of(shape)[0], "plan": {"nodes": [1, 1]} | group(shape)} | fixed


def group(shape: str) -> dict:
    return {"dispatch_group": "ep" if SHAPES[shape].over_ep else "dp"}


@pytest.mark.parametrize("shape", MOVING)
@pytest.mark.parametrize("name", ["send_row", "receive_row", "via_rank"])
def test_a_place_belongs_to_its_shape(tmp_path, shape, name):
    assert len(Trace.load(change_folder(tmp_path, **told(shape)))) == 12

    def elsewhere(tensors):  # -1 is nobody, and everybody else is wrong in shapes that do not forward
        tensors[name][2] = 1 - tensors[name][2] if name == "via_rank" and shape == "two_hop" else tensors[name][2] + 1

    with pytest.raises(TraceError, match=f"rank0001.*column {name}, entry 2, is .*: where {shape} puts the route"):
        Trace.load(change_folder(tmp_path, elsewhere, **told(shape)))


@pytest.mark.parametrize("shape", ["all_to_all", "low_latency"])
def test_routes_of_a_shape_with_a_place_for_each_do_not_share_one(tmp_path, shape):
    with pytest.raises(TraceError, match="column receive_row, entry"):
        Trace.load(change_folder(tmp_path, put("receive_row", slice(0, 6), 0), **told(shape)))


def test_rows_go_to_no_rank_outside_their_group(tmp_path):
    """TP ranks share rows, and each of them takes its part to the owners in its own data-parallel group."""
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "sequence_parallel_moe": False}
    trace = run_here(RunOptions(prompts=PROMPTS[1:3], max_new_tokens=1, **sizes, **EP))
    columns, meta = trace.columns, trace.meta
    parts = [{name: columns[name][columns["source_rank"] == rank] for name in COLUMNS} for rank in range(4)]
    check_owners(tmp_path, meta, parts)
    parts[2]["owner_rank"] = torch.where(parts[2]["owner_rank"] == 0, 3, parts[2]["owner_rank"])
    with pytest.raises(TraceError, match=r"rank0002.*owner_rank, entry \d+, is 3, expected one of \[0, 2\]: rank 2"):
        check_owners(tmp_path, meta, parts)


def test_time_stamps_end_within_a_run(tmp_path):
    def late(tensors):
        tensors["span_end_ns"][-1] = 2**63 - 1

    with pytest.raises(
        TraceError, match="spans from 1 to 9223372036854775807 ns are 106752 days, expected less than 104"
    ):
        Trace.load(change_folder(tmp_path, late))

    def away(tensors):  # another host's clock
        tensors |= {name: tensors[name] + (2**60 if name.endswith("_ns") else 0) for name in SPANS}

    with pytest.raises(TraceError, match="a time stamp is damaged, or clocks do not compare"):
        Trace.load(change_folder(tmp_path, away))
    Trace.load(change_folder(tmp_path, away, lambda meta: meta["clock"].update(hosts=2, comparable=False)))


# -- the rows of a run are known before it is made ---------------------------------------------------------------------

PROMPTS = ("def (", "x", "ö = 1", "if", "y")
EP = {"enable_expert_parallel": True}
RUNS = {
    "parts": {"world_size": 2, "all2all_backend": "deepep_low_latency", "max_num_batched_tokens": 4},
    "parts, split": {"tensor_parallel_size": 2, "data_parallel_size": 2, "all2all_backend": "deepep_low_latency",
                     "max_num_batched_tokens": 5} | EP,
    "parts, PCP": {"prefill_context_parallel_size": 2, "all2all_backend": "nixl_ep", "max_num_batched_tokens": 6} | EP,
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_rows_of_a_run_are_those_that_its_meta_says(name):
    trace = run_here(RunOptions(prompts=PROMPTS, max_new_tokens=2, **RUNS[name]))
    recorded = set(zip(*(trace.columns[n].tolist() for n in ("source_rank", "step", "row", "prompt", "position")),
                       strict=True))  # fmt: skip
    planned = {
        (rank, step, row, *place)
        for rank, passes in enumerate(planned_rows(trace.meta))
        for step, rows in enumerate(passes)
        for row, place in enumerate(rows)
    }
    assert recorded == planned
    assert trace.meta["prefill_passes"] == prefill_passes(trace.meta) > 1


def test_prompts_end_one_after_the_other(tmp_path, monkeypatch):
    """With `--stop-at-eos` a prompt that has ended brings no more rows, and the others close up."""
    import moe_course.job as job

    def load(*given):
        tokenizer = real(*given)
        monkeypatch.setattr(type(tokenizer), "eos_token_id", ord("e"), raising=False)
        return tokenizer

    real = job.load_tokenizer
    monkeypatch.setattr(job, "load_tokenizer", load)
    options = {"world_size": 2, "stop_at_eos": True, "temperature": 2.0, "max_new_tokens": 24}
    trace = run_here(RunOptions(prompts=PROMPTS, **options))
    lengths = [len(new) for new in trace.meta["new_tokens"]]
    assert len(set(lengths)) > 2 and len(planned_rows(trace.meta)[0]) == max(lengths)


def test_what_own_stages_left_out_of_a_rehearsal_is_read():
    from moe_course.lessons.rehearsal import rehearse
    from moe_course.router import route
    from moe_course.stages import Stages

    def lazy(hidden_states, gate_weight, bias, config):
        weights, ids = route(hidden_states, gate_weight, bias, config)
        return weights, torch.where(torch.arange(ids.shape[1]) == 2, -1, ids)

    trace = rehearse(["ab", "c"], 2, 2, stages=Stages(route=lazy)).trace
    rows = sum(len(found) for passes in planned_rows(trace.meta) for found in passes)
    assert len(trace) == rows * 2 * 7 > 0 and 2 not in trace.columns["k"]
    assert "lazy" in json.dumps(trace.meta["options"])
