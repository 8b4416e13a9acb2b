"""The frame of every rank program: say who is there, run, and end with one line that names the rank.

Built in: notebook 13.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from moe_course.errors import MoECourseError, RankLost
from moe_course.launch import die_with_parent, emit

_WAIT_FOR_AGENT_S = 1.5  # lets torchrun see which rank died before those that only lost it end as well


def run_rank(
    body: Callable[[Any, int], None],
    guard_on: bool = True,
    on_error: Callable[[MoECourseError], None] = lambda error: None,
) -> int:
    """Call `body(guard, rank)` on this rank; returns the exit code.

    Args:
        on_error: called with an error of the package, before the process ends.
    """
    rank = int(os.environ["RANK"])
    emit("start", pid=os.getpid())
    die_with_parent()
    from moe_course.guard.faults import ReturnEarly
    from moe_course.guard.setup import Guard

    guard = Guard(guard_on, rank)
    try:
        body(guard, rank)
        guard.leave("returned")
    except ReturnEarly as early:
        guard.leave("returned", str(early))
    except MoECourseError as error:
        message, graph = str(error).removeprefix(f"rank {rank}: "), getattr(error, "__notes__", [])
        emit("error", kind=type(error).__name__, message=message[:1500], exit_code=error.exit_code, graph=graph[:64])
        guard.leave("failed", message)
        print(f"error: rank {rank}: {message}", *graph, sep="\n  ", file=sys.stderr, flush=True)
        on_error(error)
        if isinstance(error, RankLost):
            time.sleep(_WAIT_FOR_AGENT_S)
        return error.exit_code
    except Exception as error:  # not one of ours: the traceback is worth more than a line, the launcher gets both
        text = f"{type(error).__name__}: {error}"
        emit("error", kind=type(error).__name__, message=text[:1500], exit_code=1)
        guard.leave("failed", text)
        raise
    return 0
