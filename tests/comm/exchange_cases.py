"""Rank functions that exercise a `Comm`. They run in threads and, unchanged, in worker processes on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_course.comm.base import Comm
from moe_course.comm.ledger import Ledger
from moe_course.errors import ConfigError, ExchangeMismatch

MOVED = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
SUMMED = ("float32", "float64", "bfloat16", "float16", "int64", "int32")
WIDTH = 3  # odd on purpose: packed rows of small dtypes then end off every boundary


def rows_of(rank: int, world_size: int, n: int, dtype: torch.dtype, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    """`n` rows that only `rank` would make; any rank can rebuild them."""
    generator = torch.Generator().manual_seed(1000 * seed + 17 * rank + world_size)
    if dtype.is_floating_point:
        return torch.randn(n, width, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (n, width), generator=generator).to(dtype)


def metadata_of(rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids `[n, 2]` int64, weights `[n, 2]` fp32 and a 1-D int32 column, as they travel with rows."""
    row = torch.arange(n)
    return (
        torch.stack([row + 100 * rank, -row], dim=1),
        torch.stack([row / 8 + rank, -row / 4], dim=1).float(),
        (row + 7 * rank).int(),
    )


def gathered_counts(world_size: int) -> list[int]:
    """Rows per rank, ragged, one rank without any: 2, 1, 0, 4, 3, 2, …"""
    return [(2 + 4 * rank) % 5 for rank in range(world_size)]


def sent_counts(world_size: int, source: int) -> list[int]:
    """Rows that `source` sends to each rank, ragged, with zeros."""
    return [(3 * source + 2 * peer + 1) % 4 for peer in range(world_size)]


def every_operation(comm: Comm, dtype_name: str) -> dict[str, Any]:
    """All operations once on ragged rows of one dtype; results by name, and the ledger."""
    dtype, rank, size = MOVED[dtype_name], comm.rank, comm.world_size
    comm.ledger, comm.layer, comm.step = Ledger(), 2, 1
    counts = gathered_counts(size)
    found: dict[str, Any] = {}

    mine = rows_of(rank, size, counts[rank], dtype)
    plain = comm.all_gather_rows(mine)
    found["all_gather"], found["all_gather counts"] = plain.rows, plain.counts
    labelled = comm.all_gather_rows(mine, *metadata_of(rank, len(mine)))
    found["all_gather with metadata"] = [labelled.rows, *labelled.metadata]

    send = sent_counts(size, rank)
    mine = rows_of(rank, size, sum(send), dtype, seed=1)
    plain = comm.all_to_all_rows(mine, send)
    found["all_to_all"], found["all_to_all counts"] = plain.rows, plain.counts
    expected = [sent_counts(size, source)[rank] for source in range(size)]
    labelled = comm.all_to_all_rows(mine, send, *metadata_of(rank, len(mine)), receive_counts=expected)
    found["all_to_all with metadata"] = [labelled.rows, *labelled.metadata]

    if dtype_name in SUMMED:
        partial = rows_of(rank, size, sum(counts), dtype, seed=2)
        found["reduce_scatter"] = comm.reduce_scatter_rows(partial, counts)
        found["all_reduce"] = comm.all_reduce(rows_of(rank, size, 5, dtype, seed=3))
        found["all_reduce of nothing"] = comm.all_reduce(rows_of(rank, size, 0, dtype))
    comm.barrier()
    found["ledger"] = comm.ledger.as_rows()
    return found


