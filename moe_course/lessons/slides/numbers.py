"""Measured numbers in a deck are compared with the stored outputs of the notebook they come from."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from pathlib import Path

from moe_course.lessons.slides.errors import SlidesError

NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
#: `[shown](nb:07 "output with a # for each number")`
MARKED = re.compile(r'\[(?P<shown>[^\]\n]+)\]\(nb:(?P<notebook>\d\d) "(?P<output>[^"\n]+)"\)')


def checked(text: str, notebooks: Path, where: str) -> str:
    """`text` with every marked number as a `span`. Raises SlidesError, naming `where`, if a notebook says otherwise."""
    return MARKED.sub(lambda match: _span(match, notebooks, where), text)


def _span(match: re.Match, notebooks: Path, where: str) -> str:
    shown, notebook, output = match["shown"], match["notebook"], match["output"]
    found = find(output, outputs(notebooks, notebook), where, notebook)
    said = [_plain(number) for number in re.findall(NUMBER, shown)] if found else []
    if said != [_plain(number) for number in found]:
        raise SlidesError(
            f"{where}: shows {shown!r}, but notebook {notebook} has {', '.join(found)} in {output!r}; correct the slide"
        )
    return f'<span class="measured" data-notebook="{notebook}">{html.escape(shown)}</span>'


def find(output: str, text: str, where: str, notebook: str) -> list[str]:
    """The numbers at the `#` of `output` in `text`; all places that fit must say the same."""
    parts = {"#": f"({NUMBER})", "…": ".*?"}
    pieces = [piece for piece in re.split("([#…]| +)", output) if piece]
    pattern = "".join(" +" if piece.isspace() else parts.get(piece, re.escape(piece)) for piece in pieces)
    found = {match.groups() for match in re.finditer(pattern, text)}
    if not found:
        raise SlidesError(
            f"{where}: no stored output of notebook {notebook} has {output!r}. Look at its outputs, and write what is "
            "there; a notebook without outputs is filled by `make notebooks`"
        )
    if len(found) > 1:
        raise SlidesError(f"{where}: {output!r} is found with {sorted(found)} in notebook {notebook}; write more of it")
    return list(found.pop())


def outputs(notebooks: Path, number: str) -> str:
    """All text among the stored outputs of a notebook, cell after cell."""
    return _outputs(path_of(notebooks, number))


def title(notebooks: Path, name: str) -> str:
    """The heading of a notebook, e.g. "07 · Dispatch: …"."""
    cells = _cells(path_of(notebooks, name))
    return "".join(cells[0]["source"]).split("\n")[0].removeprefix("# ")


def path_of(notebooks: Path, start: str) -> Path:
    """The notebook whose file name begins with `start`."""
    found = sorted(notebooks.glob(f"{start}*.ipynb"))
    if len(found) != 1:
        raise SlidesError(f"{len(found)} notebooks in {notebooks.name}/ begin with {start!r}; one is needed")
    return found[0]


@cache
def _outputs(path: Path) -> str:
    texts = []
    for cell in _cells(path):
        for output in cell.get("outputs", []):
            texts.append("".join(output.get("text", [])))
            texts.append("".join(output.get("data", {}).get("text/plain", [])))
            texts.append("".join(output.get("evalue", "")))
    return "\n".join(text for text in texts if text)


def _cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def _plain(number: str) -> str:
    return number.rstrip(",").replace(",", "")
