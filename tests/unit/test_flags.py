"""One rule for sizes that flags leave open, and errors that say which flag to change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_course.config import GLM_5_1
from moe_course.errors import ConfigError
from moe_course.flags import ParallelConfig, parallel_config
from moe_course.parallel import make_plan

SIZES = {"tp": "tensor_parallel_size", "dp": "data_parallel_size"}
SIZES |= {"pcp": "prefill_context_parallel_size", "pp": "pipeline_parallel_size"}


def made(**flags) -> ParallelConfig:
    return parallel_config(**{SIZES.get(name, name): value for name, value in flags.items()})


@pytest.mark.parametrize(
    ("flags", "sizes", "expert_parallel"),
    [
        ({}, (1, 1, 1, 1, 1), True),
        ({"world_size": 4}, (1, 4, 1, 1, 1), True),
        ({"world_size": 4, "enable_expert_parallel": False}, (1, 4, 1, 1, 1), False),
        ({"world_size": 1, "dp": 1}, (1, 1, 1, 1, 1), False),
        ({"dp": 4}, (1, 4, 1, 1, 1), False),
        ({"tp": 1}, (1, 1, 1, 1, 1), False),
        ({"tp": 2, "enable_expert_parallel": True}, (1, 1, 1, 1, 2), True),
        ({"world_size": 8, "tp": 2}, (1, 4, 1, 1, 2), False),
        ({"world_size": 8, "tp": 2, "dp": 4}, (1, 4, 1, 1, 2), False),
        ({"world_size": 48, "tp": 2, "pp": 3, "pcp": 4}, (1, 2, 3, 4, 2), False),
        ({"world_size": 8, "external_data_parallel_size": 2}, (2, 4, 1, 1, 1), True),
        ({"world_size": 8, "external_data_parallel_size": 2, "tp": 2}, (2, 2, 1, 1, 2), False),
        ({"external_data_parallel_size": 2}, (2, 1, 1, 1, 1), True),
        ({"default_world_size": 4}, (1, 4, 1, 1, 1), True),
        ({"default_world_size": 4, "world_size": 6}, (1, 6, 1, 1, 1), True),
        ({"default_world_size": 4, "tp": 2}, (1, 1, 1, 1, 2), False),
        ({"default_world_size": 4, "enable_expert_parallel": False}, (1, 4, 1, 1, 1), False),
    ],
)  # fmt: skip
def test_what_flags_leave_open_is_filled_in(flags, sizes, expert_parallel):
    found = made(**flags)
    assert (found.sizes, found.enable_expert_parallel) == (sizes, expert_parallel)


@given(*[st.none() | st.integers(1, 4)] * 4, st.integers(1, 3), st.none() | st.integers(1, 64))
def test_sizes_always_multiply_to_the_world(tp, dp, pcp, pp, external, world_size):
    """And a size that was given is never changed."""
    flags = {"tp": tp, "dp": dp, "pcp": pcp, "pp": pp}
    try:
        found = made(**flags, external_data_parallel_size=external, world_size=world_size)
    except ConfigError:
        assert world_size is not None
        rest = external * (tp or 1) * (pcp or 1) * (pp or 1)
        assert world_size % rest or (dp is not None and dp * rest != world_size)
        return
    assert world_size in (None, found.world_size)
    for name, value in flags.items():
        assert value in (None, getattr(found, SIZES[name]))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"world_size": 0}, "--world-size is 0, needs to be at least 1"),
        ({"tp": 0}, "--tensor-parallel-size is 0, needs to be at least 1"),
        ({"dp": -1}, "--data-parallel-size is -1, needs to be at least 1"),
        ({"external_data_parallel_size": 0}, "--external-data-parallel-size is 0, needs to be at least 1"),
        ({"world_size": 2, "dp": 3},
         "--world-size 2 is not --data-parallel-size 3; use --world-size 3 or --data-parallel-size 2"),
        ({"world_size": 6, "dp": 2, "tp": 2},
         "--world-size 6 is not --tensor-parallel-size 2 * --data-parallel-size 2 = 4; "
         "use --world-size 4 or --data-parallel-size 3"),
        ({"world_size": 7, "dp": 2, "tp": 2},
         "--world-size 7 is not --tensor-parallel-size 2 * --data-parallel-size 2 = 4; "
         "use --world-size 4, or leave it out"),
        ({"world_size": 6, "tp": 4},
         "--world-size 6 is not a multiple of --tensor-parallel-size 4; use --world-size 4 or 8, or other sizes"),
        ({"world_size": 2, "pp": 3},
         "--world-size 2 is not a multiple of --pipeline-parallel-size 3; use --world-size 3, or other sizes"),
        ({"world_size": 9, "tp": 2, "external_data_parallel_size": 2},
         "--world-size 9 is not a multiple of --tensor-parallel-size 2 * --external-data-parallel-size 2 = 4; "
         "use --world-size 8 or 12, or other sizes"),
        ({"default_world_size": 4, "external_data_parallel_size": 3},
         "the default of 4 ranks is not a multiple of --external-data-parallel-size 3; use --world-size 3 or 6, "
         "or other sizes"),
    ],
)  # fmt: skip
def test_errors_name_the_flag_both_values_and_a_cure_that_works(flags, says):
    with pytest.raises(ConfigError) as caught:
        made(**flags)
    assert str(caught.value) == says


def test_expert_parallelism_is_on_by_default_in_python_and_off_once_a_size_is_named():
    """The one default that is not vLLM's, and the class says so."""
    assert make_plan(ParallelConfig(tensor_parallel_size=2), GLM_5_1).moe.use_ep
    assert not make_plan(parallel_config(tensor_parallel_size=2), GLM_5_1).moe.use_ep
    assert "`enable_expert_parallel` is True here and False in vLLM" in " ".join(ParallelConfig.__doc__.split())
