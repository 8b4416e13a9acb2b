"""What a learner might write for an exercise, and what the check has to say to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answers:
    """Answers to one exercise.

    Attributes:
        wrong: plausible mistakes, each with a part of the message it must get; three or more.
        lazy: hard-coded values, the input given back, and the like, with theirs; two or more.
        right: answers that must pass and share no code with the answer key; two or more.
    """

    wrong: Sequence[tuple[Callable, str]]
    lazy: Sequence[tuple[Callable, str]]
    right: Sequence[Callable]
