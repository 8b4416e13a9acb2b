"""For every run of pytest, of `notebooks/` alone, too: what you kept in `my_moe/` is not seen by any test, and stored
pictures are compared with those that the cells draw."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from nbval.plugin import IPyNbCell
from PIL import Image

LOUD = 64  # of 255: what another version of a font library changes at the edge of a letter stays below
SHARE = 0.03  # of the pixels may be louder


def pytest_configure(config):
    """Notebooks are compared with the outputs of somebody who has kept nothing yet."""
    from moe_course.lessons.folder import FOLDER_ENV

    nothing = TemporaryDirectory(prefix="moe-course-tests-")
    config.add_cleanup(nothing.cleanup)
    os.environ[FOLDER_ENV] = str(Path(nothing.name) / "my_moe")
    IPyNbCell.compare_outputs = _with_stills(IPyNbCell.compare_outputs)


def _with_stills(compare_texts):
    """nbval compares what cells print and show as text; this adds the pictures beside it."""

    def compare(cell, test, ref, skip_compare=None) -> bool:
        if not compare_texts(cell, test, ref, skip_compare):
            return False
        drawn, stored = stills(test), stills(ref)
        if len(drawn) == len(stored) and all(map(alike, drawn, stored)):
            return True
        cell.comparison_traceback.append("the stored picture is not what the cell draws: `make notebooks` stores it")
        return False

    return compare


def stills(outputs) -> list[str]:
    """The PNG, in base64, of each output that has one."""
    return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def alike(one: str, other: str) -> bool:
    """Do two PNGs show the same? One of another size does not."""
    a, b = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), dtype=np.int16) for png in (one, other)
    )
    return a.shape == b.shape and bool((np.abs(a - b).max(axis=2) > LOUD).mean() <= SHARE)
