"""Each benchmark of processes runs and says what it measured; how fast anything is, no test asks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from warm import warm_starts

from moe_course.bench.guard_ranks import STEPS
from moe_course.bench.trace_ranks import WAYS, measure, summary
from moe_course.cli import main


@pytest.mark.parametrize("name", ["guard", "headers", "trace", "transports"])
def test_one_round_of_a_benchmark(tmp_path, capsys, name):
    with warm_starts():
        assert main(["bench", name, "--rounds=1", f"--json={tmp_path / 'out.json'}"]) == 0, capsys.readouterr().err
    written, said = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert written["schema"] == f"moe_course.bench.{name}/1" and written["rounds"] == 1
    assert {one["ranks"] for one in written["figures"]} == {2, 4}
    for one in written["figures"]:
        assert one["times"] and all(second > 0 for seconds in one["times"].values() for second in seconds)
    assert "in turns" in said and "ranks" in said
    if name == "trace":
        assert all(len(one["times"][way]) == STEPS[one["step"]] for one in written["figures"] for way in WAYS)
        ends = [(line, line.split()[-1]) for line in said.splitlines() if " ms" in line]
        assert len(ends) == 4 * len(WAYS)  # 2 and 4 ranks, prefill and decode
        assert all((" a run " in line) == (end == "0%") for line, end in ends)
        assert all((" --trace " in line) == ("<= 5%" in line) for line, _ in ends)


def test_ways_take_turns_and_each_turn_begins_with_another():
    """What listens in each step, on a model of no layers; and nothing is left to listen at the end."""
    model, heard, waited = SimpleNamespace(blocks=[], shell=torch.nn.Identity()), [], []

    def step(recorder) -> None:
        kind = None if recorder is None else (recorder.trace, recorder.values)
        assert bool(model.shell._forward_hooks) == (kind is not None and recorder.trace)
        heard.append({None: "bare", (False, False): "ids", (True, False): "trace", (True, True): "values"}[kind])

    found = measure(SimpleNamespace(barrier=lambda: waited.append(len(heard))), model, step, 5)
    begins = [0, 1, 2, 3, 0]
    assert heard == ["bare"] * 3 + [WAYS[(begin + place) % 4] for begin in begins for place in range(4)]
    assert waited == list(range(3, 23)) and {way: len(seconds) for way, seconds in found.items()} == dict.fromkeys(
        WAYS, 5
    )
    assert not model.shell._forward_hooks


def test_what_a_trace_adds_is_the_median_of_pairs_and_what_it_is_known_to():
    """Pairs of one turn: a machine that gets twice as slow in the middle changes nothing."""
    bare = [1.0] * 50 + [2.0] * 50
    found = summary({way: [second * (1.03 if way == "trace" else 1.0) for second in bare] for way in WAYS})
    assert found["trace_adds"] == pytest.approx(0.03) and found["trace_error"] == pytest.approx(0, abs=1e-12)
    assert found["ids_adds"] == 0 and found["bare_ms"] == 1500
    noisy = [second * (1.1 if turn % 2 else 0.9) for turn, second in enumerate(bare)]
    found = summary({way: noisy if way == "trace" else bare for way in WAYS})
    assert found["trace_adds"] == pytest.approx(0, abs=1e-9)
    assert found["trace_error"] == pytest.approx(1.57 * 0.2 / 10)  # of a hundred turns between -10 and +10 %
