"""What an exercise is: data, and a few small functions. The frame does the rest.

How to write one (see `checks/nb00.py` for the smallest, complete one):

1. In `checks/nbNN.py` write an `Exercise` for each exercise and list them in `EXERCISES = (…,)`. The notebook calls
   `check.<name>(fn)`, `check.reveal("<name>")`, `check.keep(fn)`. Names are unique over all notebooks; call the
   function in the stub by the exercise's name (or `my_<name>`), so that `keep` knows what it is.
2. `answer` is the answer key: a function of the package with the learner's signature. It is run on the same cases, so
   a case holds inputs and never outputs.
3. `cases(seed)` returns cases, the smallest first: the first one that fails is drawn. All numbers come from `seed`; it
   is called twice, with other seeds, and the second set catches values that were written into the code.
   * `Case(title, args, keywords)` is one call: `fn(*args, **keywords)`.
   * `Case(title, keywords=…, ranks=[args of rank 0, args of rank 1, …])` is one call on each rank, in threads:
     `fn(*ranks[r], comm=comm, **keywords)`. Make payloads `100 * rank + token`: then a row says where it is from.
   Inputs are copied for every call. A function that changes them is told so.
4. `looks` are what is compared, in the order in which things go wrong: the first one that differs is named. Each takes
   one value out of what the function returned, e.g. `Look("topk_ids", lambda result: result[1])`; a value is a tensor,
   a number, a string, None, or a list of those. `tolerance` 0 is equality to the bit.
5. `why(case, look, expected, yours)` puts a known mistake into words, or returns None. `look` is the name of the look
   that differs; "cost" when rows or bytes are over the budget, then both values are a `Cost`.
   `why_raised(error)` does the same for what the function raised.
6. `names` are what the function may use besides torch, F, math and builtins: `{"Dispatched": Dispatched}`. Everything
   needs a module that it can be imported from, because `keep` writes the imports.
7. `budget` is what the answer key needs, by the ledger, unless you give a function of the case. `row_bytes(case)`
   says how many bytes a row of interest has: rows of other widths (ids or weights sent by themselves) then count as
   bytes only.
8. `stage` is the field of `Stages` for a function that a real run can use: "route", "dispatch", …
9. `also` are helpers of the answer key that `reveal` prints, too. `short` is a text that `reveal` prints first: the
   function as a learner writes it, where the package's own says much more.

`tests/wrong/nbNN.py` then lists wrong, lazy and right answers, see `tests/wrong/nb00.py`.

To try one without a kernel: `from moe_course.lessons.judging.judge import judge; print(judge(EXERCISE, fn))`.

Built in: every notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """Inputs of one trial, see above.

    Attributes:
        title: what is special about it, e.g. "3 ranks with 2, 0 and 1 tokens".
        args, keywords: of the one call; with ranks, `keywords` are the same on all of them.
        ranks: arguments of each rank, or None for one call without ranks.
    """

    title: str
    args: tuple = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    ranks: Sequence[tuple] | None = None


@dataclass(frozen=True)
class Look:
    """One value that is compared. `of` takes it out of a result; floats may differ by `tolerance`."""

    name: str
    of: Callable[[Any], Any] = lambda result: result
    tolerance: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What all ranks gave the transport: rows; bytes of rows, padding and metadata. Headers of exchanges are free."""

    rows: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Exercise:
    """An exercise, see the top of this file. `seconds` is how long one case may take."""

    number: str
    name: str
    answer: Callable
    cases: Callable[[int], Sequence[Case]]
    looks: tuple[Look, ...]
    stage: str | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    budget: Callable[[Case], Cost] | None = None
    row_bytes: Callable[[Case], int] | None = None
    why: Callable[[Case, str, Any, Any], str | None] = lambda case, look, expected, yours: None
    why_raised: Callable[[Exception], str | None] = lambda error: None
    also: tuple[Callable, ...] = ()
    short: str = ""
    seconds: float = 6.0

    @property
    def file(self) -> str:
        """Name of the file that `keep` writes."""
        return f"{self.stage or self.name}.py"