def bits(value: Any) -> Any:
    """Tensors as (shape, dtype, bytes), so that fp8 and NaN compare too."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        return tuple(value.shape), str(value.dtype), flat.view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


# -- ranks that disagree ---------------------------------------------------------------------------------------------


def _op(comm: Comm, odd: bool) -> None:
    comm.barrier() if odd else comm.all_gather_rows(torch.zeros(2, 4))


def _op_number(comm: Comm, odd: bool) -> None:
    comm._op_number += 40 if odd else 0  # as after a call the others have not made
    try:
        comm.barrier()
    finally:
        comm._op_number -= 40 if odd else 0


def _layer(comm: Comm, odd: bool) -> None:
    comm.layer = 61 if odd else 53
    comm.barrier()


def _step(comm: Comm, odd: bool) -> None:
    comm.step = 61 if odd else 53
    comm.barrier()


def _dtype(comm: Comm, odd: bool) -> None:
    comm.all_gather_rows(torch.zeros(2, 4, dtype=torch.int32 if odd else torch.float32))  # the same number of bytes


def _width(comm: Comm, odd: bool) -> None:
    comm.all_gather_rows(torch.zeros(2, 35 if odd else 34))


def _metadata(comm: Comm, odd: bool) -> None:
    comm.all_gather_rows(torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64 if odd else torch.int32))


def _missing_metadata(comm: Comm, odd: bool) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    comm.all_to_all_rows(torch.zeros(2, 4), [2] + [0] * (comm.world_size - 1), *([] if odd else [ids]))


def _metadata_dtypes(comm: Comm, odd: bool) -> None:
    """Ids where the others have weights: the same bytes, another meaning."""
    ids, weights = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    comm.all_gather_rows(torch.zeros(2, 4), *((weights, ids) if odd else (ids, weights)))


def _too_few_rows(comm: Comm, odd: bool) -> None:
    counts = [11] * comm.world_size
    comm.reduce_scatter_rows(torch.zeros(sum(counts) - 10 * odd, 4), counts)


def _counts(comm: Comm, odd: bool) -> None:
    counts = [3] * comm.world_size
    if odd:
        counts[0], counts[1] = 1, 5
    comm.reduce_scatter_rows(torch.zeros(3 * comm.world_size, 4), counts)


def _sends_more_than_it_has(comm: Comm, odd: bool) -> None:
    comm.all_to_all_rows(torch.zeros(comm.world_size, 4), [1] * (comm.world_size - 1) + [78 if odd else 1])


def _receive_counts(comm: Comm, odd: bool) -> None:
    size = comm.world_size
    comm.all_to_all_rows(torch.zeros(2 * size, 4), [2] * size, receive_counts=[43 if odd else 2] + [2] * (size - 1))


def _all_reduce_rows(comm: Comm, odd: bool) -> None:
    comm.all_reduce(torch.zeros(2 * comm.world_size * (2 if odd else 1), 4))


def _groups(comm: Comm, odd: bool) -> None:
    ranks = list(range(comm.world_size))
    comm.split([ranks[:1], ranks[1:]] if odd else [ranks])


#: kind -> (what all ranks do, the last one differently; the field that is named; both values). `{last}` is the last
#: rank, `{size}` the number of ranks, `{other}` the op number of the last rank, `{number}` that of the others.
MISMATCHES: dict[str, tuple[Callable[[Comm, bool], None], str, tuple[str, ...]]] = {
    "op": (_op, "op", ("rank 0 has all_gather_rows", "rank {last} has barrier")),
    "op number": (_op_number, "op number", ("rank 0 has {number}", "rank {last} has {other}")),
    "layer": (_layer, "layer", ("rank 0 has 53", "rank {last} has 61")),
    "step": (_step, "step", ("rank 0 has 53", "rank {last} has 61")),
    "dtype": (_dtype, "dtype", ("rank 0 has float32", "rank {last} has int32")),
    "width": (_width, "width", ("rank 0 has 34", "rank {last} has 35")),
    "metadata": (_metadata, "metadata bytes", ("rank 0 has 12", "rank {last} has 24")),
    "metadata dtypes": (
        _metadata_dtypes,
        "metadata dtypes",
        ("rank 0 has int32, float32", "rank {last} has float32, int32"),
    ),
    "missing metadata": (_missing_metadata, "metadata bytes", ("rank 0 has 24", "rank {last} has 0")),
    "rows and counts": (_too_few_rows, "rows", ("rank {last} has {short} rows", "announces {long}")),
    "counts": (_counts, "rows", ("rank 0 has", "[3, 3", "rank {last} has", "[1, 5")),
    "rows and send counts": (_sends_more_than_it_has, "rows", ("rank {last} has {size} rows", "announces {more}")),
    "receive counts": (_receive_counts, "rows", ("rank 0 sends 2 rows to rank {last}", "expects 43")),
    "all-reduce rows": (_all_reduce_rows, "rows", ("rank 0 has", "[2, 2", "rank {last} has", "[4, 4")),
    "groups": (_groups, "split", ()),
}


def expected_in_message(kind: str, world_size: int, number: int) -> list[str]:
    """What the message of a mismatch must contain."""
    _, field, values = MISMATCHES[kind]
    words = {
        "last": world_size - 1,
        "size": world_size,
        "number": number,
        "other": number + 40,
        "short": 11 * world_size - 10,
        "long": 11 * world_size,
        "more": world_size - 1 + 78,
    }
    return [field, *(value.format(**words) for value in values)]


def mismatch(comm: Comm, kind: str) -> dict[str, Any]:
    """Disagree, catch the error, and show that the group still works. Message, op number, rows of an all-gather."""
    comm.layer, comm.step, message = 0, 0, None
    try:
        MISMATCHES[kind][0](comm, comm.rank == comm.world_size - 1)
    except ExchangeMismatch as error:
        message = str(error)
    number = comm._op_number
    comm.layer, comm.step = 0, 0
    after = comm.all_gather_rows(torch.full((comm.rank, 2), float(comm.rank)))
    return {"message": message, "number": number, "after": after.rows}


# -- groups ----------------------------------------------------------------------------------------------------------


def pairs(comm: Comm) -> dict[str, Any]:
    """Four ranks in groups [0, 1] and [2, 3]: the sum of rank + 1, and who am I there."""
    comm.ledger = Ledger()
    group = comm.split([[0, 1], [2, 3]])
    total = group.all_reduce(torch.tensor([[comm.rank + 1.0]]))
    ragged = group.all_gather_rows(torch.full((comm.rank, 1), comm.rank))
    comm.barrier()
    return {
        "sum": total,
        "rank": group.rank,
        "size": group.world_size,
        "rows": ragged.rows,
        "same ledger": group.ledger is comm.ledger,
    }


def crossed(comm: Comm) -> list[float]:
    """Rows and columns of a 2 x 2 grid: the sums over both, one after the other, and the rank in the row."""
    rows, columns = comm.split([[0, 1], [2, 3]]), comm.split([[0, 2], [1, 3]])
    value = torch.tensor([[10.0**comm.rank]])
    both = columns.all_reduce(rows.all_reduce(value))
    return [float(rows.all_reduce(value)), float(columns.all_reduce(value)), float(both), rows.rank]


def descending(comm: Comm) -> Any:
    """A group whose members do not stand in ascending order: ranks and rows in the order asked for, or a refusal."""
    try:
        group = comm.split([[1, 0], [3, 2]])
    except ConfigError:
        return "refused"
    rows = group.all_gather_rows(torch.full((1, 1), comm.rank)).rows
    scattered = group.reduce_scatter_rows(torch.arange(3.0).view(3, 1), [1, 2])
    return group.rank, rows.flatten().tolist(), scattered.flatten().tolist()


#: What `descending` may return on each of four ranks, unless all refuse.
DESCENDING = [
    (1, [1, 0], [2.0, 4.0]),
    (0, [1, 0], [0.0]),
    (1, [3, 2], [2.0, 4.0]),
    (0, [3, 2], [0.0]),
]


def twice_the_same_group(comm: Comm) -> list[float]:
    """Two groups of the same ranks, used in turn: what is sent in one must not arrive in the other."""
    groups = [comm.split([list(range(comm.world_size))]) for _ in range(2)]
    return [
        float(group.all_gather_rows(torch.full((1, 1), 10.0 * number + which)).rows.sum())
        for number in range(20)
        for which, group in enumerate(groups)
    ]


PAIRS = [[0, 1], [2, 3]]


def mismatch_in_a_pair(comm: Comm, kind: str) -> dict[str, Any]:
    """Ranks 2 and 3 disagree in their group as in `mismatch`; 0 and 1 agree in theirs. Then all of them meet again."""
    comm.layer, comm.step = 0, 0
    group, found = comm.split(PAIRS), {"message": None}
    if comm.rank >= 2:
        found = mismatch(group, kind)
    else:
        group.barrier()
    comm.barrier()
    return found


def expected_in_message_of_a_pair(kind: str, number: int) -> list[str]:
    """As `expected_in_message`, with the ranks' numbers in the world."""
    words = expected_in_message(kind, 2, number)
    return [word.replace("rank 1", "rank 3").replace("rank 0", "rank 2") for word in words]


