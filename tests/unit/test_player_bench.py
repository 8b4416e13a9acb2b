"""The player's bench: what it draws is of the right size, and without a browser it says what to do."""

import pytest

from moe_course.bench.player_fps import made_up, measure, rates, summary
from moe_course.errors import ConfigError


def test_made_up_routing_is_complete_and_the_same_every_time():
    data = made_up(64)
    (only,) = data["passes"]
    assert (data["ranks"], len(only["tokens"]), len(only["routes"]["expert"])) == (8, 64, 512)
    assert all(
        data["owner"][e] == rank for e, rank in zip(only["routes"]["expert"], only["routes"]["owner"], strict=True)
    )
    assert len({(t, e) for t, e in zip(only["routes"]["token"], only["routes"]["expert"], strict=True)}) == 512
    assert made_up(64) == data


def test_rates_are_of_thirty_frames_each():
    times = [frame * 20.0 for frame in range(31)] + [600 + frame * 10.0 for frame in range(1, 31)]  # ms
    assert rates(times) == [50.0, 100.0]
    figures = {"tokens": 2048, "routes": 16384, "fps": [50.0, 60.0, 58.0], "first_ms": [30.2, 20.4]}
    assert summary(figures) == ["2,048", "16,384", "58", "50", "25 ms", "20 ms"]


def test_without_a_browser_there_is_one_line_with_the_cure(monkeypatch):
    pytest.importorskip("playwright")
    monkeypatch.setenv("CHROMIUM", "/no/such/browser")
    with pytest.raises(ConfigError, match=r"^bench player: no chromium here.*apt install chromium[^\n]*$"):
        measure(64, 1)
