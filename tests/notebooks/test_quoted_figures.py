"""Figures that the text of a lesson quotes are those that its cells print: a new model makes old sentences red."""

from __future__ import annotations

import pytest
from notebook_file import NOTEBOOKS, Notebook, outputs

#: (notebook, what its text says, what an output has to say for it)
QUOTED = (
    (
        "00_start_here",
        "It has no token, and computes 67 of 144 routes",
        "144 routes in layer 1 step 0; 67 to another rank",
    ),
    ("00_start_here", "a start mark and 17 bytes", "byte '(', row 17, layer 1"),
    ("02_router", "Row a wants experts 3 and 0, row b 2 and 4", "2 rows hold, experts [[3, 0], [2, 4]]"),
    ("02_router", "expert 2 scored 0.12 and got more than half", "expert 2 scored 0.12 and earns 0.30, it got 1.34"),
    ("02_router", "expert 223 weighs 0.302, and 121 behind it 0.367", "223: 0.302 121: 0.367"),
    ("02_router", "(An even share: 113 × 8 / 256, about 3.5.)", "logits [113, 256]"),
    ("02_router", "a loss of 0.97 where 0.90 was due", "surprise 0.97"),
    ("02_router", "a loss of 0.97 where 0.90 was due", "surprise 0.90"),
    ("02_router", "The busiest expert sees 17 rows, not 55", "sees: no bias [55, 40] with bias [17, 17]"),
)


def stale(notebook: Notebook, prose: str, output: str) -> list[str]:
    """What is missing of a pair: the sentence, or the output that it rests on."""
    found = [] if any(prose in cell["source"] for cell in notebook.prose) else [f"no text says {prose!r}"]
    printed = any(output in " ".join(text.split()) for _, text in outputs(notebook))
    return found if printed else [*found, f"{prose!r} is not what the cells print now: {output!r}"]


@pytest.mark.parametrize(("name", "prose", "output"), QUOTED, ids=[f"{q[0][:2]}-{q[2]}" for q in QUOTED])
def test_quoted_figure_is_printed(name, prose, output):
    assert stale(Notebook.load(NOTEBOOKS / f"{name}.ipynb"), prose, output) == []


def test_a_stale_figure_is_noticed():
    name, prose, output = QUOTED[0]
    notebook = Notebook.load(NOTEBOOKS / f"{name}.ipynb")
    assert stale(notebook, prose.replace("67", "66"), output.replace("67", "66")) == [
        "no text says 'It has no token, and computes 66 of 144 routes'",
        "'It has no token, and computes 66 of 144 routes' is not what the cells print now: "
        "'144 routes in layer 1 step 0; 66 to another rank'",
    ]
