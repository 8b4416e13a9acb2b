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
    ("07_dispatch", "Six rows arrived that nobody sent", "rows [0, 1, 0, 0, 0, 0, 200, 201, 202, 300, 0, 0]"),
    ("07_dispatch", "twelve routes to expert 0", "expert 0 is asked 12 times"),
    ("07_dispatch", "rank 3 has no token, and the most to do", "59 69 66 78 (busiest: rank 3)"),
    ("07_dispatch", "Nine of ten are wanted where they land", " 4 102 93 91 90 "),
    ("07_dispatch", "(3/4)⁸ = 0.10", " 4 102 93 91 90 "),
    ("07_dispatch", "a row shrinks from 12,288 bytes to 6,336", "bf16 12,288 bytes, fp8_group 6,336"),
    ("07_dispatch", "Three real rows are zero", "all of them real: 3"),
    (
        "07_dispatch",
        "Fluent text, one of two even right",
        "['t__(self', '_compile'] weights at home ['t__(self', ",
    ),
    ("13_the_real_run", "two ranks tie for most", "routes per rank 112 112 95 97 (busiest: ranks 0, 1)"),
    ("13_the_real_run", "16 for expert 146 and 8 for the next", "expert 146 with 16, expert 40 with 8"),
    ("13_the_real_run", "the others never pass 8", " 64 4 21.1 63.00 7.56 7.88"),
    ("13_the_real_run", "1,350 GiB of experts", " 8 32 168.8 "),  # of one rank in eight
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
