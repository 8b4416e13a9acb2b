"""`moe-course run` in every parallel mode: the text of one process, and exactly the bytes the mode must move."""

from __future__ import annotations

import pytest
import torch
from many_runs import run_many

from moe_course.config import MoEConfig
from moe_course.expert_map import make_placement
from moe_course.options import TINY
from moe_course.trace import Trace

PROMPTS = ["def add(a, b):\n    return", "", "x" * 70 + "\n"]
CONFIG = MoEConfig.from_pretrained(TINY)
LAYERS, K = len(CONFIG.sparse_layers), CONFIG.num_experts_per_tok
ROW = CONFIG.hidden_size * 4  # bytes; partial sums are as wide in float32
NEW = 4
TP2, DP2, PCP2 = (f"--{name}-parallel-size=2" for name in ("tensor", "data", "prefill-context"))
EP = "--enable-expert-parallel"


def sizes(tp=1, dp=1, pcp=1, ep=True, **more) -> dict:
    """Options of a run, as from vLLM's flags."""
    found = {"tensor_parallel_size": tp, "data_parallel_size": dp, "prefill_context_parallel_size": pcp}
    return found | {"enable_expert_parallel": ep} | more


#: Ranks -> mode -> (options, (dispatch, reduce, split group), rows moved for so many rows)
MODES = {
    2: {
        "tp2": (sizes(tp=2, ep=False), (None, "tp", None), lambda rows: 2 * rows * 1),
        "tp2-ep": (sizes(tp=2), (None, "tp", None), lambda rows: 2 * rows * 1),
        "dp2": (sizes(dp=2, ep=False), ("dp", None, None), lambda rows: 2 * rows * 1),
        "pcp2-ep": (sizes(pcp=2), ("pcp", None, "pcp"), lambda rows: 2 * rows * 1 + rows * 1),
    },
    4: {
        "tp2-dp2-ep": (sizes(tp=2, dp=2), ("ep", None, "tp"), lambda rows: 2 * rows * 3 + rows * 1),
        "tp2-dp2-ep-no-sp": (
            sizes(tp=2, dp=2, sequence_parallel_moe=False), ("dp", "tp", None), lambda rows: 2 * rows * 2 + 2 * rows,
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("ranks", MODES)
def test_the_text_of_one_process_and_the_bytes_of_the_mode(ranks, tmp_path, warm):
    """All modes of a number of ranks, in one start of the processes."""
    cells = []
    for mode, (options, _, _) in MODES[ranks].items():
        cells.append(options | ({"trace": str(tmp_path / mode)} if options["enable_expert_parallel"] else {}))
    results = run_many(ranks, cells, NEW, tuple(PROMPTS))
    for (mode, (options, groups, rows_moved)), result in zip(MODES[ranks].items(), results, strict=True):
        plan, ep = result["plan"], options["enable_expert_parallel"]
        assert result["verdict"] == "equal" and result["topk_ids_equal"] is True, (mode, result["failures"])
        assert result["max_abs_logit_diff"] <= 1e-4
        assert (plan["dispatch_group"], plan["reduce_group"], plan["split_group"]) == groups, mode
        dp = plan["dp"]
        assert [p["dp_rank"] for p in result["prompts"]] == [i % dp for i in range(len(PROMPTS))]
        rows = sum(len(p["prompt_tokens"]) + NEW - 1 for p in result["prompts"])
        assert result["bytes"]["payload"] == rows_moved(rows) * LAYERS * ROW, mode
        assert result["bound"]["ratio"] == 1.0, mode
        assert result["rows"]["sent"] == result["rows"]["received"]
        experts = [CONFIG.n_routed_experts // ranks if ep else CONFIG.n_routed_experts]
        assert [rank["experts"] for rank in result["ranks"]] == experts * ranks
        held = {rank["expert_bytes"] for rank in result["ranks"]}
        whole = 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size * 4 * LAYERS * CONFIG.n_routed_experts
        assert held == {whole // ranks}  # whole experts or slices of all: the same share
        if ep:
            assert sum(result["load"]["routes_per_rank"]) == rows * LAYERS * K
            _assert_every_route_once(tmp_path / mode, result, rows)


def _assert_every_route_once(folder, result, rows):
    """Rows are shared by ranks, or split over them: each route has one rank that carries it, and its true owner."""
    trace = Trace.load(folder)
    columns = trace.columns
    assert len(trace) == rows * LAYERS * K
    placement = make_placement(result["plan"]["ep_size"], CONFIG.n_routed_experts)
    assert torch.equal(columns["owner_rank"], placement.owner[columns["expert"]].long())
    assert torch.equal(columns["local_expert"], placement.local[columns["expert"]].long())
    assert (columns["receive_row"] >= 0).all() and (columns["send_row"] == columns["row"]).all()
    places = [columns[name].tolist() for name in ("step", "layer", "source_rank", "row", "k")]
    if result["plan"]["split_group"]:
        assert len(set(zip(*places, strict=True))) == len(trace)
    if result["plan"]["reduce_group"]:  # a route never leaves its column of ranks
        tp = result["plan"]["tp"]
        assert (columns["source_rank"] % tp == columns["owner_rank"] % tp).all()


def test_fewer_prompts_than_data_parallel_ranks(warm):
    """Both TP ranks of the second one have nothing to do, and join every layer with zero rows."""
    ended = warm.run(TP2, DP2, EP, "--prompt=x", "--max-new-tokens=3", "--check")
    assert ended.returncode == 0, ended.stderr
    assert ended.result["verdict"] == "equal" and ended.result["bound"]["ratio"] == 1.0


def test_one_rank_with_the_flag_is_one_rank(warm):
    ended = warm.run("--world-size=1", EP, "--prompt=x", "--max-new-tokens=2")
    assert ended.returncode == 0, ended.stderr
    assert ended.result["plan"]["use_ep"] is False and ended.result["backend"] == "no_dp_ep"
    assert ended.result["bytes"]["payload"] == 0
