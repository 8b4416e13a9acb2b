"""Exercises of notebook 07: gather rows with their routing data here, shrink them in `shrinking_rows.py`."""

from __future__ import annotations

from typing import Any

import torch

from moe_course.backends.allgather_reducescatter import dispatch
from moe_course.backends.traffic import owners
from moe_course.dispatch import Dispatched
from moe_course.expert_map import Placement, make_placement
from moe_course.lessons.checks.shrinking_rows import QUANTIZE_ROWS
from moe_course.lessons.exercise import Case, Cost, Exercise, Look


def payload(rank: int, tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[T, H]`: every number of a row is `100 * rank + token`, so a row says where it is from."""
    return (100 * rank + torch.arange(tokens)).unsqueeze(1).expand(tokens, hidden).contiguous().to(dtype)


def gather_case(
    title: str,
    counts: list[int],
    experts: int,
    top_k: int,
    generator: torch.Generator,
    *,
    strategy: str = "linear",
    hidden: int = 1,
    dtype: torch.dtype = torch.float32,
    only: int | None = None,
    unrouted: bool = False,
    strided: bool = False,
) -> Case:
    """Ranks with these numbers of tokens. A weight says where it is from, too: row + choice / 8.

    Args:
        only: all routes go to this expert and those behind it; unrouted: some routes are -1, and one whole row.
        strided: tensors that are views of wider ones.
    """
    ranks = []
    for rank, tokens in enumerate(counts):
        scores = torch.rand(tokens, experts, generator=generator)
        ids = scores.argsort(dim=1)[:, :top_k].to(torch.int32)  # [T, K], all different
        if only is not None:
            ids = (only + torch.arange(top_k, dtype=torch.int32)).expand(tokens, top_k).contiguous()
        if unrouted and tokens:
            ids[torch.rand(tokens, top_k, generator=generator) < 0.4] = -1
            ids[-1] = -1
        weights = payload(rank, tokens, top_k) + torch.arange(top_k) / 8  # [T, K] fp32
        parts = (payload(rank, tokens, hidden, dtype), weights, ids)
        ranks.append(tuple(part.repeat_interleave(2, dim=1)[:, ::2] for part in parts) if strided else parts)
    return Case(title, keywords={"placement": make_placement(len(counts), experts, strategy)}, ranks=ranks)


def dispatch_cases(seed: int) -> list[Case]:
    """Ragged, empty, one-sided, uneven; the smallest first."""
    g = torch.Generator().manual_seed(seed)

    def some(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=g))

    few, more = some(1, 2), some(3, 4)

    def case(title: str, counts: list[int], experts: int, top_k: int, **options: Any) -> Case:
        return gather_case(f"{title}; tokens of each rank: {counts}", counts, experts, top_k, g, **options)

    return [
        case("2 ranks", [few, more], 4, 2),
        case("2 ranks, equal", [2, 2], 4, 2),
        case("2 ranks, one without tokens", [more, 0], 4, 2),
        case("1 rank, nobody to send to", [few], 4, 2),
        case("3 ranks, the first without tokens", [0, few, more], 9, 2),
        case("3 ranks, some routes are -1", [more, 2, few], 6, 2, unrouted=True),
        case("4 ranks, one has all tokens", [0, 0, more + 2, 0], 8, 2),
        case("4 ranks, every token wants all of them", [few, 2, more, 1], 4, 4),
        case("4 ranks, every token wants rank 0", [few, more, 0, 2], 16, 2, only=1),
        case("4 ranks share 10 experts, round robin", [more, 1, few, 0], 10, 3, strategy="round_robin"),
        case("3 ranks share 7 experts, rows in bf16", [2, 0, few], 7, 2, dtype=torch.bfloat16, hidden=5),
        case("2 ranks, tensors that are views of wider ones", [few, more], 8, 3, strided=True, hidden=5),
        case("4 ranks without any token", [0, 0, 0, 0], 8, 2),
    ]


def bytes_of_a_row(case: Case) -> int:
    """So that ids or weights that were sent by themselves are not taken for rows."""
    rows, _, _ = case.ranks[0]
    return rows.shape[1] * rows.element_size()


def types_of_fields(result: Dispatched) -> str:
    """In words: a field that cannot be compared, with its type; the other looks need rows and tensors."""
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        field = getattr(result, name)
        missing = field is None and name != "hidden_states"  # its own look says what it is for
        if not missing and not isinstance(field, torch.Tensor):
            return f"{name}: {type(field).__name__}"
        if name == "hidden_states" and field.ndim != 2:
            return f"{name}: Tensor with {field.ndim} dimensions"
    return "hidden_states: Tensor with 2 dimensions"


def sorted_rows(result: Dispatched) -> torch.Tensor:
    """The rows that are there, whatever their order."""
    rows = result.hidden_states
    return rows[rows[:, 0].float().argsort(stable=True)] if rows.shape[1:].numel() else rows


def whole_numbers(handle: Any) -> Any:
    """The handle as `combine` reads it: a list of rows per rank."""
    try:
        return [int(count) for count in handle]
    except (TypeError, ValueError):
        return handle


def why_dispatch(case: Case, look: str, expected: Any, yours: Any) -> str | None:
    """Known mistakes, by what they leave behind."""
    counts = [len(rows) for rows, _, _ in case.ranks]
    if look == "cost":
        return _why_cost(expected, yours)
    if look == "number of rows" and isinstance(yours, int):
        if yours == max(counts) * len(counts) and yours > sum(counts):
            return "short ranks were padded: nobody sent these rows, and with zero ids they would go to expert 0"
        if yours in counts and yours < sum(counts):
            return "these are one rank's own rows: every rank has to hold the rows of all ranks"
        if yours < sum(counts):
            return "every row keeps its place on every rank, also one without an expert there: combine cuts by place"
        return None
    if look == "types of the fields":
        return (
            "rows, ids and weights are tensors. The order is Dispatched(hidden_states, scales, topk_ids, topk_weights, "
            "expert_num_tokens, layout, handle)"
        )
    if look == "expert_num_tokens":
        return "nobody has counted the rows of each expert here: expert_num_tokens is None"
    if look == "rows":
        return "rows travel as they are: the experts apply the weights"
    if look == "order of rows":
        return "rows lie in rank order, those of rank 0 first, on every rank"
    if look == "topk_ids" and isinstance(yours, torch.Tensor):
        return _why_ids(case, expected, yours)
    if look == "topk_weights":
        return (
            "each row needs its own weights: they travel with it, in the same order"
            if yours is not None
            else ("the experts apply the weights here, so they have to arrive with the rows")
        )
    if look == "handle":
        return "the handle is what combine cuts by: the number of rows of each rank, in rank order"
    return None


def why_dispatch_raised(error: Exception) -> str | None:
    """Weights come in before ids, and go out behind them."""
    if isinstance(error, IndexError) and "out of bounds" in str(error):
        return "placement.owner was asked for what is no expert's id: metadata arrives in the order you sent it in"
    return None


def _why_cost(expected: Cost, yours: Cost) -> str | None:
    if yours.rows > expected.rows:
        return "one exchange is enough: each row goes to each other rank once, ids and weights ride along as metadata"
    return "rows travel in the dtype they have, ids as int32, weights as fp32"


def _why_ids(case: Case, expected: torch.Tensor, yours: torch.Tensor) -> str | None:
    if yours.shape != expected.shape:
        return "ids of all rows are needed, one line for each row that arrived: they have to travel with the rows"
    placement: Placement = case.keywords["placement"]
    sent = torch.cat([ids for _, _, ids in case.ranks])
    if torch.equal(yours.int(), sent.int()):
        return "ids of experts that live on other ranks become -1: this rank does not compute them"
    local = torch.where(expected >= 0, placement.local[expected.long().clamp(min=0)], -1)
    if torch.equal(yours.int(), local.int()):
        return "these are local numbers: ids stay global until the experts look them up in expert_map"
    if torch.equal(yours.int(), torch.where(expected >= 0, -1, sent).int()):
        return "the other way round: keep the ids of experts that live here"
    return "the ids belong to other rows: they travel with the rows, in the same order"


DISPATCH = Exercise(
    number="7.1",
    name="dispatch",
    stage="dispatch",
    answer=dispatch,
    cases=dispatch_cases,
    looks=(
        Look("types of the fields", types_of_fields),
        Look("number of rows", lambda result: len(result.hidden_states)),
        Look("rows", sorted_rows),
        Look("order of rows", lambda result: result.hidden_states),
        Look("topk_ids", lambda result: result.topk_ids),
        Look("topk_weights", lambda result: result.topk_weights),
        Look("handle", lambda result: whole_numbers(result.handle)),
        Look("layout", lambda result: result.layout),
        Look("scales", lambda result: result.scales),
        Look("expert_num_tokens", lambda result: result.expert_num_tokens),
    ),
    names={"Dispatched": Dispatched, "owners": owners},
    row_bytes=bytes_of_a_row,
    why=why_dispatch,
    why_raised=why_dispatch_raised,
)

EXERCISES = (DISPATCH, QUANTIZE_ROWS)
