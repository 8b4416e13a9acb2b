"""Trace folders written by hand: complete and correct, until a test breaks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_course.expert_map import make_placement
from moe_course.trace.schema import COLUMNS, SCHEMA, SPANS, dtype_of


def meta_of(ranks: int, experts: int, **fields: Any) -> dict:
    """Everything of `meta.json` but what is counted in the files. `fields` replace some; those of `plan` are added."""
    placement = make_placement(ranks, experts)
    plan = {
        "world_size": ranks,
        "ep_size": ranks,
        "placement": "linear",
        "experts_per_rank": [placement.num_local(rank) for rank in range(ranks)],
        "reduce_group": None,
        **{"dp": ranks, "pp": 1, "pcp": 1, "tp": 1},
    }
    return {
        "world_size": ranks, "model": "none", "plan": plan | fields.pop("plan", {}),
        "prompts": [{"prompt": "x", "tokens": list(range(64))}], "new_tokens": [[0]], "token_text": {},
        "backend": "all_to_all", "shape": "all_to_all", "transport": "threads", "device": "cpu", "hidden_size": 16,
        "experts": experts, "top_k": experts, "rows_dtype": "float32",
        "sizes": {"dispatch": 64, "partial": 64, "contribution": 64}, "capacity": None, "prefill_passes": 1,
        "dispatch_quant": "none", "combine_dtype": "auto", "reduce_in_node": False, "exact": True, "threads": 1,
        "clock": {"source": "time.monotonic_ns", "hosts": 1, "comparable": True, "note": ""}, "options": {},
    } | fields  # fmt: skip


def write_meta(folder: Path, meta: dict, routes: list[int], values: bool = False) -> None:
    (folder / "meta.json").write_text(json.dumps({"schema": SCHEMA} | meta | {"values": values, "routes": routes}))


def rank_tensors(rank: int, ranks: int, experts: int, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's file with these columns, `expert` among them; owners follow from the plan, the rest is 0.

    Row i is token i at position i of the prompt of `meta_of`, unless `columns` says otherwise.
    """
    placement, n = make_placement(ranks, experts), len(columns["expert"])
    found = {name: torch.zeros(n, dtype=dtype_of(name)) for name in COLUMNS} | {"source_rank": torch.full((n,), rank)}
    found["owner_rank"] = placement.owner[columns["expert"]].long()
    found["local_expert"] = placement.local[columns["expert"]].long()
    row = columns.get("row", found["row"])
    found |= {"position": row.clone(), "token_id": row.clone()}
    return spans_of(found | columns) | found | columns


def spans_of(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One span of stage "route" for each pass through a layer that has routes, each as long as a nanosecond."""
    places = torch.stack([columns["step"], columns["layer"]], dim=1).unique(dim=0)  # [passes x layers, 2], in order
    now = torch.arange(len(places))
    return dict(zip(SPANS, (*places.T.contiguous(), torch.zeros_like(now), now, now + 1), strict=True))


def write_file(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / f"rank{rank:04d}.safetensors")
