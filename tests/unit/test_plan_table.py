"""What `moe-course plan` shows: a table that fits its terminal, one rank in full, a summary of all decisions."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from moe_course.backends import BACKENDS
from moe_course.backends.capabilities import KNOWN_BACKENDS, across_nodes
from moe_course.config import GLM_5_1
from moe_course.cost.memory import rank_memory
from moe_course.flags import ParallelConfig
from moe_course.job import prepare
from moe_course.options import RunOptions
from moe_course.parallel import make_plan
from moe_course.planner.document import dumps, plan_json
from moe_course.planner.spans import spans
from moe_course.planner.summary import summary
from moe_course.planner.table import print_plan, rank_table

BIG = ParallelConfig(tensor_parallel_size=8, data_parallel_size=16, pipeline_parallel_size=8)


def shown(flags: ParallelConfig, width: int = 80, rank: int | None = None) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    print_plan(
        console,
        make_plan(flags, GLM_5_1, strict=False),
        model="m",
        dtype="bfloat16",
        max_num_batched_tokens=256,
        rank=rank,
    )
    return [line.rstrip() for line in console.export_text().splitlines()]


def check_table(lines: list[str], made, width: int) -> None:
    """Raise AssertionError unless no line is too long and no number of the table is cut or wrapped."""
    assert max(map(len, lines)) <= width, "too wide"
    rule = next(number for number, line in enumerate(lines) if line.startswith("────"))
    rows = [line.split() for line in lines[rule + 1 :] if line and not line.endswith("has all")]
    ranks = [row[0] for row in rows if row != ["…"]]
    first = list(range(made.world_size)) if len(ranks) == made.world_size else [*range(8)]
    last = [] if len(ranks) == made.world_size else [*range(made.world_size - 4, made.world_size)]
    assert ranks == [str(rank) for rank in [*first, *last]], "ranks"
    for row in rows:
        if row == ["…"]:
            continue
        mine = made.rank(int(row[0]))
        assert spans(mine.experts) in row or spans(mine.experts, 1) in row, "experts"
        assert not [cell for cell in row if cell.endswith("…")], "cut"
        for kind in {made.dispatch_group, made.reduce_group, made.split_group} - {None}:
            assert {spans(mine.groups[kind], most) for most in (4, 1, 0)} & set(row), kind


WIDE = [
    ParallelConfig(data_parallel_size=4),
    ParallelConfig(16),
    BIG,
    ParallelConfig(8, 2, 1, 2, external_data_parallel_size=2, sequence_parallel_moe=False),
    ParallelConfig(4, 1, 32, 4, external_data_parallel_size=16),
    ParallelConfig(4, 2, 8, 4, external_data_parallel_size=16),  # refused, and the widest
    ParallelConfig(8, 32, 1, 16, external_data_parallel_size=16),  # 65,536 ranks
    ParallelConfig(2, 2, enable_expert_parallel=False),
]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("flags", WIDE, ids=lambda flags: "-".join(map(str, flags.sizes)))
def test_the_table_fits(flags, width):
    check_table(shown(flags, width), make_plan(flags, GLM_5_1, strict=False), width)


def test_ranks_are_told_apart_on_a_narrow_terminal():
    first = [line.split()[0] for line in shown(BIG, 40) if line]
    assert [word for word in first if word.isdigit() and int(word) > 1012] == ["1020", "1021", "1022", "1023"]


def test_a_table_that_does_not_fit_is_caught():
    made = make_plan(BIG, GLM_5_1)
    memories = [rank_memory(made, rank) for rank in range(made.world_size)]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(rank_table(made, memories, 4, True))
    with pytest.raises(AssertionError):
        check_table(console.export_text().splitlines(), made, 80)


def test_a_large_world_is_shown_in_part():
    lines = shown(BIG)
    assert "1012 more ranks; --rank R shows one in full, --json FILE has all" in lines
    assert len(lines) < 40


def test_one_rank_in_full():
    """Nothing is shortened: all ranks of its EP group stand there, in stretches."""
    text = "".join("".join(shown(BIG, rank=1000)).split())
    for part in (
        "rank 1000  copy 0 · DP 15 · PP 5 · PCP 0 · TP 0 · EP rank 120",
        "experts 240-241  layers 49-58 (the sparse ones of its stage)",
        "TP group  1000-1007: rows are split and gathered",
        "EP group  " + ",".join(f"{first}-{first + 7}" for first in range(40, 1024, 64)) + ": rows travel",
        "routed  1.41 GiB = 10 layers * 2 experts * 72.00 MiB",
    ):
        assert part.replace(" ", "") in text, part


def summary_of(**flags) -> dict[str, list[str]]:
    made = make_plan(ParallelConfig(**flags), GLM_5_1, strict=False)
    memories = [rank_memory(made, rank) for rank in range(made.world_size)]
    lines: dict[str, list[str]] = {}
    for label, text in summary(made, memories, "glm-5.1", "bfloat16", 256):
        lines.setdefault(label, []).append(text)
    return lines


@pytest.mark.parametrize(
    ("flags", "label", "says"),
    [
        ({}, "ranks", "1"),
        ({"tensor_parallel_size": 2, "external_data_parallel_size": 3}, "ranks", "6 = copies 3 · TP 2"),
        ({"data_parallel_size": 6}, "experts", "whole, spread over EP 6: 43 or 42 on each rank"),
        ({"data_parallel_size": 4, "tensor_parallel_size": 2, "enable_expert_parallel": False}, "experts",
         "cut over 8 ranks (DP * PCP * TP), each has a slice of all 256"),
        ({"data_parallel_size": 2, "expert_placement_strategy": "round_robin"}, "placement",
         "linear instead of round_robin"),
        ({"data_parallel_size": 2, "expert_placement_strategy": "round_robin"}, "fallback",
         "round_robin was asked for and linear is used: the model has n_group 1, round robin needs more than one "
         "expert group"),
        ({"data_parallel_size": 2, "all2all_backend": "naive"}, "fallback",
         "naive is an old name, allgather_reducescatter runs instead"),
        ({"data_parallel_size": 6}, "note",
         "256 experts on 6 ranks: fine here and on vLLM's all-gather path; upstream's other backends and EPLB need "
         "E % R = 0"),
        ({"tensor_parallel_size": 4}, "dispatch", "none, no row travels"),
        ({"tensor_parallel_size": 4}, "sum", "all-reduce of partial sums over TP"),
        ({"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}, "sum",
         "reduce-scatter over PCP, then all-reduce of partial sums over TP, then finished rows gathered over PCP"),
        ({"data_parallel_size": 4, "enable_expert_parallel": False}, "dispatch",
         "every row travels to all ranks of its group, in DP groups of 4"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel_moe": False}, "dispatch",
         "every row travels to all ranks of its group, in DP groups of 2"),
        ({"data_parallel_size": 4, "all2all_backend": "all_to_all"}, "dispatch",
         "rows travel to the ranks of their experts, in EP groups of 4"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "SP-MoE",
         "sequence parallel: each TP rank takes a slice of the rows"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel_moe": False}, "SP-MoE",
         "no sequence parallel: turned off by flag"),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, "stages",
         "sparse layers of stage 0: 3-38 · 1: 39-77"),
        ({"data_parallel_size": 8}, "memory", "174.46 GiB per rank, MoE weights only (bfloat16)"),
        ({"tensor_parallel_size": 8}, "memory",
         "shared expert 5.27 GiB per rank; vLLM, which cuts it over TP, holds 675.00 MiB of it"),
        ({"data_parallel_size": 4, "all2all_backend": "mori_low_latency"}, "backend",
         "high_throughput, the shape of mori_low_latency, because rows travel over the EP group to the ranks that own "
         "their experts"),
        ({"tensor_parallel_size": 4, "all2all_backend": "deepep_v2"}, "backend",
         "no_dp_ep, because no rows travel (dp = pcp = 1), so deepep_v2 is not used"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "all2all_backend": "nixl_ep"}, "sum",
         "combine over EP, then finished rows gathered over TP"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "all2all_backend": "deepep_v2"}, "sum",
         "combine over EP"),
        ({"data_parallel_size": 6, "all2all_backend": "deepep_high_throughput"}, "note",
         "256 experts on 6 ranks: fine here; upstream needs E % R = 0 here, as deepep_high_throughput finds an "
         "expert's rank by division"),
        ({"data_parallel_size": 2, "all2all_backend": "two_hop"}, "note",
         "two_hop is a name of this package, not in vLLM: with --reduce-in-node it is what "
         "deepep_high_throughput does across nodes"),
        ({"data_parallel_size": 4, "all2all_backend": "deepep_low_latency"}, "memory",
         "1.50 GiB of buffers per rank, whatever the router says, for 256 tokens an engine"),
        ({"data_parallel_size": 4, "all2all_backend": "deepep_high_throughput"}, "memory",
         "36.06 MiB of buffers per rank, at most, for 256 tokens an engine"),
        ({"data_parallel_size": 3, "enable_expert_parallel": False}, "memory",
         "no equal slices, so no weights per rank; 1,355.71 GiB in one whole model"),
    ],
    ids=str,
)  # fmt: skip
def test_the_summary_says_what_was_decided(flags, label, says):
    assert says in summary_of(**flags)[label]


@pytest.mark.parametrize("name", KNOWN_BACKENDS)
def test_the_summary_says_where_a_row_goes(name):
    """A row whose experts are all on one rank: whoever else gets it did not get it for its experts."""
    made = make_plan(ParallelConfig(data_parallel_size=4, all2all_backend=name), GLM_5_1)
    mine = torch.tensor([made.placement.experts_of(1)[:8]])
    ids = [mine, mine[:0], mine[:0], mine[:0]]  # rank 0 has the row
    sent = BACKENDS[made.backend.name].traffic(ids, made.placement).dispatch.sum(0)  # [R, R]
    got = sent.fill_diagonal_(0).sum(0).nonzero().flatten().tolist()
    assert got == [1] or {1, 2, 3} <= set(got)
    says = "rows travel to the ranks of their experts" if got == [1] else "every row travels to all ranks of its group"
    assert summary_of(data_parallel_size=4, all2all_backend=name)["dispatch"][0].startswith(says)


@pytest.mark.parametrize("name", KNOWN_BACKENDS)
def test_another_way_across_nodes_is_said_where_ranks_span_nodes(name):
    """Only there, and only of a backend that rows really travel in."""
    notes = {
        nodes: summary_of(data_parallel_size=4, all2all_backend=name, ranks_per_node=nodes).get("note", [])
        for nodes in (0, 4, 2, (1, 3))
    }
    said = {nodes: [note for note in found if note.startswith("across nodes")] for nodes, found in notes.items()}
    way = KNOWN_BACKENDS[name].across_nodes
    expected = [f"across nodes, vLLM's {name}: {way}"] if way else []
    assert said == {0: [], 4: [], 2: expected, (1, 3): expected}
    alone = summary_of(tensor_parallel_size=4, all2all_backend=name, ranks_per_node=2)
    assert not [note for note in alone.get("note", []) if "across nodes, vLLM" in note]


@pytest.mark.parametrize("name", ["deepep_high_throughput", "deepep_v2", "two_hop", "allgather_reducescatter"])
def test_a_run_on_several_hosts_knows_that_they_are_nodes(monkeypatch, name):
    """torchrun says how many ranks are on each, so a run says what `plan --ranks-per-node` says."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    made = prepare(RunOptions(prompts=("x",), world_size=4, all2all_backend=name, device="cpu")).plan
    assert len(made.placement.nodes) == (1 if name == "allgather_reducescatter" else 2)
    assert [note for note in made.notes if note.startswith("across nodes")] == across_nodes([name])


