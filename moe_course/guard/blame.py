"""Errors of exchanges that say which of your own stages take part in exchanges. Built in: notebook 13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_course.errors import ExchangeMismatch, ExchangeTimeout, MoECourseError
from moe_course.own_stages import OwnStages

EXCHANGING = ("dispatch", "combine")  # stages that may exchange anything


@contextmanager
def naming(own: OwnStages | None) -> Iterator[None]:
    """Inside, a mismatch or a time-out in any exchange says which of your stages take part in exchanges."""
    files = [f"{name} ({own.files[name]})" for name in EXCHANGING if name in own.files] if own else []
    try:
        yield
    except (ExchangeMismatch, ExchangeTimeout) as error:
        if not files or any(file in str(error) for file in map(str, own.files.values())):
            raise
        raise again(error, f"{error}; stages of yours that exchange rows: {', '.join(files)}") from error


def again(error: MoECourseError, message: str) -> MoECourseError:
    """The same kind of error with another message, and all its notes: they tell who waits for whom."""
    new = type(error)(message)
    for note in getattr(error, "__notes__", []):
        new.add_note(note)
    return new
