"""`moe-course backends` on real processes."""

from __future__ import annotations


def test_two_ranks_on_gloo(warm):
    sizes = ["--rows", "4", "--experts", "9", "--top-k", "3", "--hidden-size", "32", "--rounds", "2", "--passes", "1"]
    ended = warm.run("--ranks", "2", *sizes, module=("-m", "moe_course", "backends"))
    assert ended.returncode == 0, ended.stderr
    found = ended.result
    assert found["schema"] == "moe_course.backends/1" and found["transport"] == "gloo" and found["failures"] == []
    lines = {line["backend"]: line for line in found["backends"]}
    assert "gloo" in lines.pop("one_sided")["refused"]  # it has no memory that ranks share, and the reason is said
    assert len(lines) == 7
    for name, line in lines.items():
        assert line["payload"] == line["bound"] > 0 and len(line["seconds"]) == 2, name
        assert line["same_bits"] or not line["bits_promised"], name
    assert lines["low_latency"]["padding"] > 0 == lines["all_to_all"]["padding"]
    assert lines["low_latency"]["messages"] <= lines["all_to_all"]["messages"]  # gloo is told the sizes first
    assert "deepep_low_latency" in ended.stdout and "verdict" in ended.stdout
    assert warm.wait_until_gone() == {}
