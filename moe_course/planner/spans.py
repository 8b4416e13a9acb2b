"""Lists of rank, expert and layer numbers, short enough to read: `0-31`, `0,8,…,120`."""

from __future__ import annotations

from collections.abc import Iterable


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each stretch of consecutive numbers, in the given order."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def spans(numbers: Iterable[int], most: int | None = 4) -> str:
    """`0-31`, `0-1,4-5`; of more than `most` stretches only some and the last: `0,8,…,120`. None shows all.

    With `most` of 0 to 2 the first stretch and the last remain, `0-7,…,960-967`, or for 0 just `0…967`.
    """
    found = runs(numbers)
    if most == 0 and len(found) > 1:
        return f"{found[0][0]}…{found[-1][1]}"
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in found]
    if most is not None and len(texts) > max(most, 2):
        texts = [*texts[: 2 if most > 2 else 1], "…", texts[-1]]
    return ",".join(texts) or "none"
