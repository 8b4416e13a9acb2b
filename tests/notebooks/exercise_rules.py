"""Where the exercises of a notebook are, and what each must have: task, stub, check, hints, answer, a way to keep it.

Cells of exercise N.M carry the tag `exercise:N.M`; the stub has `stub` besides, the cell that checks it `check`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from notebook_file import Notebook

from moe_course.lessons.checks import exercises, notebooks
from moe_course.lessons.exercise import Exercise

HINTS = 3
HEADING = r"## Exercise {number} ●[●○][●○] \d+ minutes?\b"
REPAIR = "repair me"  # what a stub says that holds a fault to find


@dataclass(frozen=True)
class Place:
    """An exercise in a notebook.

    Attributes:
        number: such as "7.1"; task: the Markdown cell with its heading.
        stub, check: cells, None where they are missing.
        text: everything from the heading to the next one.
    """

    number: str
    task: dict
    stub: dict | None
    check: dict | None
    text: str

    @property
    def function(self) -> str | None:
        """Name of the function in the stub."""
        defined = [node.name for node in ast.parse(self.stub["source"]).body if isinstance(node, ast.FunctionDef)]
        return defined[-1] if defined else None


def places(notebook: Notebook) -> list[Place]:
    """All exercises that a heading cell announces, in order."""
    starts = [
        (index, tag.removeprefix("exercise:"))
        for index, cell in enumerate(notebook.cells)
        for tag in cell["metadata"].get("tags", [])
        if cell["cell_type"] == "markdown" and tag.startswith("exercise:")
    ]
    return [_place(notebook, start, number) for start, number in starts]


def _place(notebook: Notebook, start: int, number: str) -> Place:
    cells = [notebook.cells[start]]
    for cell in notebook.cells[start + 1 :]:
        if cell["cell_type"] == "markdown" and cell["source"].startswith("#"):
            break
        cells.append(cell)
    code = {kind: None for kind in ("stub", "check")}
    for cell in cells:
        tags = cell["metadata"].get("tags", [])
        code |= {kind: cell for kind in code if kind in tags and f"exercise:{number}" in tags}
    return Place(number, cells[0], code["stub"], code["check"], "\n".join(cell["source"] for cell in cells))


def of_notebook(notebook: Notebook) -> tuple[Exercise, ...]:
    """The exercises that `lessons/checks` has for a notebook."""
    module = f"nb{notebook.name[:2]}"
    return exercises(module) if module in notebooks() else ()


def every_exercise_has_its_place(notebook: Notebook) -> list[str]:
    """Heading cells and `lessons/checks/nbNN.py` name the same exercises, in the same order."""
    there, wanted = [place.number for place in places(notebook)], [one.number for one in of_notebook(notebook)]
    return [] if there == wanted and wanted else [f"the notebook has exercises {there}, its checks are {wanted}"]


def exercises_are_complete(notebook: Notebook) -> list[str]:
    names = {exercise.number: exercise.name for exercise in of_notebook(notebook)}
    return [
        f"exercise {place.number}: {says}"
        for place in places(notebook)
        if place.number in names
        for says in lacking(place, names[place.number])
    ]


def lacking(place: Place, name: str) -> list[str]:
    """What an exercise does not have."""
    found = []
    if not re.match(HEADING.format(number=re.escape(place.number)), place.task["source"]):
        found.append(f"its heading is not `## Exercise {place.number} ●●○ 10 minutes`")
    spec = "\n".join(re.findall(r"^```text\n(.*?)^```$", place.task["source"], re.MULTILINE | re.DOTALL))
    if not re.search(rf"^(my_)?{name}\(", spec, re.MULTILINE) or "->" not in spec:
        found.append(f"no text block has the signature `{name}(…) -> …`")
    if not re.search(r"\[\w[^\]\n]*\]", spec):
        found.append("no text block has shapes")
    if (hints := len(re.findall(r"<details><summary>Hint \d", place.text))) < HINTS:
        found.append(f"{hints} hints, wanted {HINTS}")
    if f'check.reveal("{name}")' not in place.text:
        found.append(f'nothing says check.reveal("{name}")')
    if "check.keep(" not in place.text:
        found.append("nothing says check.keep")
    if place.stub is None or place.check is None:
        missing = " and ".join(kind for kind in ("stub", "check") if getattr(place, kind) is None)
        return [*found, f"no cell behind its heading is tagged exercise:{place.number} and {missing}"]
    if place.function not in (name, f"my_{name}"):
        found.append(f"its stub defines {place.function}, wanted {name} or my_{name}")
    if "raise NotImplementedError" not in place.stub["source"] and REPAIR not in place.stub["source"]:
        found.append(f"its stub neither raises NotImplementedError nor says `{REPAIR}`")
    if not re.search(rf"^check\.{name}\({place.function}\)", place.check["source"], re.MULTILINE):
        found.append(f"its check cell does not call check.{name}({place.function})")
    return found
