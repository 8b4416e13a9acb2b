"""What the player shows, from a recorded run: tokens, their routes, and the rows that really travel.

Plain JSON of schema `moe_course.flow/1`, in columns, so that it is small. Built in: notebook 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_course.errors import ConfigError, TraceError
from moe_course.viz.flow_wire import group_of, placement_of, wire_of
from moe_course.viz.given import a_trace, several

if TYPE_CHECKING:
    from moe_course.trace import Trace

SCHEMA = "moe_course.flow/1"
#: More than this is no picture, and a page that does not open.
MOST_ROUTES = 400_000
_COLUMNS = ("k", "expert", "weight", "owner", "send_row", "receive_row", "via")
_CONTROL = {0: "·start", 9: "\\t", 10: "\\n", 13: "\\r", 32: "␣"}


def flow_data(
    trace: Trace | str | Path, steps: Iterable[int] | None = None, layers: Iterable[int] | None = None
) -> dict:
    """The data of the player.

    Args:
        trace: a run recorded with `--trace`, or its folder.
        steps, layers: those to show; None shows all.

    Returns:
        JSON-ready; the fields are listed in `tests/unit/test_viz_flow.py`. Routes are sorted by rank, row and k.

    Raises:
        ConfigError: what is no trace, steps that are no numbers, no recorded pass among these steps and layers, or too
            many routes for one picture.
        TraceError: a folder that holds no trace, or routes that belong to no prompt of the run.
    """
    trace = a_trace(trace)
    steps, layers = several("steps", steps), several("layers", layers)
    meta, columns = trace.meta, trace.columns
    keep = torch.ones(len(columns["row"]), dtype=torch.bool)
    for name, wanted in (("step", steps), ("layer", layers)):
        if wanted is not None:
            keep &= torch.isin(columns[name], torch.tensor(wanted, dtype=columns[name].dtype))
    if not keep.any():
        has = {name: sorted(set(columns[name].tolist())) for name in ("step", "layer")}
        raise ConfigError(
            f"no route has step in {_asked(steps)} and layer in {_asked(layers)}; this trace has steps "
            f"{_range(has['step'])} and layers {_range(has['layer'])}"
        )
    if int(keep.sum()) > MOST_ROUTES:
        raise ConfigError(
            f"{int(keep.sum())} routes are too many for one picture, it takes {MOST_ROUTES}: choose steps= or layers="
        )
    placement, texts = placement_of(meta), _Texts(meta)
    passes = [_one_pass(meta, placement, texts, routes) for routes in _passes(columns, keep)]
    sizes = meta["sizes"]
    raw = meta["shape"] in ("all_to_all", "low_latency")  # single outputs come home, not sums
    return {
        "schema": SCHEMA,
        "ranks": meta["world_size"],
        "experts": meta["experts"],
        "owner": placement.owner.tolist(),
        "backend": meta["backend"],
        "shape": meta["shape"],
        "transport": meta["transport"],
        "nodes": placement.nodes,
        "capacity": meta["capacity"] if meta["shape"] == "low_latency" else None,
        "reduce_in_node": meta["reduce_in_node"],
        "reduce": meta["plan"].get("reduce_group") is not None,
        "after": _after(meta["plan"]),
        "row_bytes": sizes["dispatch"],
        "partial_bytes": sizes["contribution" if raw else "partial"],
        "prompts": texts.prompts(columns),
        "passes": passes,
    }


def _after(plan: dict) -> str | None:
    """What ranks that split or share a text's rows move beside dispatch and combine: finished rows, or sums."""
    if plan.get("split_group"):
        return "gather"
    return "sum" if plan.get("reduce_group") and plan.get("dispatch_group", "ep") else None


