"""A stored picture that is not what its cell draws fails, as other outputs do."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path

import nbformat
from inner_pytest import faults_of_cells
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[2]
#: A wide line on white; the colour is the only thing that differs between the cells.
DRAW = """from PIL import Image, ImageDraw
picture = Image.new("RGB", (200, 100), "white")
ImageDraw.Draw(picture).line((0, 50, 200, 50), fill="{colour}", width=20)
picture"""


def stored(colour: str, size: tuple[int, int] = (200, 100)) -> list:
    picture = Image.new("RGB", size, "white")
    ImageDraw.Draw(picture).line((0, 50, 200, 50), fill=colour, width=20)
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    png, text = base64.b64encode(buffer.getvalue()).decode(), "<PIL.Image.Image image mode=RGB size=200x100>"
    return [new_output("execute_result", {"image/png": png, "text/plain": text}, execution_count=1)]


def test_nbval_compares_pictures(tmp_path):
    outputs = {"same": stored("#b81d13"), "a shade": stored("#b82018"), "another": stored("#1d13b8"), "none": []}
    outputs |= {"larger": stored("#b81d13", (240, 100))}
    cells = [
        new_code_cell(DRAW.format(colour="#b81d13"), outputs=shown, execution_count=1) for shown in outputs.values()
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "pictures.ipynb")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --nbval --nbval-current-env\n")
    sanitize = tmp_path / "addresses"  # the repr of a picture has one
    sanitize.write_text("[address]\nregex:  at 0x[0-9A-F]+\nreplace:\n")
    faults = faults_of_cells(tmp_path / "pictures.ipynb", f"--nbval-sanitize-with={sanitize}")
    said = dict(zip(outputs, faults, strict=True))
    assert [name for name, fault in said.items() if fault] == ["another", "none", "larger"], said
    of_pictures = [name for name, fault in said.items() if "`make notebooks` stores it" in fault]
    assert of_pictures == ["another", "larger"], said  # a picture too many is found before any is compared
