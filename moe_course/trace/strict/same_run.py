"""Are the routes of a trace and the figures of `run.json` those of one run? Built in: notebook 13."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_course.errors import TraceError
from moe_course.layout import rank_groups
from moe_course.trace.schema import LOOSE
from moe_course.trace.strict.result import refuse, shown


def check_same_run(meta: dict[str, Any], flow: dict[str, Any], result: dict[str, Any], file: Path) -> None:
    """Raises TraceError naming the field, and what `run.json` and the trace say.

    Args:
        meta, flow: `meta.json`, and what the player shows of the whole trace: `viz.flow_data.flow_data`.
        result: `run.json`, checked by `result.check_result`; `file` is its name.
    """
    for name, (told, here) in _facts(meta, result).items():
        _compare(file, name, told, here)
    _compare_ranks(file, meta, result)
    moved = _moved_by_routes(flow, meta["prefill_passes"])
    _compare(file, "moved", [(m["layer"], m["phase"]) for m in result["moved"]], list(moved))
    names = ("passes", "bound", "rows", "payload", "padding")
    if any(name in meta["options"] for name in LOOSE):
        names = ("passes", "bound")
    for place, line in enumerate(result["moved"]):
        expected = moved[line["layer"], line["phase"]]
        for name in names:
            _compare(file, f"moved[{place}].{name}", line[name], expected[name])
        _compare(file, f"moved[{place}].ratio", line["ratio"], _ratio(line["payload"], line["bound"]))
    _compare_load(file, meta, flow, result["load"]["routes_per_rank"])
    if "rows" in names:
        _compare_rows_of_ranks(file, flow, result)
    _compare_sums(file, result)


def _compare(file: Path, name: str, told: object, here: object) -> None:
    if json.dumps(told, sort_keys=True) != json.dumps(here, sort_keys=True):  # 1 is not true here, and not 1.0
        raise TraceError(
            f"{file}: field {name} is {shown(told)}, the trace says {shown(here)}: trace and figures are of "
            "different runs, or one of them was changed; record the run again"
        )


def _facts(meta: dict, result: dict) -> dict[str, tuple]:
    """Field of `run.json` -> its value, and that of `meta.json`."""
    names = ("world_size", "model", "device", "transport", "plan", "combine_dtype", "reduce_in_node")
    found = {name: (result[name], meta[name]) for name in names}
    found["backend"] = (result["backend"], meta["plan"].get("backend"))
    found["dtype"] = (result["dtype"], meta["rows_dtype"])
    found["phases.prefill_passes"] = (result["phases"]["prefill_passes"], meta["prefill_passes"])
    found["prompts"] = (len(result["prompts"]), len(meta["prompts"]))
    for n, (told, prompt, new) in enumerate(zip(result["prompts"], meta["prompts"], meta["new_tokens"], strict=False)):
        found[f"prompts[{n}].prompt"] = (told["prompt"], prompt["prompt"])
        found[f"prompts[{n}].prompt_tokens"] = (told["prompt_tokens"], prompt["tokens"])
        found[f"prompts[{n}].tokens (new_tokens)"] = (told["tokens"], new)
    quantised = result["quantised"]
    found["quantised.format"] = (quantised["format"] if quantised else "none", meta["dispatch_quant"])
    found["stages"] = (bool(result["stages"]), "stages" in meta["options"])
    return found


def _compare_ranks(file: Path, meta: dict, result: dict) -> None:
    """Every rank once, in order, at its place in the plan."""
    ranks, plan = meta["world_size"], meta["plan"]
    _compare(file, "ranks", [rank["rank"] for rank in result["ranks"]], list(range(ranks)))
    groups = rank_groups(ranks, **{axis: plan[axis] for axis in ("dp", "pp", "pcp", "tp")})
    for number, told in enumerate(result["ranks"]):
        here = {
            axis: next(group.index(number) for group in groups[axis] if number in group)
            for axis in ("dp", "tp", "pcp", "ep")
        }
        here["ep_rank"] = here.pop("ep")
        here["experts"] = plan["experts_per_rank"][here["ep_rank"]] if plan["ep_size"] > 1 else meta["experts"]
        for name, value in here.items():
            _compare(file, f"ranks[{number}].{name}", told[name], value)
    for number, told in enumerate(result["prompts"]):
        if told["dp_rank"] not in range(plan["dp"]):
            refuse(file, f"prompts[{number}].dp_rank", told["dp_rank"], f"0 to {plan['dp'] - 1}")


def _moved_by_routes(flow: dict, prefill_passes: int) -> dict[tuple[int, str], dict[str, int]]:
    """(layer, phase) -> what the routes say must travel."""
    layers = sorted({each["layer"] for each in flow["passes"]})
    names = ("passes", "rows", "payload", "padding")
    found = {(layer, phase): dict.fromkeys(names, 0) for phase in ("prefill", "decode") for layer in layers}
    width = {"dispatch": flow["row_bytes"], "combine": flow["partial_bytes"]}
    for each in flow["passes"]:
        line = found[each["layer"], "prefill" if each["step"] < prefill_passes else "decode"]
        line["passes"] += 1
        for way, entries in each["wire"].items():
            for _, _, rows, places, payload in entries:
                line["rows"] += rows
                line["payload"] += payload
                line["padding"] += places * width[way]
    return {key: line | {"bound": line["payload"]} for key, line in found.items()}


def _compare_load(file: Path, meta: dict, flow: dict, told: list[int] | None) -> None:
    """Routes that each EP rank computed; null where no rank owns experts of its own."""
    if meta["plan"]["ep_size"] != meta["world_size"] or (told is None and meta["world_size"] == 1):
        return
    owners = Counter(owner for each in flow["passes"] for owner in each["routes"]["owner"])
    _compare(file, "load.routes_per_rank", told, [owners[rank] for rank in range(meta["world_size"])])


def _compare_rows_of_ranks(file: Path, flow: dict, result: dict) -> None:
    sent, received = [0] * flow["ranks"], [0] * flow["ranks"]
    for each in flow["passes"]:
        for entries in each["wire"].values():
            for source, destination, rows, *_ in entries:
                sent[source] += rows
                received[destination] += rows
    for rank, told in enumerate(result["ranks"]):
        _compare(file, f"ranks[{rank}].rows_sent", told["rows_sent"], sent[rank])
        _compare(file, f"ranks[{rank}].rows_received", told["rows_received"], received[rank])


def _compare_sums(file: Path, result: dict) -> None:
    """Totals are the sums of what they are totals of."""
    moved, inside = result["moved"], [entry for entry in result["ledger"] if entry["layer"] >= 0]
    ranks, ledger = result["ranks"], _sum(result["ledger"], "payload", "padding", "metadata")
    sums = {
        "rows.sent": (result["rows"]["sent"], _sum(ranks, "rows_sent"), "ranks"),
        "rows.received": (result["rows"]["received"], _sum(ranks, "rows_received"), "ranks"),
        "bytes.payload": (result["bytes"]["payload"], _sum(moved, "payload"), "moved"),
        "bytes.padding": (result["bytes"]["padding"], _sum(moved, "padding"), "moved"),
        "bytes": (sum(result["bytes"].values()), ledger, "ledger"),
        "bound.payload": (result["bound"]["payload"], _sum(moved, "bound"), "moved"),
        "bound.ratio": (result["bound"]["ratio"], _ratio(_sum(moved, "payload"), _sum(moved, "bound")), "moved"),
        **{f"the sum of moved[].{name}": (_sum(moved, name), _sum(inside, name), "ledger")
           for name in ("rows", "payload", "padding")},
    }  # fmt: skip
    for name, (told, here, whose) in sums.items():
        if told != here:
            refuse(file, name, told, f"{here}, as {whose} adds up to")


def _sum(records: Iterable[dict], *names: str) -> int:
    return sum(record[name] for record in records for name in names)


def _ratio(payload: int, bound: int) -> float | None:
    return payload / bound if bound else None
