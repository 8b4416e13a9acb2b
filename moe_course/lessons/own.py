"""`use("my_moe")`: your own stages where there are any, the package's everywhere else. Built in: notebook 00."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
