"""Rank functions on shared memory. They run in the same worker processes as those on gloo."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from moe_course.comm.base import Comm
from moe_course.comm.ledger import Ledger
from moe_course.comm.padded import _part
from moe_course.comm.shm import ShmComm, over
from moe_course.errors import MoECourseError


def shared(world: Comm) -> ShmComm:
    """The group of shared memory over these processes, made once."""
    if not hasattr(world, "shm"):
        world.shm = over(world)
    return world.shm


def on_shm(world: Comm, case: str, *args: Any) -> Any:
    """Run `module:function` on shared memory instead of gloo."""
    module, function = case.split(":")
    return getattr(importlib.import_module(module), function)(shared(world), *args)


def many(world: Comm, case: str, arguments: list) -> list[Any]:
    """As `on_shm`, for each argument in turn: a request costs more than a case."""
    return [on_shm(world, case, argument) for argument in arguments]


# -- padded segments -------------------------------------------------------------------------------------------------

CAPACITY = 4


def sections_of(size: int) -> torch.Tensor:
    """`[R, R]`, with pairs that have no section at all."""
    return torch.tensor([[(source + 2 * peer) % 3 for peer in range(size)] for source in range(size)])


def padded_problem(size: int, source: int, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged counts of a source's sections, full and empty ones among them, and its rows."""
    number = int(sections_of(size)[source].sum())
    counts = (torch.arange(number) * 3 + source) % (CAPACITY + 1)
    generator = torch.Generator().manual_seed(source)
    rows = torch.randint(0, 2, (int(counts.sum()), width), generator=generator)
    return counts, rows.to(dtype) if dtype != torch.float32 else torch.randn(len(rows), width, generator=generator)


def padded(comm: Comm, dtype_name: str, width: int) -> dict[str, Any]:
    """One exchange; the rows in use of every section that came, all counts, and the ledger."""
    comm.ledger, comm.layer, comm.step = Ledger(), 3, 2
    counts, rows = padded_problem(comm.world_size, comm.rank, getattr(torch, dtype_name), width)
    sections = sections_of(comm.world_size)
    came = comm.all_to_all_padded(rows, counts, sections, CAPACITY, CAPACITY)
    here = [_part(came.counts[source], sections, source, comm.rank) for source in range(comm.world_size)]
    shapes = [tuple(segment.shape) for segment in came.segments]
    pairs = zip(came.segments, here, strict=True)
    used = [[section[:n].clone() for section, n in zip(*pair, strict=True)] for pair in pairs]  # views, not for long
    ledger = [row | {"padding": 0} for row in comm.ledger.as_rows()]
    padding = comm.ledger.total().padding
    return {"used": used, "counts": came.counts, "shapes": shapes, "ledger": ledger, "padding": padding}


def padded_many(comm: Comm) -> list[dict[str, Any]]:
    return [padded(comm, *problem) for problem in PADDED]


PADDED = [("float32", 5), ("bfloat16", 3), ("uint8", 3), ("float32", 0), ("bool", 1)] * 2


def padded_disagreement(comm: Comm) -> list[str]:
    """Too many rows, another capacity, another width, another dtype, another layer: the errors. Then all is well."""
    said, last = [], comm.rank == comm.world_size - 1
    ones = torch.ones(comm.world_size, comm.world_size, dtype=torch.int64)
    for kind in ("rows", "capacity", "width", "dtype", "layer", "sections", "nothing"):
        odd = last and kind != "nothing"
        comm.layer, comm.step = (1 if odd and kind == "layer" else 0), 0
        rows = torch.zeros(comm.world_size, 7 if odd and kind == "width" else 6)
        rows = rows.int() if odd and kind == "dtype" else rows
        sections, counts = ones, torch.ones(comm.world_size, dtype=torch.int64)
        if odd and kind == "sections":  # one more for the first rank, and none for this one
            sections = ones.clone()
            sections[comm.rank, 0], sections[comm.rank, comm.rank] = 2, 0
        capacity, held = (9 if odd and kind == "capacity" else 2), (3 if odd and kind == "rows" else 1)
        try:
            comm.all_to_all_padded(rows, counts, sections, capacity, held)
            said.append("")
        except MoECourseError as error:
            said.append(f"{type(error).__name__}: {error}")
    comm.barrier()
    return said


# -- windows ---------------------------------------------------------------------------------------------------------


def window_turns(comm: Comm, turns: int = 5) -> dict[str, Any]:
    """Ragged puts into everybody's window, some empty; what lies in this rank's window after every turn."""
    comm.ledger, comm.layer, comm.step = Ledger(), 1, 0
    size, rank, seen = comm.world_size, comm.rank, []
    windows = [comm.window((3 * size, 4), dtype) for dtype in (torch.float32, torch.int16)]
    for turn in range(turns):
        window = windows[turn % 2]
        counts = [(rank + peer + turn) % 3 for peer in range(size)]
        comm.open(window, counts, torch.empty(sum(counts), 4, dtype=window.of(0).dtype))
        for peer in range(size):
            comm.put(window, peer, 3 * rank, torch.full((counts[peer], 4), 100 * turn + 10 * rank + peer), 2)
        comm.flush(window)
        memory = comm.wait(window)
        came = [(source + rank + turn) % 3 for source in range(size)]
        seen.append([memory[3 * source : 3 * source + came[source]].tolist() for source in range(size)])
    return {"seen": seen, "ledger": comm.ledger.as_rows(), "received": comm.ledger.rows_received}


def nested_groups(comm: Comm) -> list[Any]:
    """Groups of a group, in halves that split differently often, and the whole again afterwards."""
    half = comm.split([[0, 1], [2, 3]])
    alone = half.split([[0], [1]])
    if comm.rank >= 2:
        half = half.split([[0, 1]]).split([[0, 1]])
    whole = comm.split([[0, 1, 2, 3]])
    value = torch.tensor([[10.0**comm.rank]])
    return [float(group.all_reduce(value)) for group in (alone, half, whole, alone)]


def objects_in_a_pair(comm: Comm) -> str:
    """A sub-group has no way to gather objects, and says so."""
    try:
        comm.split([[0, 1], [2, 3]]).gather_objects(1)
    except MoECourseError as error:
        return str(error).partition(":")[0]
    return ""


def plain_segments(comm: Comm) -> list[list[int]]:
    """`source + 2 * peer` bytes from every source to every peer."""
    size, rank = comm.world_size, comm.rank
    send = [torch.full((rank + 2 * peer,), 16 * rank + peer, dtype=torch.uint8) for peer in range(size)]
    received = comm._segments(send, [source + 2 * rank for source in range(size)], "segments")
    return [segment.tolist() for segment in received]
