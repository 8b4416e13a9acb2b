"""Which row of which prompt each rank takes through each pass: worked out again from prompts, plan and capacity.

As `glm.generate` does: a rank's prompts go in together, in parts where places are fixed; then each prompt that has not
ended brings the token that was chosen last. Built in: notebook 13.
"""

from __future__ import annotations

from pathlib import Path

import torch

from moe_course.errors import TraceError
from moe_course.layout import rank_groups
from moe_course.trace.strict.passes import first_true

#: `[step][row]` -> (prompt, position) of one rank.
Passes = list[list[tuple[int, int]]]


def planned_rows(meta: dict) -> list[Passes]:
    """For every rank. All ranks make the same number of passes."""
    plan, prompts, new = meta["plan"], meta["prompts"], meta["new_tokens"]
    dp, per_copy = plan["dp"], plan["pp"] * plan["pcp"] * plan["tp"]
    lengths = [len(prompt["tokens"]) for prompt in prompts]
    mine = [[index for index in range(len(prompts)) if index % dp == place] for place in range(dp)]
    parts = [_prompt_parts(indices, lengths, meta["capacity"]) for indices in mine]
    prefill, steps = max(1, *map(len, parts)), max(map(len, new), default=1)
    shared: list[Passes] = []  # by data-parallel rank
    for indices, first in zip(mine, parts, strict=True):
        passes = first + [[]] * (prefill - len(first))
        for step in range(1, steps):  # a prompt that ended has as many new tokens as it had steps
            passes.append([(index, lengths[index] + step - 1) for index in indices if len(new[index]) > step])
        shared.append(passes)
    return [[_own(rows, plan, rank) for rows in shared[rank // per_copy]] for rank in range(meta["world_size"])]


def prefill_passes(meta: dict) -> int:
    """Passes that the prompts take, by the passes in all and the new tokens."""
    return len(planned_rows(meta | {"new_tokens": [[] for _ in meta["new_tokens"]]})[0])


def _prompt_parts(indices: list[int], lengths: list[int], capacity: int | None) -> Passes:
    """Columns of a left-padded batch, as many for each pass as fit."""
    longest = max((lengths[index] for index in indices), default=0)
    columns = [
        [(index, column - longest + lengths[index]) for index in indices if column >= longest - lengths[index]]
        for column in range(longest)
    ]
    parts: list[list[tuple[int, int]]] = [[]] if indices else []
    for rows in columns:
        if capacity is not None and len(parts[-1]) + len(rows) > capacity:
            parts.append([])
        parts[-1] += rows
    return [sorted(part) for part in parts]  # by prompt, then by position


def _own(rows: list[tuple[int, int]], plan: dict, rank: int) -> list[tuple[int, int]]:
    """The share of a rank where rows are split, see `Mode.own_rows`; else all."""
    if plan["split_group"] is None:
        return rows
    place, size = {"tp": (rank % plan["tp"], plan["tp"]), "pcp": (rank // plan["tp"] % plan["pcp"], plan["pcp"])}[
        plan["split_group"]
    ]
    share = -(-len(rows) // size)
    return rows[place * share : (place + 1) * share]


def sharers(meta: dict, kind: str | None) -> list[list[int]]:
    """Groups of ranks by kind; without one, each rank by itself."""
    if kind is None:
        return [[rank] for rank in range(meta["world_size"])]
    return rank_groups(meta["world_size"], **{axis: meta["plan"][axis] for axis in ("dp", "pp", "pcp", "tp")})[kind]


def check_rows(path: Path, rank: int, tensors: dict[str, torch.Tensor], passes: Passes) -> None:
    """Every route belongs to a row that its rank took. Raises TraceError naming column, entry and both values."""
    step, row = tensors["step"], tensors["row"]
    counts = torch.tensor([len(rows) for rows in passes])
    for at in first_true(step >= len(passes)):
        raise TraceError(
            f"{path}: column step, entry {at}, is {int(step[at])}, expected 0 to {len(passes) - 1}: prompts and "
            f"new_tokens of meta.json take {len(passes)} passes"
        )
    for at in first_true(row >= counts[step]):
        n = int(counts[step[at]])
        raise TraceError(
            f"{path}: column row, entry {at}, is {int(row[at])}, expected less than {n}: rank {rank} brings {n} rows "
            f"of the prompts of meta.json to step {int(step[at])}"
        )
    every = torch.tensor([place for rows in passes for place in rows], dtype=torch.int64).view(-1, 2)
    should = every[(counts.cumsum(0) - counts)[step] + row]  # [n, 2]
    told = torch.stack([tensors["prompt"], tensors["position"]], dim=1)
    for at in first_true((told != should).any(dim=1)):
        raise TraceError(
            f"{path}: columns prompt and position, entry {at}, are {tuple(told[at].tolist())}, expected "
            f"{tuple(should[at].tolist())}: row {int(row[at])} of rank {rank} in step {int(step[at])}"
        )


def check_outputs(path: Path, tensors: dict[str, torch.Tensor], passes: Passes, layers: list[int]) -> None:
    """One output for each row of each pass through each layer, in this order."""
    names = ("output_step", "output_layer", "output_row")
    told = torch.stack([tensors[name] for name in names], dim=1)  # [n, 3]
    places = [(step, layer, row) for step, rows in enumerate(passes) for layer in layers for row in range(len(rows))]
    should = torch.tensor(places, dtype=torch.int64).view(-1, 3)
    if len(told) != len(should):
        raise TraceError(f"{path}: column output has {len(told)} entries, expected {len(should)}: one for each row")
    for at in first_true((told != should).any(dim=1)):
        raise TraceError(
            f"{path}: columns {', '.join(names)}, entry {at}, are {tuple(told[at].tolist())}, expected "
            f"{tuple(should[at].tolist())}"
        )
