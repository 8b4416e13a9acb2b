"""What a check says: one line first, then what helps. The same text in every run. Built in: notebook 00."""

from __future__ import annotations

import base64
import importlib.util
import sys
from dataclasses import dataclass, field

from moe_course.lessons.judging.compare import Table
from moe_course.lessons.judging.draw import as_picture, as_text


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        kind: "ok", "not attempted", "refused" (cannot be tried), "raised", "slow", "changed" (its inputs), "wrong" or
            "dear" (right, but over the budget).
        headline: the first line; lines: those after it.
        look: name of the first look that differs, for "wrong".
        table: expected and yours, where there is something to draw.
    """

    kind: str
    headline: str
    lines: list[str] = field(default_factory=list)
    look: str | None = None
    table: Table | None = None

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    def __str__(self) -> str:
        drawn = as_text(self.table) if self.table else []
        return "\n".join(
            [
                self.headline,
                *(f"  {line}" for line in self.lines[:1]),
                *drawn,
                *(f"  {line}" for line in self.lines[1:]),
            ]
        )

    def show(self) -> None:
        """Print it; in a notebook with the table as a picture below."""
        print(self)
        if self.table and _in_kernel():
            from IPython.display import display

            image = base64.b64encode(as_picture(self.table, self.headline)).decode()
            display({"image/png": image, "text/plain": "[picture: the same table]"}, raw=True)


def _in_kernel() -> bool:
    if "IPython" not in sys.modules or importlib.util.find_spec("matplotlib") is None:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
