"""For every run of pytest, of `notebooks/` alone, too: what you kept in `my_moe/` is not seen by any test."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory


def pytest_configure(config):
    """Notebooks are compared with the outputs of somebody who has kept nothing yet."""
    from moe_course.lessons.folder import FOLDER_ENV

    nothing = TemporaryDirectory(prefix="moe-course-tests-")
    config.add_cleanup(nothing.cleanup)
    os.environ[FOLDER_ENV] = str(Path(nothing.name) / "my_moe")
