"""Your own stages where there are any, the package's everywhere else: in a kernel, and in real processes.

Built in: notebooks 00 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_course.launch import RunResult
    from moe_course.stages import Stages


def use(folder: str = "my_moe") -> Stages:
    """The stages of `folder`, for `MoELayer(stages=…)`; prints whose each one is.

    Raises:
        ConfigError: a file that does not load, with its line and the cure.
    """
    from moe_course.lessons.folder import my_moe
    from moe_course.own_stages import NAMES, load_own_stages

    own = load_own_stages(my_moe(folder), missing_ok=True)
    package = [name for name in NAMES if name not in own.files]
    print(f"yours, from {folder}: {', '.join(own.files) or 'none yet'}")
    print(f"the package's: {', '.join(package) or 'none'}")
    return own.stages


def run_mine(argv: Sequence[str], world_size: int, folder: str = "my_moe") -> RunResult | None:
    """A checked run on real processes with the stages you kept; with none kept it starts nothing and says so.

    Args:
        argv: more options of `moe-course run`.
        world_size: number of processes.

    A wrong stage ends the run with one line that names it. Raises what `use` and `run_live` raise.
    """
    from moe_course.lessons.folder import my_moe
    from moe_course.lessons.progress import run_live
    from moe_course.own_stages import load_own_stages

    own = load_own_stages(my_moe(folder), missing_ok=True)
    if not own.files:
        print(f"nothing is kept in {folder} yet: check.keep in lessons 02 and 07 does it; then run this cell again")
        return None
    run = run_live([*argv, "--check", f"--stages={my_moe(folder)}"], world_size)
    if run.result is not None:
        print(f"verdict with your {', '.join(own.files)} on {world_size} processes: {run.result['verdict']}")
    return run
