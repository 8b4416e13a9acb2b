"""Each benchmark of processes runs and says what it measured; how fast anything is, no test asks."""

from __future__ import annotations

import json

import pytest
from warm import warm_starts

from moe_course.bench.trace_ranks import WAYS, summary
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