def labels_in_a_pair(comm: Comm) -> dict[str, Any]:
    """Layer and step are set on the world, then on the group; what the other one says, and the ledger of both."""
    comm.ledger, comm.layer, comm.step = Ledger(), 5, 7
    group, found = comm.split(PAIRS), {}
    found["group"] = group.layer, group.step
    comm.layer = 8  # as a layer does, after the split
    group.all_gather_rows(torch.zeros(comm.rank, 2))
    group.all_to_all_rows(torch.zeros(3, 2), [1, 2])
    group.layer, group.step = 9, 10
    group.all_reduce(torch.zeros(4, 2))
    comm.barrier()
    found["world"] = comm.layer, comm.step
    found["members"], found["world rank"] = group.members, group.world_rank
    found["ledger"] = {(row["op"], row["layer"], row["src"], row["dst"]): row["rows"] for row in comm.ledger.as_rows()}
    return found


def expected_labels(rank: int) -> dict[str, Any]:
    """What `labels_in_a_pair` finds on one of four ranks."""
    peer, place = rank ^ 1, rank % 2
    ledger = {("split", 5, rank, other): 0 for other in range(4) if other != rank}
    ledger |= {("barrier", 9, rank, other): 0 for other in range(4) if other != rank}
    ledger["all_gather_rows", 8, rank, peer] = rank
    ledger["all_to_all_rows", 8, rank, peer] = [2, 1][place]
    ledger["all_reduce", 9, rank, peer] = 4
    return {
        "group": (5, 7),
        "world": (9, 10),
        "members": PAIRS[rank // 2],
        "world rank": rank,
        "ledger": ledger,
    }
