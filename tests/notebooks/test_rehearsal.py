"""A rehearsal in a lesson is the run it stands for: routes, rows and texts; a fault in a stage reaches the text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_course.backends import allgather_reducescatter
from moe_course.errors import ExchangeMismatch
from moe_course.lessons.rehearsal import rehearse
from moe_course.stages import Stages
from moe_course.trace.simulate import same, simulate

PROMPTS = ("def add(a, b):", "x = 1")


@pytest.fixture(scope="module")
def run():
    return rehearse(PROMPTS, 3)


def test_its_trace_is_that_of_a_simulated_run(run):
    assert same(run.trace, simulate(run.trace)) == []


def test_rows_and_ids_are_those_of_the_trace(run):
    assert sorted(run.rows) == sorted(run.topk_ids) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [len(rows) for rows in run.rows[0, 1]] == [15, 6, 0]  # a start mark and the bytes; rank 2 has no prompt
    for (step, layer), ids in run.topk_ids.items():
        for rank, theirs in enumerate(ids):
            routes = run.trace.where(step=step, layer=layer, source_rank=rank)
            assert [route["expert"] for route in routes] == theirs.flatten().tolist()


def test_start_marks_are_rows_of_zeros_as_lesson_07_says(run):
    zero = [(rows == 0).all(dim=1).nonzero().flatten().tolist() for rows in run.rows[0, 1]]
    assert zero == [[0], [0], []]


def test_stages_are_used(run):
    def reads_counts_backwards(*parcel, comm, placement):
        there = allgather_reducescatter.dispatch(*parcel, comm=comm, placement=placement)
        return replace(there, handle=there.handle[::-1]) if comm.rank == 1 else there

    def forgets_weights(*parcel, comm, placement):
        there = allgather_reducescatter.dispatch(*parcel, comm=comm, placement=placement)
        return replace(there, topk_weights=torch.zeros_like(there.topk_weights))

    with pytest.raises(ExchangeMismatch, match="rank 0 has counts .15, 6, 0., rank 1 has counts .0, 6, 15."):
        rehearse(PROMPTS, 3, stages=Stages(dispatch=reads_counts_backwards))
    assert rehearse(PROMPTS, 3, stages=Stages(dispatch=forgets_weights)).texts != run.texts
