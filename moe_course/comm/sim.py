"""Ranks as threads of one process: the same rank functions, no processes to start, deterministic.

Made for notebooks and tests; 256 ranks work. Built in: notebook 06.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from moe_course.comm.base import Comm
from moe_course.comm.header import FIELDS, compare_fields
from moe_course.comm.shared import Shared
from moe_course.errors import ExchangeTimeout, MoECourseError, RankLost


class _Board:
    """Where the ranks of one group meet: every rank posts one item per meeting and reads everybody's."""

    def __init__(self, ranks: list[int], timeout: float):
        self.ranks, self.timeout = ranks, timeout  # ranks: world numbers of the members, for messages
        self.condition = threading.Condition()
        self.meetings: dict[int, dict[int, Any]] = {}
        self.readers: dict[int, int] = {}
        self.gone: dict[int, str] = {}  # member -> how it left
        self.boards: dict[tuple[int, ...], _Board] = {}  # sub-groups, created by whoever comes first

    def meet(self, number: int, member: int, item: Any, what: str) -> list[Any]:
        size = len(self.ranks)
        with self.condition:
            items = self.meetings.setdefault(number, {})
            items[member] = item
            self.condition.notify_all()
            deadline = time.monotonic() + self.timeout
            while len(items) < size:
                left = [m for m in self.gone if m not in items]
                if left:
                    names = ", ".join(f"rank {self.ranks[m]} {self.gone[m]}" for m in sorted(left))
                    raise RankLost(f"{what}: {names}, and the others are waiting for it")
                rest = deadline - time.monotonic()
                if rest <= 0:
                    absent = [self.ranks[m] for m in range(size) if m not in items]
                    raise ExchangeTimeout(
                        f"{what}: after {self.timeout:g} s still waiting for ranks {absent}; "
                        "every rank must make every call, also with zero rows"
                    )
                self.condition.wait(rest)
            result = [items[m] for m in range(size)]
            self.readers[number] = self.readers.get(number, 0) + 1
            if self.readers[number] == size:  # everybody has read it
                del self.meetings[number], self.readers[number]
            return result

    def leave(self, rank: int, how: str) -> None:
        """`rank` (world number) will not come any more."""
        with self.condition:
            if rank in self.ranks:
                self.gone[self.ranks.index(rank)] = how
            self.condition.notify_all()
            boards = list(self.boards.values())
        for board in boards:
            board.leave(rank, how)


class SimComm(Comm):
    """One rank of a group of threads."""

    transport = "threads"

    def __init__(self, board: _Board, rank: int, shared: Shared | None = None):
        super().__init__(rank, board.ranks, shared)
        self._board, self._meeting, self._what = board, 0, ""

    def gather_objects(self, item: Any) -> list[Any] | None:
        """Everybody's object on rank 0, None elsewhere. For reports after a run, not for rows."""
        self._what = "gathering the results"
        met = self._meet(item)
        return met if self.rank == 0 else None

    def _meet(self, item: Any) -> list[Any]:
        self._meeting += 1
        return self._board.meet(self._meeting, self.rank, item, self._what)

    def _exchange(self, message: torch.Tensor, what: str) -> torch.Tensor:
        self._what = what
        return torch.stack(self._one_kind(self._meet(message)))

    def _all_to_all(self, parts: list[torch.Tensor], matrix: torch.Tensor, borrow: bool) -> list[torch.Tensor]:
        counts = matrix[self.rank].tolist()
        sent = [part.clone().split(counts) for part in parts]  # a copy: the caller may overwrite its rows
        met = self._meet(sent)
        return [torch.cat([theirs[place][self.rank] for theirs in met]) for place in range(len(parts))]

    def _all_gather(self, parts: list[torch.Tensor], counts: list[int], borrow: bool) -> list[torch.Tensor]:
        met = self._meet([part.clone() for part in parts])
        return [torch.cat([theirs[place] for theirs in met]) for place in range(len(parts))]

    def _segments(self, send: list[torch.Tensor], receive_bytes: list[int], what: str) -> list[torch.Tensor]:
        self._what = what
        met = self._one_kind(self._meet([segment.clone() for segment in send]))
        return [theirs[self.rank] for theirs in met]

    def _one_kind(self, met: list[Any]) -> list[Any]:
        """Headers of all ranks, or segments, which say the same in front; raises if some brought these, some those."""
        if len({type(item) for item in met}) > 1:
            heads = [item if isinstance(item, torch.Tensor) else item[0][:32].view(torch.int64) for item in met]
            compare_fields(torch.stack([head[:4] for head in heads]).numpy(), self.members, FIELDS)
        return met

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        return self._meet(torch.zeros(shape, dtype=dtype))

    def _signal(self) -> None:
        """Meeting is enough: `_await` does it."""

    def _await(self) -> None:
        self._meet(None)

    def _subgroup(self, groups: list[list[int]], mine: list[int]) -> SimComm:
        members = [self._board.ranks[rank] for rank in mine]
        with self._board.condition:
            # the meeting number tells apart groups of the same ranks that were split off one after the other
            key = (self._meeting, *members)
            board = self._board.boards.setdefault(key, _Board(members, self._board.timeout))
        return SimComm(board, mine.index(self.rank), self.shared)


_GRACE_S = 0.5  # how long other ranks may still report after the first has failed


def _wait(threads: list[threading.Thread], errors: list[BaseException | None]) -> None:
    """Until all threads have ended, or one has failed and the others had their chance; a busy one is left alone."""
    deadline = None
    while alive := [thread for thread in threads if thread.is_alive()]:
        if deadline is None and any(error is not None for error in errors):
            deadline = time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        alive[0].join(0.02)


def run_threads(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 30) -> list[Any]:
    """Run `fn(comm, *args)` on `world_size` ranks at once and return their results in rank order.

    Args:
        fn: the rank function; it gets the rank's `Comm` first.
        timeout: seconds a rank waits for its peers in one exchange.

    Raises:
        The error of the first rank that failed by itself (others then fail with RankLost), with its rank in front.
        ExchangeTimeout: ranks that never come, named.
    """
    board = _Board(list(range(world_size)), timeout)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size

    def run(rank: int) -> None:
        how = "has returned"
        try:
            results[rank] = fn(SimComm(board, rank), *args)
        except BaseException as error:
            errors[rank] = error
            how = f"has failed ({type(error).__name__}: {error})"
        finally:
            board.leave(rank, how)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    _wait(threads, errors)
    failed = [rank for rank in range(world_size) if errors[rank] is not None]
    if failed:
        first = min(failed, key=lambda rank: (isinstance(errors[rank], RankLost), rank))
        error = errors[first]
        if isinstance(error, MoECourseError):
            raise type(error)(f"rank {first}: {error}") from error
        error.add_note(f"raised on rank {first}")
        raise error
    return results
