"""`moe-course backends` in threads: every shape against the slow reference, and failures that must be loud."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_course.backends import BACKENDS, high_throughput
from moe_course.cli import main
from moe_course.comm.sim import run_threads
from moe_course.cost import bounds
from moe_course.cost.backend_ranks import read_job, write_job
from moe_course.cost.backends_job import make_job
from moe_course.cost.backends_result import build_result
from moe_course.cost.compare import Job, expert_weights, measure, rows_of
from moe_course.cost.replay import shown
from moe_course.dispatch import Dispatched
from moe_course.errors import ConfigError
from moe_course.expert_map import make_placement
from moe_course.lessons import reference

SIZES = {
    "world_size": 3, "strategy": "linear", "ranks_per_node": 2, "hidden_size": 32, "inter": 8, "dtype": "float32",
    "dispatch_quant": None, "max_num_tokens": 7, "rounds": 1, "seed": 5,
}  # fmt: skip


def make(**changes) -> Job:
    """Two passes, ragged: 5, 0 and 2 rows, then 0, 0 and 7; some routes of -1, uneven experts."""
    sizes = SIZES | changes
    counts = torch.tensor([[5, 0, 2], [0, 0, 7]])
    ids = torch.rand(14, 8, generator=torch.Generator().manual_seed(1)).topk(3, dim=1).indices.int()
    ids[3] = ids[9, 1] = -1
    rank = torch.arange(3).repeat(2).repeat_interleave(counts.flatten())
    batch = torch.arange(2).repeat_interleave(counts.sum(1))
    placement = make_placement(3, 8, ranks_per_node=sizes["ranks_per_node"])
    lines = [["no_dp_ep", "no_dp_ep", False]]
    lines += [[line.name, line.shape, line.reduce_in_node] for line in shown(placement)]
    return Job(ids, rank, batch, lines=lines, experts=8, **sizes)


def run(job: Job) -> tuple[list[dict], dict]:
    parts = run_threads(job.world_size, measure, job)
    return parts, build_result(job, parts, {}, [], "threads", None)


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bfloat16"}, {"strategy": "round_robin"}, {"ranks_per_node": (1, 2)}, {"ranks_per_node": 3}],
)
def test_every_shape_sends_its_bound_and_gives_the_same_bits(changes):
    job = make(**changes)
    parts, found = run(job)
    assert found["failures"] == []
    promised = {line["backend"]: line["bits_promised"] for line in found["backends"]}
    assert promised.pop("two_hop, sums in node", False) is False and len(promised) == len(BACKENDS)
    assert set(promised.values()) == {parts[0]["exact"]}
    for line in found["backends"]:
        assert line["ratio"] == 1 and line["rows"] == line["bound_rows"] > 0
        assert len(line["seconds"]) == job.rounds
    once = next(line for line in found["backends"] if line["backend"] == "high_throughput")
    assert once["messages"] - 24 <= 24  # two exchanges of two passes to two peers of three: headers, and rows if any
    assert once["metadata"] == 24 * (10 + 2 * 3) * 8 + once["rows"] // 2 * 3 * 8  # no barrier is in it
    rows = {line["backend"]: line["rows"] for line in found["backends"]}
    assert rows["no_dp_ep"] == rows["allgather_reducescatter"] == 2 * 14 * 2
    assert rows["all_to_all"] == rows["low_latency"] >= rows["high_throughput"] == rows["one_sided"]


def test_the_outputs_that_all_are_compared_with_are_those_of_the_reference():
    """All shapes could be wrong in one way: the first is compared with the slow, obvious layer."""
    job, kept = make(), {}

    def keeping(comm):
        module = BACKENDS["allgather_reducescatter"]
        original, outputs = module.combine, kept.setdefault(comm.rank, [])

        class Keeps:
            CAPABILITIES, dispatch, traffic = module.CAPABILITIES, staticmethod(module.dispatch), module.traffic

            @staticmethod
            def combine(expert_output, dispatched: Dispatched, *, comm):
                outputs.append(original(expert_output, dispatched, comm=comm))
                return outputs[-1]

        class Patched(Job):
            def backends(self):
                line, backend = next(
                    (line, backend)
                    for line, backend in job.backends().items()
                    if line.name == "allgather_reducescatter"
                )
                return {line: replace(backend, module=Keeps)}

        return measure(comm, Patched(**vars(job)))

    run_threads(3, keeping)
    w13, w2 = expert_weights(job, list(range(8)))
    for number in range(2):
        ids = job.ids_per_rank(number)
        made = [rows_of(job, number, rank, len(one)) for rank, one in enumerate(ids)]
        rows, weights = [rows for rows, _ in made], [weights for _, weights in made]
        expected = reference.moe_layer(rows, weights, ids, w13, w2, job.placement)
        for rank in range(3):
            torch.testing.assert_close(kept[rank][number].float(), expected[rank], rtol=0, atol=1e-6)


def twice(hidden_states, topk_weights, topk_ids, *, comm, placement):
    """Known wrong: sends an exchange of rows that nobody needs."""
    comm.all_to_all_rows(hidden_states[:0], [0] * comm.world_size)
    comm.all_gather_rows(hidden_states[:1])
    return high_throughput.__wrapped_dispatch__(hidden_states, topk_weights, topk_ids, comm=comm, placement=placement)


def test_a_row_too_many_is_a_failure(monkeypatch):
    monkeypatch.setattr(high_throughput, "__wrapped_dispatch__", high_throughput.dispatch, raising=False)
    monkeypatch.setattr(high_throughput, "dispatch", twice)
    _, found = run(make())
    (failure,) = found["failures"]
    assert failure.startswith("high_throughput sent ") and "the bound for this routing is" in failure
    assert found["verdict"] == failure


def test_other_bits_are_a_failure(monkeypatch):
    """Known wrong: one partial sum is added last bit first."""
    right = BACKENDS["all_to_all"].combine

    def wrong(expert_output, dispatched, *, comm):
        return torch.nextafter(right(expert_output, dispatched, comm=comm), torch.tensor(torch.inf))

    monkeypatch.setattr(BACKENDS["all_to_all"], "combine", wrong)
    parts, found = run(make())
    if not parts[0]["exact"]:
        pytest.skip("equal bits are not promised on this machine")
    (failure,) = found["failures"]
    assert failure.startswith("all_to_all: outputs differ from allgather_reducescatter by") and "0 allowed" in failure


def test_nan_is_a_failure(monkeypatch):
    right = BACKENDS["one_sided"].combine
    monkeypatch.setattr(BACKENDS["one_sided"], "combine", lambda *a, **k: right(*a, **k) * torch.nan)
    assert run(make())[1]["failures"][0].startswith("one_sided: outputs differ from allgather_reducescatter by inf")


def test_quantised_rows_have_their_bound_too():
    _, found = run(make(hidden_size=128, dispatch_quant="fp8_token"))
    assert found["failures"] == []
    once = next(line for line in found["backends"] if line["backend"] == "high_throughput")
    assert once["payload"] == once["rows"] // 2 * (132 + 512)


def test_a_job_survives_its_file(tmp_path):
    job = make(ranks_per_node=(1, 2))
    again = read_job(write_job(job, tmp_path))
    assert {k: v for k, v in vars(again).items() if not isinstance(v, torch.Tensor)} == {
        k: v for k, v in vars(job).items() if not isinstance(v, torch.Tensor)
    }
    assert all(torch.equal(getattr(again, name), getattr(job, name)) for name in ("ids", "rank", "batch"))


def test_passes_of_a_file_are_spread_over_it(tmp_path):
    ids = torch.arange(20 * 3 * 2).view(20, 3, 2) % 8
    ids[..., 1] = (ids[..., 0] + 1) % 8
    np.save(tmp_path / "ids.npy", ids.numpy())
    job, refused, notes = make_job(tmp_path / "ids.npy", None, 5, None, 2, 4, "gloo", SIZES)
    assert job.experts == 8 and job.passes == 4 and "4 of 6 passes" in notes[0]
    assert [len(one) for one in job.ids_per_rank(0)] == [5, 5, 5] and [len(one) for one in job.ids_per_rank(3)] == [
        2,
        2,
        1,
    ]
    assert torch.equal(job.ids_per_rank(0)[1], ids[7:12, 0].int())
    assert list(refused) == ["one_sided"] and "gloo" in refused["one_sided"]
    assert not any(line[0] == "one_sided" for line in job.lines)


def test_it_refuses():
    with pytest.raises(ConfigError, match="--rows is 9, --max-num-batched-tokens is 7"):
        make_job(None, None, 9, None, 2, 1, "threads", SIZES)
    with pytest.raises(ConfigError, match="--top-k is 9 of 8 experts"):
        make_job(None, None, 5, 8, 9, 1, "threads", SIZES)


def test_the_command_ends_with_3_when_something_is_wrong(monkeypatch, capsys, tmp_path):
    arguments = ["backends", "--transport", "threads", "--ranks", "2", "--rows", "3", "--experts", "8", "--top-k", "2"]
    arguments += ["--rounds", "1", "--passes", "1", "--hidden-size", "16"]
    assert main(arguments) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "every backend sent what its bound says" in words
    assert "threads carry whole segments, as gloo does here; DeepEP and NIXL send rows and counts only" in words
    assert "note: across nodes, vLLM's deepep_high_throughput" in words  # two nodes, unless told otherwise
    right = bounds.bound

    def lower(traffic, sizes, placement):
        found = right(traffic, sizes, placement)
        return replace(found, wire_bytes=found.wire_bytes - 1)

    monkeypatch.setattr(bounds, "bound", lower)
    out = tmp_path / "out.json"
    assert main([*arguments, "--json", str(out)]) == 3
    assert (
        capsys.readouterr().err.startswith("error: allgather_reducescatter sent ")
        and '"failures": [\n' in out.read_text()
    )
    assert main(["backends", "--rounds", "0"]) == 2
