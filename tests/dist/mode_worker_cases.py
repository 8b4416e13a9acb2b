"""Many parallel modes in one request to a group of worker processes: a request costs more than a layer."""

from __future__ import annotations

from typing import Any

from mode_cases import Case, run_case

from moe_course.comm.base import Comm
from moe_course.errors import PlanMismatch
from moe_course.modes import make_mode


def run_cases(comm: Comm, cases: list[tuple]) -> list[dict[str, Any]]:
    """`mode_cases.run_case` for each of these arguments, on this rank."""
    return [run_case(comm, *arguments) for arguments in cases]


def believe_in_a_group(comm: Comm, case: Case, config) -> str:
    """The error of a rank whose plan has other ranks than its group, and a barrier of the group afterwards."""
    message = ""
    try:
        make_mode(case.plan(config), comm)
    except PlanMismatch as error:
        message = str(error)
    comm.barrier()
    return message
