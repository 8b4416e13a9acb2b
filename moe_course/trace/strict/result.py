"""Check that `run.json` holds what a reader will look up in it. Built in: notebook 13."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

from moe_course.errors import TraceError
from moe_course.result import SCHEMA
from moe_course.trace.strict.result_schema import EACH, INSIDE, LEDGER, NUMBER, RESULT, SIGNED, VERDICTS

_MOST = 2**63


def check_result(result: object, file: Path) -> dict[str, Any]:
    """`run.json`, if it is one of this version and of one mind with itself.

    Raises TraceError naming the field, its value and what is expected.
    """
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        found = result.get("schema") if isinstance(result, dict) else result
        raise TraceError(f"{file}: schema is {shown(found)}, this version reads {SCHEMA!r}")
    _check_record(file, "", result, RESULT)
    for name, kinds in INSIDE.items():
        if result[name] is not None:
            _check_record(file, name, result[name], kinds)
    for name, kinds in (EACH | {"ledger": LEDGER}).items():
        for place, entry in enumerate(result[name]):
            _check_kind(file, f"{name}[{place}]", entry, dict)
            _check_record(file, f"{name}[{place}]", entry, kinds, least=-1 if name == "ledger" else 0)
    _check_texts(file, result)
    _check_verdict(file, result)
    return result


def refuse(file: Path, name: str, value: object, expected: str) -> NoReturn:
    raise TraceError(f"{file}: field {name} is {shown(value)}, expected {expected}")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}…"


def _check_record(file: Path, outer: str, record: dict, kinds: dict[str, Any], least: int = 0) -> None:
    prefix = f"{outer}." if outer else ""
    for name in sorted(set(kinds) ^ set(record)):
        what = "is missing" if name in kinds else "is not known"
        raise TraceError(f"{file}: field {prefix}{name} {what}; there are {len(kinds)}: {', '.join(kinds)}")
    for name, kind in kinds.items():
        _check_kind(file, prefix + name, record[name], kind, None if name in SIGNED else least)


def _check_kind(file: Path, name: str, value: object, kind: type | tuple, least: int | None = 0) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        refuse(file, name, value, " or ".join("null" if k is type(None) else k.__name__ for k in kinds))
    if least is not None and isinstance(value, NUMBER) and not least <= value < _MOST:
        refuse(file, name, value, f"{least} or more, and a number that can be counted")


def _check_texts(file: Path, result: dict) -> None:
    """Lists and tables whose entries are no records."""
    lists = {"failures": (result["failures"], str), "load.routes_per_rank": (result["load"]["routes_per_rank"], int)}
    for place, prompt in enumerate(result["prompts"]):
        lists |= {f"prompts[{place}].{name}": (prompt[name], int) for name in ("prompt_tokens", "tokens")}
    lists |= {f"ranks[{n}].tensors_ignored": (rank["tensors_ignored"], str) for n, rank in enumerate(result["ranks"])}
    lists["across_nodes.ranks"] = ((result["across_nodes"] or {}).get("ranks"), int)
    for name, (found, kind) in lists.items():
        for place, entry in enumerate(found or ()):
            _check_kind(file, f"{name}[{place}]", entry, kind)
    for name, kind in (("stages", str), ("guard", NUMBER)):
        for key, value in result[name].items():
            _check_kind(file, f"{name}.{key}", value, kind)


def _check_verdict(file: Path, result: dict) -> None:
    """The verdict is one that the figures beside it allow."""
    verdict, failures, difference = result["verdict"], result["failures"], result["max_abs_logit_diff"]
    if verdict not in VERDICTS:
        refuse(file, "verdict", verdict, " or ".join(VERDICTS))
    if bool(failures) and verdict in ("equal", "not checked"):
        refuse(file, "failures", failures, f"none: verdict is {verdict!r}")
    if not failures and verdict == "different":
        refuse(file, "failures", failures, "what differs: verdict is 'different'")
    compared = verdict != "not checked"
    told = {"max_abs_logit_diff": difference, "topk_ids_equal": result["topk_ids_equal"]}
    told |= {name: result[name] for name in ("routed_rows_compared", "rows_after_near_ties")}
    told |= {f"prompts[{n}].matches_reference": p["matches_reference"] for n, p in enumerate(result["prompts"])}
    for name, value in told.items():
        if (value is not None) != compared:
            refuse(file, name, value, f"{'a value' if compared else 'null'}: verdict is {verdict!r}")
    if verdict == "equal" and math.isnan(difference):
        refuse(file, "max_abs_logit_diff", difference, "a number: verdict is 'equal'")
    if verdict == "equal" and not result["near_ties"]:
        for name, value in told.items():
            if value is False:
                refuse(file, name, value, "true: verdict is 'equal' and there are no near ties")
