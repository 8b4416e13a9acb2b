"""Pictures of tokens on their way. Each exists three times from the same data: live, as a still, as a line of text.

Importing this loads neither anywidget nor matplotlib; calling one of the functions does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_course.viz.picture import Picture


def ribbon(stage: str | None = None) -> Picture:
    """The five stages in a row, `stage` lit; None lights all. See `viz.ribbon`."""
    from moe_course.viz.ribbon import Ribbon

    return Ribbon.of(stage)


def score_grid(*args: Any, **options: Any) -> Picture:
    """Router scores of a few tokens with the chosen experts, and a slider for the bias. See `viz.score_grid`."""
    from moe_course.viz.score_grid import ScoreGrid

    return ScoreGrid.of(*args, **options)


def token_flow(trace: Any, **options: Any) -> Picture:
    """The player: every token of a recorded run on its way to the experts and home. See `viz.token_flow`."""
    from moe_course.viz.token_flow import TokenFlow

    return TokenFlow.of(trace, **options)


def rank_timeline(trace: Any, **options: Any) -> Picture:
    """What each rank did when, from the time stamps of a recorded run. See `viz.rank_timeline`."""
    from moe_course.viz.rank_timeline import RankTimeline

    return RankTimeline.of(trace, **options)


class _Package(ModuleType):
    """Keeps the functions above: the import of `viz/ribbon.py` would put that module in the place of `ribbon`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and callable(vars(self).get(name))):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
