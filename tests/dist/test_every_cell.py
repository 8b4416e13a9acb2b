"""Every shape on every transport that processes have: the oracle's bits, the ledger of threads, the bound's bytes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from gloo_cases import layer_problem
from layer_cases import Batch, differences, oracle

from moe_course.backends import BACKENDS
from moe_course.backends.support import SUPPORT
from moe_course.backends.traffic import RowBytes
from moe_course.combine import accumulator

#: E, placement, dtype. Ten experts are uneven on 3 and 4 ranks.
CELLS = [
    (10, "linear", torch.float32),
    (10, "linear", torch.bfloat16),
    (10, "linear", torch.float64),
    (8, "round_robin", torch.float32),
    (256, "linear", torch.bfloat16),
]
SHAPES = [name for name in BACKENDS if name != "no_dp_ep"]
PAYLOAD = ("all_gather_rows", "reduce_scatter_rows", "all_to_all_rows", "all_to_all_padded", "put_rows")


@cache
def expected(size: int, cell: tuple, replicated: bool):
    """Problem and oracle of a cell; replicated: every rank has all rows."""
    weights, placement, problems = layer_problem(size, *cell, "no_dp_ep" if replicated else "high_throughput")
    found = {}
    for name, batch in problems.items():
        once = Batch(*(part[:1] for part in vars(batch).values())) if replicated else batch
        found[name] = oracle(once, weights, placement) * (size if replicated else 1)
    return weights, placement, problems, found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_layer_equals_the_oracle_and_moves_what_it_must(gloo, transport, size):
    shapes = [name for name in BACKENDS if SUPPORT[name, transport] is True]
    asked = [(*cell, shape) for cell in CELLS for shape in shapes]
    case = ("gloo_cases:many_layers",) if transport == "gloo" else ("shm_cases:on_shm", "gloo_cases:many_layers")
    found = gloo(size).run(*case, asked, timeout=120)
    for place, (*cell, shape) in enumerate(asked):
        results = [one[place] for one in found]
        weights, placement, problems, wanted = expected(size, tuple(cell), shape == "no_dp_ep")
        for name in problems:
            outputs = [result["outputs"][name] for result in results]
            assert not differences(outputs, wanted[name], results[0]["verdict"]), (cell, shape, name)
        if shape != "no_dp_ep":
            hidden, dtype = weights.config.hidden_size, cell[2]
            sizes = RowBytes(hidden * dtype.itemsize, hidden * accumulator(dtype).itemsize, hidden * dtype.itemsize)
            bound = sum(
                BACKENDS[shape].traffic(batch.topk_ids, placement).payload(sizes) for batch in problems.values()
            )
            rows = [row for result in results for row in result["ledger"] if row["op"] in PAYLOAD]
            assert sum(row["payload"] for row in rows) == bound, (cell, shape)
            padding = sum(row["padding"] for row in rows)
            assert (padding > 0) == (shape == "low_latency" and transport == "gloo" and size > 1), (cell, shape)
