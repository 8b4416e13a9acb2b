"""From a wrong output of the known layer to words: what happened, where it shows, and what to look at.

Each explanation is a prediction: what the output would be if that had gone wrong. The first one that fits is told.
The numbers in it are exact, so a prediction that fits is seldom a coincidence; where none fits, that is said.

Built in: notebook 12. Used by `guard/canary.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.guard.known_layer import SHARED, KnownLayer

SWAPPED = 0.7311  # silu(1) * 64 / 64: what is left of silu(64) * 1 / 64 when gate and up rows change places


@dataclass(frozen=True)
class Here:
    """Where this rank stands. A part is an owner of experts, or a slice of all experts.

    Attributes:
        rank, layer: for the message.
        part: this rank's own; met: parts that rows reach by dispatch, without any sum over `reduced`.
        own: rows that this rank itself takes through the layer.
        reduced: world ranks over which partial sums are added, or None.
        scale: the model's `routed_scaling_factor`.
    """

    rank: int
    layer: int
    part: int
    met: list[int]
    own: slice
    reduced: list[int] | None
    scale: float


def describe(known: KnownLayer, numbers: torch.Tensor, actual: torch.Tensor, here: Here) -> str:
    """One line about an output `[n, H]` that is not what it should be. `numbers [n]` are its rows."""
    where = f"rank {here.rank}, layer {here.layer}"
    wanted = (known.routed(numbers) + known.from_shared(numbers)).to(actual.dtype)
    if actual.shape != wanted.shape:
        return (
            f"the layer returned {list(actual.shape)} for {list(wanted.shape)}; {where}; "
            "look at combine: every row comes home once, to the rank that sent it"
        )
    if not actual.isfinite().all():
        row = int((~actual.isfinite()).any(1).nonzero()[0])
        return (
            f"row {row} holds NaN or infinity; {where}; "
            "look for memory that nobody wrote: rows without a route, experts without rows"
        )
    if torch.equal(actual, wanted):
        return f"the layer returned {actual.dtype}; {where}; look at combine: one rounding, to the dtype of the rows"
    if not torch.equal(actual[here.own], wanted[here.own]):  # each rank may have failed in its own way
        numbers, actual, wanted = numbers[here.own], actual[here.own], wanted[here.own]
    found = []
    if not torch.equal(actual[:, : known.extra], wanted[:, : known.extra]):
        tried = (explain(known, numbers, actual, here) for explain in (_parts, _weights, _order, _experts, _gaps))
        unknown = ("routed output is wrong in a way that fits no known fault", "the stages one by one, dispatch first")
        found.append(next(filter(None, tried), unknown))
    if not torch.equal(actual[:, known.extra :], wanted[:, known.extra :]):
        found.append(_shared(known, actual.double(), known.from_shared(numbers)))
    row, column = (actual != wanted).nonzero()[0].tolist()
    ids = [expert for expert in known.routing(numbers)[1][row].tolist() if expert >= 0]
    what, look = ("; ".join(dict.fromkeys(texts)) for texts in zip(*found, strict=True))
    return (
        f"{what}; {where}, row {_name(known, numbers[row])} with experts {ids}: {known.column(column)} is "
        f"{actual[row, column]:g}, should be {wanted[row, column]:g}; look at {look}"
    )


def _name(known: KnownLayer, number: torch.Tensor) -> int:
    """A row's place in the batch of its rank."""
    return int(number) % known.stride


def _fits(known: KnownLayer, actual: torch.Tensor, predicted: torch.Tensor) -> bool:
    return torch.equal(actual[:, : known.extra], predicted.to(actual.dtype)[:, : known.extra])


