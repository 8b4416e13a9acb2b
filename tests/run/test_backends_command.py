"""`moe-course backends` on real processes."""

from __future__ import annotations

import pytest

WHOLE = "gloo carries whole segments here"
CARRIES = {"gloo": WHOLE, "shm": f"shared memory takes only the rows in use, {WHOLE}"}


@pytest.mark.parametrize("transport", CARRIES)
def test_two_ranks(warm, transport):
    sizes = ["--rows", "4", "--experts", "9", "--top-k", "3", "--hidden-size", "32", "--rounds", "2", "--passes", "1"]
    ended = warm.run("--ranks", "2", "--transport", transport, *sizes, module=("-m", "moe_course", "backends"))
    assert ended.returncode == 0, ended.stderr
    found = ended.result
    assert found["schema"] == "moe_course.backends/1" and found["transport"] == transport and found["failures"] == []
    lines = {line["backend"]: line for line in found["backends"]}
    if transport == "gloo":  # it has no memory that ranks share, and the reason is said
        assert "gloo" in lines.pop("one_sided")["refused"]
    assert len(lines) == (7 if transport == "gloo" else 8)
    for name, line in lines.items():
        assert line["payload"] == line["bound"] > 0 and len(line["seconds"]) == 2, name
        assert line["same_bits"] or not line["bits_promised"], name
    assert (lines["low_latency"]["padding"] > 0) == (transport == "gloo") and lines["all_to_all"]["padding"] == 0
    assert f"empty places. {CARRIES[transport]}; DeepEP and NIXL send rows" in " ".join(ended.stdout.split())
    assert lines["low_latency"]["messages"] <= lines["all_to_all"]["messages"]  # gloo is told the sizes first
    assert "deepep_low_latency" in ended.stdout and "verdict" in ended.stdout
    assert warm.wait_until_gone() == {}
