"""Every legal parallel mode of up to four ranks, as processes: the rows of one process and the bytes of threads."""

from __future__ import annotations

import pytest
import torch
from mode_cases import Case, findings, legal_cases, make_problem

CASES = legal_cases(4)


@pytest.mark.parametrize("experts", [8, 10])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_mode_gives_the_result_of_one_process(gloo, ranks, experts):
    """All batches, with fixed and with real routing; groups are made anew for every mode."""
    cases = [case for case in CASES if case.world == ranks]
    results = gloo(ranks).run("mode_worker_cases:run_cases", [(case, experts) for case in cases], timeout=120)
    found = {}
    for number, case in enumerate(cases):
        found[str(case)] = findings(case, experts, "fp32", [of_rank[number] for of_rank in results])
    assert found == {str(case): [] for case in cases}


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_other_dtypes(gloo, dtype):
    cases = [case for case in CASES if case.world == 4]
    names = ("ragged", "own router")
    results = gloo(4).run("mode_worker_cases:run_cases", [(case, 10, dtype, names) for case in cases], timeout=120)
    for number, case in enumerate(cases):
        assert not findings(case, 10, dtype, [of_rank[number] for of_rank in results]), str(case)


def test_a_plan_for_another_number_of_ranks_is_refused(gloo):
    """At once and on all ranks, instead of waiting for ranks that do not exist."""
    config = make_problem(Case(tp=2), 8, torch.float32).config
    for case in (Case(tp=2), Case(dp=2), Case(tp=4, dp=2)):
        messages = gloo(4).run("mode_worker_cases:believe_in_a_group", case, config)
        assert messages == [f"rank {rank}: the plan is for {case.world} ranks, the group has 4" for rank in range(4)]
