"""Compare what the ranks are about to do, before one of them does it.

Every rank states its flags, its plan, the shapes and dtypes that follow, and digests of expert map, checkpoint and
prompts. The statements go through the rendezvous store, so nothing has to be agreed on first. If two of them
differ in a field that must not, all ranks raise the same `PlanMismatch`: which rank, which field, both values.

Source: vLLM compares a hash of the parallel config between data-parallel engines (`v1/engine/utils.py`,
`ParallelConfig.compute_hash`) and ignores a list of fields. Built in: notebook 12.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from moe_course import errors
from moe_course.errors import ExchangeTimeout, MoECourseError, PlanMismatch

#: What to do about a field that differs; of all others: start the ranks alike.
_CURES = {"plan.nodes": "hosts have different numbers of ranks: say how many with --ranks-per-node, as in 2,2,1"}

#: Fields in which ranks may differ, and why. All others must agree.
MAY_DIFFER = {
    "host": "ranks may live on several machines",
    "machine": "as the host",
    "pid": "every rank is a process of its own",
    "python": "any supported version",
    "threads": "speed only",
    "local_rank": "counted per machine",
    "timeout": "each rank loses patience by itself",
    "warn_after": "as the time-out",
    "json_file": "rank 0 writes it",
    "trace": "folders are local",
    "time_limit": "the launcher watches it",
}
#: Field of a rank that could not make its plan; its value is (kind of error, message).
ERROR = "error"


def digest(parts: Iterable[Any]) -> str:
    """Short fingerprint of JSON-like values, the same on every machine."""
    content = json.dumps(list(parts), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def handshake(store, rank: int, world_size: int, statement: Mapping[str, Any], timeout: float) -> list[dict]:
    """Exchange statements and compare them. Every rank must call it, once for each store.

    Args:
        store: a torch.distributed store that all ranks see.
        statement: field -> JSON-ready value; `error` is set where a rank cannot go on.
        timeout: seconds to wait for the last rank.

    Returns:
        All statements in rank order.

    Raises:
        PlanMismatch: fields differ that must not; the same message on all ranks.
        ExchangeTimeout: ranks did not arrive, named.
        The error of the first rank that stated one.
    """
    store.set(f"statement/{rank}", json.dumps(statement))
    _await(store, "statement", world_size, timeout)
    statements = [json.loads(store.get(f"statement/{peer}")) for peer in range(world_size)]
    found = mismatch(statements)
    failed = next((peer for peer in range(world_size) if statements[peer].get(ERROR)), None)
    if found is None and failed is None:
        return statements
    _leave_together(store, rank, world_size)
    if found is not None:
        raise PlanMismatch(f"handshake: {found}")
    if statements[rank].get(ERROR):  # every rank says what it found itself
        failed = rank
    kind, message = statements[failed][ERROR]
    error = getattr(errors, kind, MoECourseError)
    raise error(message if failed == rank else f"rank {failed}: {message}")


def mismatch(statements: list[dict]) -> str | None:
    """The first field that differs, in words, or None. The rank that stands alone is named first."""
    differing = []
    for field in dict.fromkeys(name for statement in statements for name in statement):
        if field in MAY_DIFFER or field == ERROR:
            continue
        # a rank that could not make its plan has no values that follow from it
        values = {
            peer: json.dumps(statement.get(field))
            for peer, statement in enumerate(statements)
            if field in statement or ERROR not in statement
        }
        if len(set(values.values())) > 1:
            differing.append((field, values))
    if not differing:
        return None
    field, values = differing[0]
    counts = Counter(values.values())
    first = next(iter(values.values()))
    usual = max(counts, key=lambda value: (counts[value], value == first))
    odd = next(peer for peer, value in values.items() if value != usual)
    others = [peer for peer, value in values.items() if value == usual]
    text = f"{field} differs: rank {odd} has {_readable(values[odd])}, {_ranks(others)} {_readable(usual)}"
    more = [name for name, _ in differing[1:]]
    if more:
        shown = ", ".join(more[:4]) + (f" and {len(more) - 4} more" if len(more) > 4 else "")
        text += f" (so do {shown})"
    cure = _CURES.get(field, "start all ranks with the same flags, files and versions")
    return f"{text}; {cure}"


def _readable(value: str) -> str:
    return "no value" if value == "null" else value if len(value) <= 80 else value[:77] + "..."


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"ranks {listed} have"


def _await(store, key: str, world_size: int, timeout: float) -> None:
    names = [f"{key}/{peer}" for peer in range(world_size)]
    try:
        store.wait(names, timedelta(seconds=timeout))
    except RuntimeError:  # torch's DistStoreError is one
        absent = [peer for peer, name in enumerate(names) if not store.check([name])]
        raise ExchangeTimeout(
            f"handshake: after {timeout:g} s rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of "
            f"{world_size} did not arrive; were all of them started?"
        ) from None


def _leave_together(store, rank: int, world_size: int) -> None:
    """Whoever hosts the store goes last, so that all ranks can read why they end."""
    store.set(f"read/{rank}", "1")
    deadline = time.monotonic() + 3
    while rank == 0 and time.monotonic() < deadline and not store.check([f"read/{peer}" for peer in range(world_size)]):
        time.sleep(0.02)
