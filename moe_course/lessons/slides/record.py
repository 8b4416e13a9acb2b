"""Store the player's data of a recorded run for the decks.

The run in `slides/data/four_ranks.json` was made by the command that the file names under "made_by".
"""

from __future__ import annotations

import json
from pathlib import Path

from moe_course.lessons.slides.errors import SlidesError

MOST_BYTES = 60_000


def record(trace: Path, target: Path, steps: list[int] | None, made_by: str) -> int:
    """Write the flow of the trace in the folder `trace`, of these steps, to `target`. Returns the bytes written.

    Raises TraceError for a folder that is no trace, SlidesError for a run too long for a deck.
    """
    from moe_course.trace import Trace
    from moe_course.viz.flow_data import flow_data

    data = {"made_by": made_by} | flow_data(Trace.load(trace), steps=steps)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"
    size = len(text.encode())
    if size > MOST_BYTES:
        raise SlidesError(f"{trace}: {size} bytes of steps {steps}, a deck takes {MOST_BYTES}; name fewer --steps")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return size