@pytest.mark.parametrize("name", ["deepep_high_throughput", "mori_low_latency", "allgather_reducescatter"])
def test_hosts_of_several_sizes_have_one_plan(monkeypatch, name):
    """What a rank sees of its own host is not the whole: a sentence less, and not a run less."""
    plans = []
    for here in (2, 1):  # hosts of 2, 2 and 1 ranks
        for variable, value in (("WORLD_SIZE", 5), ("LOCAL_WORLD_SIZE", here), ("GROUP_WORLD_SIZE", 3)):
            monkeypatch.setenv(variable, str(value))
        options = RunOptions(prompts=("x",), world_size=5, all2all_backend=name, device="cpu")
        plans.append(prepare(options).plan.as_dict())
    assert plans[0] == plans[1]


def test_the_summary_has_no_line_without_need():
    plain = summary_of(data_parallel_size=4)
    assert not {"note", "fallback", "refused", "stages"} & plain.keys()
    assert len(plain["memory"]) == 3  # the shared expert is held as upstream holds it: no line about that


def test_axes_of_size_one_are_left_out():
    head = shown(ParallelConfig(data_parallel_size=4))
    line = next(line for line in head if line.startswith("rank "))
    assert line.split() == ["rank", "DP", "rank", "experts", "go", "to", "GiB", "MiB"]


