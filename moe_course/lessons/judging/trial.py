"""One function on one case: on one process or on ranks that are threads, with the bill. Built in: notebook 00."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_course.comm.ledger import Entry, Ledger
from moe_course.comm.sim import run_threads
from moe_course.lessons.exercise import Case, Cost


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes:
        results: what the function returned, on each rank.
        cost: rows and bytes of all ranks.
        changed: `(rank, argument)` of the first input that is not what it was; the argument is a position or a name.
    """

    results: list[Any]
    cost: Cost
    changed: tuple[int, int | str] | None


class Bill(Ledger):
    """A ledger that keeps every entry by itself, so that headers (which carry no rows) can be told from rows."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Entry] = []

    def add(self, op: str, layer: int, src: int, dst: int, entry: Entry) -> None:
        self.items.append(entry)
        super().add(op, layer, src, dst, entry)

    def cost(self, row_bytes: int | None) -> Cost:
        carried = [item for item in self.items if item.rows or item.payload or item.padding]
        counted = [item for item in carried if row_bytes is None or item.payload == item.rows * row_bytes]
        return Cost(
            rows=sum(item.rows for item in counted),
            nbytes=sum(item.payload + item.padding + item.metadata for item in carried),
        )


def attempt(
    fn: Callable, case: Case, *, row_bytes: int | None = None, join: Callable[[], None] = lambda: None, wait: float = 5
) -> Trial:
    """Call `fn` on copies of the case's inputs. Raises what it raises; of ranks, the first that failed by itself.

    Args:
        row_bytes: rows of other widths do not count as rows.
        join: called by each thread that is started.
        wait: seconds a rank waits for its peers in one exchange.
    """
    if case.ranks is None:
        args, keywords = copy.deepcopy((case.args, dict(case.keywords)))
        result = fn(*args, **keywords)
        return Trial([result], Cost(), _changed(0, case.args, case.keywords, args, keywords))
    lock, inputs = threading.Lock(), [copy.deepcopy((args, dict(case.keywords))) for args in case.ranks]

    def on_rank(comm) -> tuple[Any, Bill]:
        with lock:
            join()
        comm.ledger = bill = Bill()
        args, keywords = inputs[comm.rank]
        return fn(*args, comm=comm, **keywords), bill

    outcomes = run_threads(len(case.ranks), on_rank, timeout=wait)
    costs = [bill.cost(row_bytes) for _, bill in outcomes]
    changes = [_changed(rank, case.ranks[rank], case.keywords, *inputs[rank]) for rank in range(len(case.ranks))]
    return Trial(
        [result for result, _ in outcomes],
        Cost(sum(cost.rows for cost in costs), sum(cost.nbytes for cost in costs)),
        next((change for change in changes if change), None),
    )


def _changed(rank: int, args, keywords, args_after, keywords_after) -> tuple[int, int | str] | None:
    for place, (before, after) in enumerate(zip(args, args_after, strict=True)):
        if not same(before, after):
            return rank, place
    for name, before in keywords.items():
        if not same(before, keywords_after[name]):
            return rank, name
    return None


def same(a: Any, b: Any) -> bool:
    """Equal, to the bit, NaN equal to NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.5e9), b.nan_to_num(7.5e9))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and same(vars(a), vars(b))
    return a is b or bool(a == b)
