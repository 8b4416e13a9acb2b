"""A run is the same run on threads of one process; two traces are compared record by record."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_course.errors import TraceError
from moe_course.job import prepare
from moe_course.options import RunOptions
from moe_course.trace.meta import describe
from moe_course.trace.simulate import SHOWN, run_here, same, simulate

OPTIONS = RunOptions(
    prompts=("def f(", "x", "größe"), max_new_tokens=4, world_size=3, all2all_backend="two_hop", ranks_per_node="2,1",
    trace_values=True, temperature=0.7, seed=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    return run_here(OPTIONS)


def changed(trace, name, at, value):
    column = trace.columns[name].clone()
    column[at] = value
    return replace(trace, columns=trace.columns | {name: column})


def test_the_same_options_give_the_same_records(recorded):
    again = simulate(recorded)
    assert same(recorded, again) == []
    assert again.meta["options"] == recorded.meta["options"] and again.meta["plan"] == recorded.meta["plan"]
    assert again.meta["options"] == {
        "world_size": 3, "prompts": list(OPTIONS.prompts), "max_new_tokens": 4, "all2all_backend": "two_hop",
        "ranks_per_node": "2,1", "temperature": 0.7, "seed": 3, "device": "cpu",
    }  # fmt: skip
    assert again.meta["transport"] == "threads" and (again.columns["via_rank"] >= 0).all()


def test_another_backend_differs_in_its_places_and_in_nothing_else(recorded):
    other = run_here(replace(OPTIONS, all2all_backend="all_to_all", ranks_per_node=None))
    found = same(recorded, other)
    assert found[0] == "backend: 'two_hop' and 'all_to_all'"
    kinds = {line.split(":")[0].split(" of ")[0] for line in found[1:]}
    assert kinds == {"send_row", "receive_row", "via_rank"}
    for rank in range(3):  # and both sum up to the same bits
        assert torch.equal(recorded.values(rank)["output"], other.values(rank)["output"])


@pytest.mark.parametrize("name", ["expert", "token_id", "send_row", "receive_row", "prompt", "position"])
def test_one_wrong_record_is_named(recorded, name):
    value = int(recorded.columns[name][77])
    wrong = changed(recorded, name, 77, value + 1)
    (found,) = same(recorded, wrong)
    assert found.startswith(f"{name} of step 0, layer ") and found.endswith(f"[{value}] and [{value + 1}]")


@pytest.mark.parametrize(("static", "probe"), [(False, True), (True, True), (False, False), (True, False)])
def test_bits_are_promised_by_machine_and_options(static, probe):
    """Static shapes put all places into one product: such a run is not its simulation to the bit."""
    job = prepare(
        replace(
            OPTIONS,
            all2all_backend="nixl_ep",
            ranks_per_node=None,
            static_shapes=static,
            device="cpu",
            trace_values=False,
        )
    )
    generations = [SimpleNamespace(index=index, tokens=[1]) for index in range(len(OPTIONS.prompts))]
    everybody = [{"generations": generations, "timing": SimpleNamespace(prefill_passes=1)}]
    assert describe(job, everybody, probe)["exact"] == (probe and not static)
    assert job.travel.same_text  # the text and the logits are promised all the same


def test_weights_are_compared_to_the_bit_where_bits_are_promised(recorded):
    close = changed(recorded, "weight", 5, recorded.columns["weight"][5] * (1 + 1e-6))
    assert len(same(recorded, close)) == 1 and same(recorded, close)[0].startswith("weight of step 0, layer 1, rank 0")
    elsewhere = replace(close, meta=close.meta | {"exact": False})
    assert same(recorded, elsewhere) == []
    far = changed(elsewhere, "weight", 5, recorded.columns["weight"][5] + 0.01)
    assert len(same(recorded, far)) == 1


def test_many_differences_are_counted_and_lost_routes_are_seen(recorded):
    wrong = replace(recorded, columns=recorded.columns | {"row": recorded.columns["row"] + 1})
    found = same(recorded, wrong)
    assert len(found) == SHOWN + 1 and found[-1] == f"row: {len(recorded)} of {len(recorded)} records differ"
    short = replace(recorded, columns={name: column[:-1] for name, column in recorded.columns.items()})
    assert same(recorded, short) == [f"{len(recorded)} routes and {len(recorded) - 1}"]
    first = dict(recorded.ranks[1])
    first["output"] = first["output"].clone()
    first["output"][3, 9] += 1e-3
    touched = replace(recorded, ranks=(recorded.ranks[0], first, recorded.ranks[2]))
    assert len(same(recorded, touched)) == 1 and same(recorded, touched)[0].startswith("rank 1, output of entry 3: ")


def test_a_trace_of_a_newer_version_is_refused_by_option(recorded):
    strange = replace(recorded, meta=recorded.meta | {"options": {"world_size": 3, "warp": 9}})
    with pytest.raises(TraceError, match="option warp of the run is not known to this version"):
        simulate(strange)


def test_a_run_is_simulated_with_the_torch_threads_it_had(recorded, monkeypatch):
    """With two threads attention adds in another order than with one, and the last bits of records would differ."""
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr("moe_course.trace.simulate.run_here", lambda *given: seen.append(torch.get_num_threads()))
    for threads in (2, 1):
        simulate(replace(recorded, meta=recorded.meta | {"threads": threads}))
    assert seen == [2, 1] and torch.get_num_threads() == before and recorded.meta["threads"] == before