def _parts(known: KnownLayer, numbers: torch.Tensor, actual: torch.Tensor, here: Here) -> tuple[str, str] | None:
    """Is the output a sum of the parts, only with each part some other number of times than once?"""
    count, name = (known.slices, "slice") if known.slices > 1 else (known.placement.ep_size, "EP rank")
    parts = torch.stack([known.routed(numbers, part=p)[:, : known.extra].flatten() for p in range(count)], dim=1)
    target, whole, used = actual[:, : known.extra].double().flatten(), parts.sum(1), parts.any(0)
    if not used.any():  # rows without any route
        return None
    factor = float(target.sum() / whole.sum())
    every = torch.eye(count, dtype=torch.float64)
    guesses = [torch.full((count,), float(round(factor)), dtype=torch.float64), every[here.part], *(1 - every)]
    guesses.append(every[here.met].sum(0))
    guesses.append(torch.linalg.lstsq(parts, target.unsqueeze(1), driver="gelsd").solution.flatten().round())
    fitting = [g for g in guesses if _fits(known, actual, (parts @ g).view(len(numbers), -1))]
    if not fitting:
        return _factor(factor, here) if torch.allclose(target, factor * whole, rtol=0.01, atol=1e-3) else None
    times = [int(n) if u else 1 for n, u in zip(fitting[0], used, strict=True)]
    arrived = [p for p in range(count) if used[p] and times[p]]
    missing = [p for p in range(count) if not times[p]]
    if not arrived:
        return "no contribution of any expert arrived", "experts and combine: the routed output is all zero"
    if len({times[p] for p in range(count) if used[p]}) == 1:
        return _factor(times[arrived[0]], here)
    if set(times) == {0, 1}:
        how = _arrived(known, numbers, arrived)
        if arrived == [here.part]:
            return f"{how}, its own {name}'s: partial sums were never reduced", "combine and the mode's reduce group"
        if arrived == [p for p in here.met if used[p]]:
            return (
                f"{how}, those of {name}s {arrived}: partial sums were never reduced over the ranks that share rows",
                f"the sum over ranks {here.reduced} after combine" if here.reduced else "the mode: it reduces nowhere",
            )
        of = f"{name}{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return f"partial sums of {of} are missing: {how}", f"experts and combine on {of}"
    odd = ", ".join(f"{name} {p} {n} times" for p, n in enumerate(times) if n != 1)
    return f"partial sums arrived another number of times than once: {odd}", "who adds up what, and in which groups"


def _factor(factor: float, here: Here) -> tuple[str, str] | None:
    if abs(factor - SWAPPED) < 0.005:
        return (
            "gate and up rows of w13 changed places: silu(up) * gate was computed",
            "the experts stage: gate rows come first",
        )
    if abs(factor / here.scale - 1) < 0.005 and here.scale != 1:
        factor = here.scale
    says = f"routed output is {factor:.4g} x what it should be"
    if factor == here.scale != round(factor):
        return f"{says}: routed_scaling_factor was applied once more", "the layer: the router's weights contain it"
    if factor != round(factor):
        return says, "whatever multiplies rows or weights"
    if here.reduced is not None:
        return (
            f"{says}: partial sums were reduced twice, or each rank that shares rows dispatched them",
            f"who adds up over ranks {here.reduced}: one of combine and the layer, once",
        )
    return f"{says}: sums were reduced twice", "an all-reduce after combine: in this mode combine returns finished rows"


def _arrived(known: KnownLayer, numbers: torch.Tensor, arrived: list[int]) -> str:
    """How much of the first row that lacks something is there."""
    if known.slices > 1:
        return f"{len(arrived)} of {known.slices} slices of every contribution arrived"
    _, ids = known.routing(numbers)
    live = ids >= 0
    there = live & torch.isin(known.placement.owner[ids.long()], torch.tensor(arrived))
    row = int((there.sum(1) < live.sum(1)).nonzero()[0])
    return (
        f"{int(there[row].sum())} of {int(live[row].sum())} contributions of row {_name(known, numbers[row])} arrived"
    )


def _weights(known: KnownLayer, numbers: torch.Tensor, actual: torch.Tensor, here: Here) -> tuple[str, str] | None:
    weights, _ = known.routing(numbers)
    for wrong, what in (
        (weights * weights, "applied twice"),
        (torch.ones_like(weights), "not applied at all"),
        (weights.flip(1), "applied to the routes in reverse order"),
    ):
        if _fits(known, actual, known.routed(numbers, wrong)):
            return (
                f"weights were {what}",
                "who applies topk_weights: one of source, experts and combine, route by route",
            )
    return None


