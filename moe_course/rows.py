"""Row invariance: make a row's result independent of the batch it is computed in.

A matrix product may add up its terms in another order when the number of rows changes, and then the same row
gives other last bits. On a CPU this stops when row counts are padded to a multiple of 4, 8, 16 or 32; which one
depends on the processor, the dtype and the shape. `row_multiple` finds it by trying. With it, every backend and
every number of ranks gives the same bits. Where none works (and on GPUs) results agree to a tolerance only, and
`row_invariance` says so.

Built in: notebook 03.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from moe_course.errors import ConfigError

#: Paddings that are tried, smallest first. All divide the last one, so a block of 32 rows is in every class.
MULTIPLES = (4, 8, 16, 32)
#: What holds where a machine does not promise the same bits: largest difference, for results of size 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float64: 1e-12}
_PROBE_FLOPS = 2_000_000_000  # largest product tried, so that probing a large layer stays quick


@dataclass(frozen=True)
class RowInvariance:
    """Verdict of the probe for the shapes of a layer."""

    exact: bool
    multiple: int  # rows are padded to this
    reason: str


def row_multiple(in_features: int, out_features: int, dtype: torch.dtype) -> int | None:
    """Smallest padding that makes `x @ w.T` row-invariant on this CPU, or None.

    Args:
        in_features, out_features: `w` is `[out_features, in_features]`.
        dtype: dtype of both operands.
    """
    return _probe(in_features, out_features, dtype, torch.get_num_threads())


@lru_cache(maxsize=256)
def _probe(in_features: int, out_features: int, dtype: torch.dtype, threads: int) -> int | None:
    generator = torch.Generator().manual_seed(0)
    most = max(64, min(512, _PROBE_FLOPS // (2 * in_features * out_features)) // 32 * 32)
    rows = torch.randn(most, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    whole = F.linear(rows, weight)
    sizes = [m for m in (*range(4, 65, 4), 80, 96, 128, 160, 192, 256, 384, 512) if m <= most]
    same = {m: torch.equal(F.linear(rows[:m], weight), whole[:m]) for m in sizes}
    for multiple in MULTIPLES:
        if all(equal for m, equal in same.items() if m % multiple == 0):
            return multiple
    return None


def row_invariance(shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> RowInvariance:
    """Verdict for several `(in_features, out_features)` products, e.g. gate, w13 and w2 of one layer."""
    if device.type != "cpu":
        return RowInvariance(False, 1, f"not promised on {device.type}; results agree to {TOLERANCE[dtype]:g}")
    found = {shape: row_multiple(*shape, dtype) for shape in shapes}
    failed = [shape for shape, multiple in found.items() if multiple is None]
    name, agree = str(dtype).removeprefix("torch."), f"results agree to {TOLERANCE[dtype]:g} instead of to the bit"
    if failed:
        return RowInvariance(False, MULTIPLES[-1], f"{name} products {failed} depend on the batch on this CPU; {agree}")
    multiple = max(found.values(), default=MULTIPLES[0])
    return RowInvariance(True, multiple, f"{name} rows padded to multiples of {multiple} are batch-independent")


def padded_rows(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple; zero stays zero."""
    return -(-n // multiple) * multiple


def padding_for(weight: torch.Tensor) -> int:
    """The multiple to pad rows to before they meet `weight` `[…, out_features, in_features]`; 1 off the CPU."""
    if weight.device.type != "cpu":
        return 1
    return row_multiple(weight.shape[-1], weight.shape[-2], weight.dtype) or MULTIPLES[-1]


def padded_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`F.linear` on a padded row count: `[n, in]` x `[out, in]` -> `[n, out]`. Zero rows are fine.

    Raises ConfigError for other shapes, and for rows and weight of two dtypes or devices.
    """
    if rows.ndim != 2 or weight.ndim != 2 or rows.shape[1] != weight.shape[1]:
        raise ConfigError(
            f"rows are {list(rows.shape)}, the weight {list(weight.shape)}; expected [n, in] and [out, in]: flatten "
            "batches of rows, as in rows.flatten(0, -2)"
        )
    if rows.dtype != weight.dtype or rows.device != weight.device:
        raise ConfigError(
            f"rows are {rows.dtype} on {rows.device}, the weight {weight.dtype} on {weight.device}; bring the rows "
            "there, as in rows.to(weight)"
        )
    n = rows.shape[0]
    extra = padded_rows(n, padding_for(weight)) - n
    return F.linear(F.pad(rows, (0, 0, 0, extra)), weight)[:n]
