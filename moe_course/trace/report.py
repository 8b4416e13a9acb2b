"""A run in one HTML file: verdict, text, player, timeline, load, bytes against bound, plan.

It needs no network and no server. What comes from a run, prompts first of all, is text in it and never markup.
Built in: notebook 13.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_course.errors import TraceError
from moe_course.result import RESULT_FILE
from moe_course.trace import report_tables, report_words
from moe_course.trace.html import element, joined, script
from moe_course.trace.strict.result import check_result
from moe_course.trace.strict.same_run import check_same_run
from moe_course.trace.trace import Trace
from moe_course.viz.flow_data import flow_data
from moe_course.viz.page import Figure, page
from moe_course.viz.rank_timeline import timeline_data

_PICTURES = Path(__file__).parents[1] / "viz"


def report(trace: Trace, result: dict[str, Any], file: Path = Path(RESULT_FILE)) -> str:
    """The page of a run.

    Args:
        trace: its trace; times and routes come from there.
        result: its JSON, schema `moe_course.run/1`; `file` is its name, for errors.

    Raises:
        TraceError: a figure is missing or of another kind; trace and figures are of different runs.
    """
    result = check_result(result, file)
    flow = flow_data(trace)
    check_same_run(trace.meta, flow, result, file)
    how = (
        "Under each token a bar: the ranks that own its experts, as wide as the router weighed them. The digit is the "
        "rank with most weight. A shaded token was written by the model. Choose one, and the player below follows it."
    )
    agreed = "What all ranks agreed on before the first row moved"
    parts = [
        element("h1", report_words.title(result)),
        report_words.verdict(result),
        report_words.facts(trace, result),
        element("h2", "Where the tokens of your text went"),
        element("p", how, class_="quiet"),
        Figure("token_text", flow),
        report_words.never_fed(trace),
        element("h2", "Every token on its way"),
        Figure("token_flow", flow),
        element("h2", "What each rank did when"),
        Figure("rank_timeline", timeline_data(trace)),
        element("h2", "Load"),
        report_tables.load(trace, result),
        element("h2", "Bytes against the bound"),
        report_tables.moved(result),
        element("h2", "The plan"),
        element("details", element("summary", agreed), report_tables.plan(result)),
        script(_part("report.js")),
    ]
    shown = [part if isinstance(part, Figure) else joined([part]) for part in parts]
    return page(report_words.title(result), shown, _part("report.css"))


def report_of(folder: str | Path) -> str:
    """The page of a folder written by `moe-course run --trace`. Raises TraceError when it is not complete."""
    trace, file = Trace.load(folder), Path(folder) / RESULT_FILE
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{file}: the figures of the run cannot be read ({error}); record the run again") from None
    return report(trace, result, file)


def _part(name: str) -> str:
    return (_PICTURES / name).read_text(encoding="utf-8")
