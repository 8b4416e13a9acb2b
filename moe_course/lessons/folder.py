"""Where your own stages live: `my_moe/` in the course folder, whatever folder a cell runs in. Built in: notebook 00."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "my_moe"
#: Another folder instead, as a path.
FOLDER_ENV = "MOE_COURSE_MY_MOE"


def course_folder() -> Path:
    """The nearest folder at or above the current one that holds `notebooks/`; without one, the current folder."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "notebooks").is_dir()), here)


def my_moe(name: str = NAME) -> Path:
    """The folder `name`, seen from the course folder; for `my_moe` itself the environment may name another place."""
    override = os.environ.get(FOLDER_ENV)
    if name == NAME and override:
        return Path(override)
    return course_folder() / name