def _order(known: KnownLayer, numbers: torch.Tensor, actual: torch.Tensor, here: Here) -> tuple[str, str] | None:
    """Is every wrong row the right one of another row?"""
    everybody = torch.arange(known.holders * known.stride)
    right = known.routed(everybody).to(actual.dtype)[:, : known.extra]
    home = int(numbers[0]) // known.stride
    holds = []  # (row has values, its number, the number of the row it holds)
    for number, values in zip(numbers.tolist(), actual[:, : known.extra], strict=True):
        if torch.equal(values, right[number]):
            continue
        twins = (right == values).all(1).nonzero().flatten().tolist()
        if not twins:
            return None
        holds.append((bool(values.any()), number, min(twins, key=lambda twin: twin // known.stride != home)))
    filled, number, other = next((found for found in holds if found[0]), holds[0])
    row, place = number % known.stride, other % known.stride
    if not filled:
        return f"row {row} came home empty", "combine: every row has one place to come home to"
    of = "" if other // known.stride == home else f" of DP rank {other // known.stride}"
    return (
        f"rows came home in another order: row {row} holds row {place}{of}",
        "combine: it needs the order in which dispatch sent the rows",
    )


def _experts(known: KnownLayer, numbers: torch.Tensor, actual: torch.Tensor, here: Here) -> tuple[str, str] | None:
    """Did the right number of contributions come, from other experts than those that were asked?"""
    right = known.routed(numbers).to(actual.dtype)
    if any(not torch.equal(actual[:, c], right[:, c]) for c in (slice(0, known.slices), known.rows)):
        return None
    _, ids = known.routing(numbers)
    top = max(known.routes, 2) - 1
    digits = actual[:, known.ids].double() * 2**top  # [n, bits]: binary numbers with a digit for each route
    if not torch.equal(digits, digits.round()) or digits.min() < 0:
        return None
    places = top - known.exponents(numbers)  # [n, K]
    found = ((digits.long().unsqueeze(1) >> places.unsqueeze(2)) & 1) << torch.arange(known.id_bits)
    found = torch.where(ids >= 0, found.sum(2), -1)  # [n, K]
    if torch.equal(found, ids.long()):
        return None
    row = int((found != ids).any(1).nonzero()[0])
    wrong = found[row] != ids[row]
    got, asked = found[row][wrong].tolist(), ids[row][wrong].tolist()
    return (
        f"expert ids were read in another numbering: row {_name(known, numbers[row])} met experts "
        f"{got} instead of {asked}",
        "expert_map and the ids that experts and combine use: global or local, sent or received",
    )


def _gaps(known: KnownLayer, numbers: torch.Tensor, actual: torch.Tensor, here: Here) -> tuple[str, str] | None:
    """Are only rows wrong that have a route of -1?"""
    ids, right = known.routing(numbers)[1], known.routed(numbers).to(actual.dtype)
    wrong = (actual != right)[:, : known.extra].any(1)
    full = (ids >= 0).all(1)
    if wrong[full].any() or not full.any():
        return None
    row = _name(known, numbers[wrong][0])
    return f"a route of -1 was computed: row {row} has one", "the experts stage: -1 is no route, not the last expert"


def _shared(known: KnownLayer, actual: torch.Tensor, shared: torch.Tensor) -> tuple[str, str]:
    """(what happened, what to look at) for the shared expert's columns and those nobody writes."""
    end = known.extra + 1 + known.row_bits
    if actual[:, end:].any() or not known.shared:
        return "columns hold values that no expert writes", "what is added to the rows besides experts"
    factor = float(actual[0, known.extra]) / SHARED
    if torch.allclose(actual[:, known.extra : end], factor * shared[:, known.extra : end], rtol=0.01):
        if factor == 0:
            return "shared expert was never added", "the last step of the layer: shared + routed"
        if abs(factor - SWAPPED) < 0.005:
            return "gate and up rows of the shared expert changed places", "the shared expert: gate rows come first"
        if factor == round(factor):
            return f"shared expert was added {factor:g} times", "where it is added: once, after the sum over ranks"
        return f"shared expert is {factor:g} x what it should be", "whatever multiplies it: it has no weight"
    if torch.equal(actual[:, known.extra], shared[:, known.extra]):
        return "shared expert worked on other rows", "the rows it is given: this rank's own, as the router's"
    return "shared expert is wrong in a way that fits no known fault", "the shared expert"