def _passes(columns: dict[str, torch.Tensor], keep: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """The kept routes of each step and layer, sorted by rank, row and k."""
    index = keep.nonzero().flatten()
    for name in ("k", "row", "source_rank", "layer", "step"):  # the last one counts most: every sort is stable
        index = index[columns[name][index].argsort(stable=True)]
    places = torch.stack([columns["step"][index], columns["layer"][index]], dim=1)
    _, counts = torch.unique_consecutive(places, dim=0, return_counts=True)
    for part in index.split(counts.tolist()):
        yield {name: column[part] for name, column in columns.items()}


def _one_pass(meta: dict, placement: Any, texts: _Texts, routes: dict[str, torch.Tensor]) -> dict:
    step, layer = int(routes["step"][0]), int(routes["layer"][0])
    places = list(zip(*(routes[name].tolist() for name in ("source_rank", "row", "prompt", "position")), strict=True))
    held = sorted({place for place in places for place in _everywhere(meta, place)})
    index = {place: number for number, place in enumerate(held)}
    named = {"owner": "owner_rank", "via": "via_rank"}
    columns = {name: routes[named.get(name, name)].tolist() for name in _COLUMNS}
    columns["weight"] = [round(weight, 4) for weight in columns["weight"]]
    return {
        "step": step,
        "layer": layer,
        "phase": "prefill" if step < meta["prefill_passes"] else "decode",
        "tokens": [
            {"rank": rank, "row": row, "text": texts.of(prompt, position), "prompt": prompt, "position": position}
            for rank, row, prompt, position in held
        ],
        "routes": {"token": [index[place] for place in places]} | columns,
        "wire": wire_of(meta, placement, _ids_per_rank(meta, routes)),
    }


def _everywhere(meta: dict, place: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The row on all ranks that share it; a rank that owns none of its experts has recorded no route of it."""
    rank, *rest = place
    kind = meta["plan"].get("reduce_group")
    return [(peer, *rest) for peer in (group_of(meta, kind, rank) if kind else [rank])]


def _ids_per_rank(meta: dict, routes: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """`topk_ids` `[T_r, K]` of each rank, -1 where the rank has no such route."""
    found = []
    for rank in range(meta["world_size"]):
        mine = routes["source_rank"] == rank
        rows, k = routes["row"][mine], routes["k"][mine]
        ids = torch.full((int(rows.max()) + 1 if len(rows) else 0, meta["top_k"]), -1)
        ids[rows, k] = routes["expert"][mine]
        found.append(ids)
    return found


class _Texts:
    """The text of every token of a run, printable: blanks, control characters and parts of a character are named."""

    def __init__(self, meta: dict):
        self.meta = meta
        self.ids = [[*prompt["tokens"], *new] for prompt, new in zip(meta["prompts"], meta["new_tokens"], strict=True)]
        self.bytes = all(_is_byte(token, meta["token_text"]) for ids in self.ids for token in ids)
        self.known = [_of_bytes(ids) if self.bytes else [self._of_id(token) for token in ids] for ids in self.ids]

    def of(self, prompt: int, position: int) -> str:
        try:
            return self.known[prompt][position]
        except IndexError:
            lengths = [len(ids) for ids in self.ids]
            raise TraceError(
                f"a route belongs to prompt {prompt}, position {position}; the prompts have {lengths} tokens"
            ) from None

    def prompts(self, columns: dict[str, torch.Tensor]) -> list[dict]:
        """Text, number of tokens, rank and continuation of each prompt."""
        found = []
        for index, (prompt, new) in enumerate(zip(self.meta["prompts"], self.meta["new_tokens"], strict=True)):
            ranks = columns["source_rank"][columns["prompt"] == index]
            rank = int(ranks.min()) if len(ranks) else index % self.meta["world_size"]
            told = {"text": prompt["prompt"], "length": len(prompt["tokens"]), "rank": rank}
            found.append(told | {"continuation": self._joined(new)})
        return found

    def _joined(self, ids: list[int]) -> str:
        if self.bytes:
            return bytes(ids).decode(errors="backslashreplace")
        return "".join(self.meta["token_text"].get(str(token), "") for token in ids)

    def _of_id(self, token: int) -> str:
        return printable(self.meta["token_text"].get(str(token), "")) or f"#{token}"


def printable(text: str) -> str:
    """Text that one can see and that stays on its line."""
    return "".join(
        _CONTROL.get(ord(char)) or (char if char.isprintable() else char.encode("unicode_escape").decode())
        for char in text
    )


def _is_byte(token: int, told: dict[str, str]) -> bool:
    """Is this a token of a byte model, by its text?"""
    return token < 256 and (token > 126 or told.get(str(token), chr(token)) == chr(token))


def _of_bytes(ids: list[int]) -> list[str]:
    """One text per byte. The bytes of one character beyond ASCII are numbered: `ö₁ ö₂`."""
    found, at = [], 0
    for char in bytes(ids).decode(errors="surrogateescape"):
        raw = char.encode(errors="surrogateescape")
        if len(raw) > 1:
            found += [f"{printable(char)}{'₁₂₃₄'[part]}" for part in range(len(raw))]
        else:
            found.append(printable(char) if raw[0] < 128 else f"\\x{raw[0]:02x}")
        at += len(raw)
    return found


def _asked(wanted: list[int] | None) -> str:
    return "any" if wanted is None else str(wanted)


def _range(values: list[int]) -> str:
    runs = [list(group) for _, group in groupby(enumerate(values), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0][1]) if len(run) == 1 else f"{run[0][1]}–{run[-1][1]}" for run in runs) or "none"
