"""Where each section, table row and failure mode of the note lives in the course: data, looked up by cell tags."""

from __future__ import annotations

from dataclasses import dataclass

#: Sections of the note, and the least number of places each must have (its rows, where it is a table).
SECTIONS = {
    "Scope": 1,
    "TL;DR": 1,
    "The Big Picture": 1,
    "Why This Exists": 1,
    "The Core Idea": 1,
    "Symbol Map": 8,
    "Parallelism Map": 4,
    "GLM-5.1 Enters a Shared MoE Shell": 1,
    "Deep Dive": 5,
    "Putting It Together": 7,
    "Backend Branches": 6,
    "What This Buys You": 2,
    "Where It Breaks": 8,
    "Verification Boundary": 1,
    "One Thing to Remember": 1,
    "Go Deeper": 1,
}
#: Items whose notebook does not exist yet. Lower it with every notebook that is written.
NOT_WRITTEN = 38


@dataclass(frozen=True)
class Item:
    """One item of the note: a cell of `notebook` is tagged `tag`, and its text has every word of `mentions`."""

    section: str
    notebook: str
    tag: str
    mentions: tuple[str, ...] = ()
    written: bool = False


_00, _01, _02, _03 = "00_start_here", "01_why_experts_travel", "02_router", "03_local_experts"
_04, _05, _06, _07 = "04_ep_group", "05_expert_map", "06_ep_without_dispatch", "07_dispatch"
_08, _09, _10, _11 = "08_combine", "09_all_to_all", "10_backends", "11_skew"
_12, _13 = "12_where_it_breaks", "13_the_real_run"

_SYMBOLS = (
    "`E`",
    "`K`",
    "`R`",
    "`expert_map`",
    "`topk_ids`",
    "`topk_weights`",
    "`a1`",
    "`a1q`",
    "`w1`",
    "`w13`",
    "`w2`",
)
#: What the note says it saw in the source, what it inferred, and what it says nobody ran.
_CLAIMS = (
    "thin alias",
    "one group",
    "no expert is cut",
    "local row",
    "global ids",
    "ids and weights",
    "local experts",
    "in order",
    "fraction of the experts",
    "other backends",
    "DeepEP",
    "CUDA graphs, throughput",
    "own weights",
    "source-read",
    "not checked",
)
_BOXES = tuple(f"\n| {box} | " for box in "ABCDEFGHIJ")

ITEMS = (
    Item("Scope", _00, "note:scope", ("control path", "Ascend", "executed"), written=True),
    Item("TL;DR", _00, "note:tldr", ("GlmMoeDsaForCausalLM", "one group", "whole experts", "in order"), written=True),
    Item("The Big Picture", _00, "note:big-picture", _BOXES, written=True),
    Item("Symbol Map", _00, "note:symbol-map", _SYMBOLS, written=True),
    Item("One Thing to Remember", _00, "note:one-thing", ("global", "local", "promise"), written=True),
    Item("Why This Exists", _01, "note:why"),
    Item("The Core Idea", _01, "note:core-idea"),
    Item("Symbol Map", _01, "note:symbol-E"),
    Item("What This Buys You", _01, "note:buys-memory"),
    Item("Deep Dive", _02, "note:deep-dive-2", ("`select_experts`", "**global**", "12 and 139"), written=True),
    Item("Symbol Map", _02, "note:symbol-K", ("`K`",), written=True),
    Item("Symbol Map", _02, "note:symbol-topk_ids", ("`topk_ids`", "global ids"), written=True),
    Item("Symbol Map", _02, "note:symbol-topk_weights", ("`topk_weights`",), written=True),
    Item("Putting It Together", _02, "note:step-1", ("| 1 |", "logit"), written=True),
    Item("Putting It Together", _02, "note:step-2", ("| 2 |", "`topk_ids`", "`topk_weights`"), written=True),
    Item("GLM-5.1 Enters a Shared MoE Shell", _03, "note:shell"),
    Item("Deep Dive", _03, "note:deep-dive-4"),
    Item("Symbol Map", _03, "note:symbol-w1-w2"),
    Item("Putting It Together", _03, "note:step-5"),
    Item("Putting It Together", _03, "note:step-7"),
    Item("Parallelism Map", _04, "note:mode-tp"),
    Item("Parallelism Map", _04, "note:mode-ep-tp2"),
    Item("Parallelism Map", _04, "note:mode-dp-ep"),
    Item("Parallelism Map", _04, "note:mode-pcp-ep"),
    Item("Deep Dive", _04, "note:deep-dive-1-group"),
    Item("Symbol Map", _04, "note:symbol-R"),
    Item("Where It Breaks", _04, "note:break-pipeline"),
    Item("Deep Dive", _05, "note:deep-dive-1-map"),
    Item("Symbol Map", _05, "note:symbol-expert_map"),
    Item("Putting It Together", _05, "note:step-3"),
    Item("Where It Breaks", _05, "note:break-missing-weights"),
    Item("Where It Breaks", _05, "note:break-placement"),
    Item("Parallelism Map", _06, "note:mode-ep-tp2"),
    Item("Backend Branches", _06, "note:backend-none"),
    Item("Where It Breaks", _06, "note:break-reduction"),
    Item("Deep Dive", _07, "note:deep-dive-3", ("routing metadata", "ids and weights", "139", "lose"), written=True),
    Item("Symbol Map", _07, "note:symbol-a1-a1q", ("`a1` before", "`a1q` after", "GLM-5.1"), written=True),
    Item("Parallelism Map", _07, "note:mode-dp-ep", ("DP + EP", "gathered before", "reduce-scatter"), written=True),
    Item(
        "Backend Branches",
        _07,
        "note:backend-agrs-dispatch",
        ("allgather_reducescatter", "AgRsAll2AllManager", "_prepare", "full gathered batches"),
        written=True,
    ),
    Item("Putting It Together", _07, "note:step-4", ("Prepare", "quantise if required", "batch"), written=True),
    Item("Deep Dive", _08, "note:deep-dive-5"),
    Item("Putting It Together", _08, "note:seven-steps"),
    Item("Putting It Together", _08, "note:step-6"),
    Item("Backend Branches", _08, "note:backend-agrs-combine"),
    Item("Parallelism Map", _08, "note:mode-pcp-ep"),
    Item("Where It Breaks", _08, "note:break-reduction"),
    Item("Backend Branches", _09, "note:backend-deepep-high-throughput"),
    Item("What This Buys You", _09, "note:buys-extension"),
    Item("Backend Branches", _10, "note:backends"),
    Item("Backend Branches", _10, "note:backend-important"),
    Item("Where It Breaks", _10, "note:break-dependency"),
    Item("Where It Breaks", _10, "note:break-shape"),
    Item("Where It Breaks", _11, "note:break-skew"),
    Item("Where It Breaks", _12, "note:where-it-breaks"),
    Item(
        "GLM-5.1 Enters a Shared MoE Shell",
        _13,
        "note:shell-end-to-end",
        ("DeepSeek family", "whole on every rank", "One row per token"),
        written=True,
    ),
    Item("Verification Boundary", _13, "note:verification-boundary", _CLAIMS, written=True),
    Item("Go Deeper", _13, "note:go-deeper", ("`moe_course.run`", "vLLM", "One thing to remember"), written=True),
)
