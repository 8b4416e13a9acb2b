"""What counts as a whole number: an int, also one of torch or numpy, and neither a flag nor a fraction nor text."""

from __future__ import annotations

import operator


def as_whole(value: object) -> int | None:
    """The number as an int; None for everything that is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # a tensor of several numbers
        return None
