"""Nobody says that it has finished reading: slow readers keep their bytes, and with less memory they would not."""

from __future__ import annotations

import pytest

TURNS = 200


@pytest.mark.parametrize("operation", ["all_to_all", "all_gather", "padded", "windows", "headers"])
def test_a_slow_reader_keeps_its_bytes(gloo, operation):
    """Until its next exchange but one, whatever the fast rank does in the meantime."""
    assert gloo(2).run("shm_readers:wrong_turns", "SlowToRead", operation, TURNS) == [0, 0]


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("OneHeader", "headers"),
        ("OneRows", "all_to_all"),
        ("OneGather", "all_gather"),
        ("TwoSegments", "padded"),
        ("SlowToRead", "one window"),
    ],
)
def test_less_memory_would_be_seen(gloo, kind, operation):
    """Known to be wrong: one half, or two thirds where nothing says who has entered."""
    _, slow = gloo(2).run("shm_readers:wrong_turns", kind, operation, 60)
    assert slow > 10


def test_three_slow_readers_on_few_cores(gloo):
    assert gloo(4).run("shm_readers:wrong_turns", "SlowToRead", "padded", 50) == [0] * 4