def test_a_plan_of_a_large_world_is_made_once(monkeypatch):
    """1,024 ranks, table and JSON: the groups are made once a plan, whatever is asked of it."""
    from moe_course.layout import rank_groups

    calls = []
    monkeypatch.setattr("moe_course.parallel.rank_groups", lambda *a, **k: calls.append(1) or rank_groups(*a, **k))
    made = make_plan(BIG, GLM_5_1)
    found = plan_json(made)
    assert len(found["ranks"]) == 1024 and len(dumps(found)) < 2_000_000
    print_plan(Console(quiet=True), made, model="m", dtype="bfloat16", max_num_batched_tokens=256)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("numbers", "most", "text"),
    [
        ([], 4, "none"),
        ([5], 4, "5"),
        (range(32), 4, "0-31"),
        ([0, 1, 4, 5], 4, "0-1,4-5"),
        (range(0, 16, 4), 4, "0,4,8,12"),
        (range(0, 20, 4), 4, "0,4,…,16"),
        (range(0, 20, 4), 1, "0,…,16"),
        ([0, 4], 1, "0,4"),
        ([0, 4, 8], 1, "0,…,8"),
        (range(0, 20, 4), 0, "0…16"),
        (range(4), 0, "0-3"),
        (range(0, 20, 4), None, "0,4,8,12,16"),
        ([3, 2, 1], 4, "3,2,1"),
    ],
)
def test_numbers_in_short(numbers, most, text):
    assert spans(numbers, most) == text
