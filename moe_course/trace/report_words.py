"""Sentences of a run's page: title, verdict, facts, and the tokens that no rank has seen. Built in: notebook 13."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_course.result import why_reported
from moe_course.trace.html import Html, element
from moe_course.trace.trace import Trace
from moe_course.viz.flow_data import printable

_MOST_FAILURES = 5


def count(n: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def listed(names: Sequence[object]) -> str:
    """`0`, `0 and 4`, `0, 2 and 4`."""
    *first, last = map(str, names)
    return f"{', '.join(first)} and {last}" if first else last


def title(result: dict[str, Any]) -> str:
    return f"Expert parallelism on {count(result['world_size'], 'rank')}: {result['backend']}"


def verdict(result: dict[str, Any]) -> Html:
    """What the comparison with the one-process model found."""
    found, failures = result["verdict"], result["failures"]
    lines = [part for text in failures[:_MOST_FAILURES] for part in (element("br"), text)]
    if (more := len(failures) - _MOST_FAILURES) > 0:
        lines += [element("br"), f"and {count(more, 'other difference')}"]
    kind = found if found in ("equal", "different") else "other"
    return element("p", element("b", found), _means(result), *lines, class_=f"verdict {kind}")


def _means(result: dict[str, Any]) -> str:
    found, difference = result["verdict"], result["max_abs_logit_diff"]
    if found == "equal":
        ties = len(result["near_ties"])
        after = f", but for {count(ties, 'near tie')} and what follows from it" if ties else ""
        return (
            "text, logits and chosen experts equal the untouched one-process model "
            f"(largest difference of a logit {_number(difference)}){after}"
        )
    if found == "different":
        return "the run differs from the untouched one-process model"
    if found == "not checked":
        return "nobody compared this run; add --check"
    same = sum(prompt["matches_reference"] for prompt in result["prompts"])
    texts = count(len(result["prompts"]), "text")
    return (
        f"compared with the untouched one-process model: {same} of {texts} equal, logits "
        f"differ by up to {_number(difference)}; {why_reported(result)}"
    )


def _number(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def facts(trace: Trace, result: dict[str, Any]) -> Html:
    """What ran, in five lines."""
    meta, prompts = trace.meta, result["prompts"]
    new = sum(len(prompt["tokens"]) for prompt in prompts)
    read = sum(len(prompt["prompt_tokens"]) for prompt in prompts)
    found = {
        "model": f"{Path(result['model']).name}: {count(meta['experts'], 'expert')}, {meta['top_k']} per token",
        "ranks": f"{result['world_size']} on {result['device']}, rows in {result['dtype']}",
        "rows travel": _travel(meta, result),
        "text": f"{count(len(prompts), 'prompt')}, {count(read, 'token')} read, {new:,} written",
        "stages": ", ".join(f"{name} from {path}" for name, path in result["stages"].items()) or "the package's",
    }
    return element("dl", *(part for name, text in found.items() for part in (element("dt", name), element("dd", text))))


def _travel(meta: dict[str, Any], result: dict[str, Any]) -> str:
    carried = f"carried by {result['transport']} ({result['transport_reason']})"
    if meta["world_size"] == 1:
        return "no: one rank has all rows and all experts"
    if meta["shape"] == "no_dp_ep":
        return f"as partial sums alone ({result['backend']}): every rank has every row; {carried}"
    return f"as {result['backend']}, {carried}"


def never_fed(trace: Trace) -> Html | str:
    """The last token of each text: it was written, and went through no layer."""
    meta, columns = trace.meta, trace.columns
    seen = set(zip(columns["prompt"].tolist(), columns["position"].tolist(), strict=True))
    parts: list[Any] = []
    for number, (prompt, new) in enumerate(zip(meta["prompts"], meta["new_tokens"], strict=True)):
        if new and (number, len(prompt["tokens"]) + len(new) - 1) not in seen:
            text = printable(meta["token_text"].get(str(new[-1]), "")) or f"#{new[-1]}"
            parts += [", " if parts else " It is ", element("code", text), f" in prompt {number}"]
    if not parts:
        return ""
    says = "The last token of a text is missing above: it was written and never fed back, so no rank computed it."
    return element("p", says, *parts, ".", class_="quiet")
