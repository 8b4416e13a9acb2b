"""Exercise 7.2 of notebook 07: quantise rows before they travel."""

from __future__ import annotations

from typing import Any

import torch

from moe_course.lessons.exercise import Case, Exercise, Look
from moe_course.quant import quantize

E4M3 = torch.float8_e4m3fn


def quantize_rows(rows: torch.Tensor, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[T, H]` as fp8 codes `[T, H]` and scales `[T, H / group_size]`: one of the package's five formats."""
    return quantize(rows, "fp8_group", group_size)


def coded_rows(tokens: int, hidden: int, group: int, generator: torch.Generator) -> torch.Tensor:
    """`[T, H]` fp32: numbers so near to a code that every way to round gives it, each group with a scale of its own."""
    grid = torch.tensor([0.0, 1, 2.5, 6, 11, 26, 52, 104, 208, 416])
    pick = torch.randint(0, len(grid), (tokens, hidden // group, group), generator=generator)
    sign = torch.randint(0, 2, pick.shape, generator=generator) * 2 - 1
    codes = grid[pick] * sign
    codes[..., 0] = 448 * sign[..., 0]  # the largest of its group
    near = 1 + 0.01 * (torch.rand(pick.shape, generator=generator) - 0.5)
    near[..., 0] = 1
    absmax = 0.5 + 7.5 * torch.rand(tokens, hidden // group, 1, generator=generator)
    shuffled = torch.randperm(group, generator=generator)
    return (codes * near * absmax / 448)[..., shuffled].flatten(1)


def quantize_cases(seed: int) -> list[Case]:
    """From one group of four numbers to rows of 256; zeros, no rows, bf16, views."""
    g = torch.Generator().manual_seed(seed)
    four = {"group_size": 4}
    half = coded_rows(2, 8, 4, g)
    half[0, 4:] = 0
    return [
        Case("a row of 4 numbers, one group", (torch.tensor([[0.1, -2.0, 3.5, 7.0]]),), four),
        Case("2 rows of 4 numbers", (torch.tensor([[0.1, -2.0, 3.5, 7.0], [1.0, -0.3, 0.01, 0.5]]),), four),
        Case("a row of 8 numbers, two groups", (torch.tensor([[0.1, -2.0, 3.5, 7.0, 1.0, -0.3, 0.01, 0.5]]),), four),
        Case("4 rows of 4 numbers", (coded_rows(4, 4, 4, g),), four),
        Case("a group of zeros", (half,), four),
        Case("3 rows of 12 numbers, groups of 4", (coded_rows(3, 12, 4, g),), four),
        Case("2 rows of 256 numbers, groups of 128", (coded_rows(2, 256, 128, g),)),
        Case("rows a thousand times smaller", (coded_rows(2, 8, 4, g) / 1000,), four),
        Case("2 rows in bf16", (coded_rows(2, 128, 128, g).bfloat16(),)),
        Case("rows ten million times smaller", (coded_rows(2, 8, 4, g) / 1e7,), four),
        Case("a view of wider rows", (coded_rows(3, 8, 4, g).repeat_interleave(2, dim=1)[:, ::2],), four),
        Case("no rows", (torch.empty(0, 256),)),
    ]


def pair(result: Any) -> str:
    """In words; the other looks need two tensors."""
    both = isinstance(result, tuple | list) and len(result) == 2 and all(isinstance(r, torch.Tensor) for r in result)
    return "codes and scales" if both else f"a {type(result).__name__}"


def scales_that_matter(result: Any) -> torch.Tensor:
    """Scales of groups that hold something; under a scale of zeros any number is right."""
    codes, scales = result[0].float(), result[1].float()
    used = (codes.unflatten(-1, (scales.shape[-1], -1)) != 0).any(-1) if codes.numel() else scales != 0
    return torch.where(used, scales, 0)


def why_quantize(case: Case, look: str, expected: Any, yours: Any) -> str | None:
    """Known mistakes, by what they leave behind."""
    rows, group = case.args[0], case.keywords.get("group_size", 128)
    if look == "dtype of a1q":
        return f"{yours} numbers would travel; codes of one byte, torch.float8_e4m3fn, are what saves bytes"
    if look == "dtype of a1q_scale":
        return "scales stay fp32: four bytes for a whole group are cheap, and their error hits every number of it"
    if look == "shape of a1q_scale":
        return f"each row has a scale of its own for every {group} numbers: [T, H / group_size]"
    if look in ("scales", "codes") and rows.numel() and rows.abs().max() < 1e-5:
        return "these numbers are tiny and still count: what keeps a group of zeros from 0 / 0 is clamp(min=1e-10)"
    if look == "scales" and isinstance(yours, torch.Tensor) and yours.shape == expected.shape:
        return _why_scales(rows, group, expected, yours)
    if look == "codes" and isinstance(yours, torch.Tensor) and yours.isnan().any():
        return "a code is NaN: 0 / 0 for a group of zeros (keep its largest number at 1e-10), or a value beyond 448"
    if look == "codes":
        return "a code is the number divided by its group's scale, in fp32, and then cast"
    return None


def _why_scales(rows: torch.Tensor, group: int, expected: torch.Tensor, yours: torch.Tensor) -> str | None:
    live, near, rows = expected > 0, {"rtol": 1e-3, "atol": 1e-12}, rows.float()
    groups = rows.unflatten(-1, (-1, group))
    largest = {
        "negative numbers count, too: take the largest absolute value": groups.amax(-1).clamp(min=1e-10),
        f"one scale for the whole row: each {group} numbers have their own": rows.abs().amax(1, keepdim=True),
        "one scale for all rows: a loud row makes the others coarse; each has its own": rows.abs().max(),
    }
    if torch.allclose(yours[live], expected[live], rtol=1e-2):
        return "nearly: compute in fp32, also for rows in bf16"
    if torch.allclose(yours[live], 1 / expected[live], **near):
        return "upside down: the scale is largest / 448, so that code * scale gives the number back"
    for what, values in largest.items():
        if torch.allclose(yours[live], (values / 448).expand_as(expected)[live], **near):
            return what
    return "a scale is the largest absolute value of its group, divided by 448, the largest code of e4m3"


QUANTIZE_ROWS = Exercise(
    number="7.2",
    name="quantize_rows",
    answer=quantize_rows,
    cases=quantize_cases,
    looks=(
        Look("what comes back", pair),
        Look("shape of a1q", lambda result: list(result[0].shape)),
        Look("dtype of a1q", lambda result: str(result[0].dtype)),
        Look("shape of a1q_scale", lambda result: list(result[1].shape)),
        Look("dtype of a1q_scale", lambda result: str(result[1].dtype)),
        Look("scales", scales_that_matter, tolerance=1e-7),
        Look("codes", lambda result: result[0].float()),
    ),
    names={},
    why=why_quantize,
    also=(quantize,),
)
