"""Where a rank stands: the grid of ranks, its groups, and the layers of a pipeline stage.

Source: vLLM `parallel_state.py : initialize_model_parallel`. Built in: notebook 04.
"""

from __future__ import annotations

import torch

from moe_course.errors import ConfigError

#: Axes of the rank layout, slowest first.
AXES = ("external_dp", "dp", "pp", "pcp", "tp")


def rank_groups(world_size: int, *, dp: int = 1, pp: int = 1, pcp: int = 1, tp: int = 1) -> dict[str, list[list[int]]]:
    """All groups of a world, in one reshape of `arange`: ranks lie as (external_dp, dp, pp, pcp, tp).

    A group varies its own axis and fixes the others; the EP group varies dp, pcp and tp within a pipeline stage.
    """
    inner = dp * pp * pcp * tp
    if world_size % inner:
        raise ConfigError(f"world size {world_size} is not a multiple of dp * pp * pcp * tp = {inner}")
    grid = torch.arange(world_size).view(-1, dp, pp, pcp, tp)

    def varying(*axes: int) -> list[list[int]]:
        fixed = [axis for axis in range(5) if axis not in axes]
        size = torch.Size([grid.shape[axis] for axis in axes]).numel()
        return grid.permute(*fixed, *axes).reshape(-1, size).tolist()

    return {"dp": varying(1), "pp": varying(2), "pcp": varying(3), "tp": varying(4), "ep": varying(1, 3, 4)}


def stage_layers(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """First layer and end of one pipeline stage. What does not divide goes to the stages before the last, one each.

    Source: vLLM `distributed/utils.py : get_pp_indices`.
    """
    base, rest = divmod(num_hidden_layers, pp_size)
    counts = [base + (pp_size - 1 - rest <= stage < pp_size - 1) for stage in range(pp_size)]
    return sum(counts[:pp_rank]), sum(counts[: pp_rank + 1])
