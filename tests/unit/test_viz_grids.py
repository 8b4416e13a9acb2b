"""ScoreGrid and RankTimeline: what they say, images that repeat, and a browser that decides as the router does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from matplotlib import colormaps
from matplotlib.image import imread

from moe_course.errors import ConfigError, TraceError
from moe_course.viz import rank_timeline, score_grid
from moe_course.viz.colours import RANKS
from moe_course.viz.picture import source
from moe_course.viz.rank_timeline import findings, timeline_data, totals
from moe_course.viz.rank_timeline_still import LOOKS
from moe_course.viz.score_grid import all_scores
from moe_course.viz.score_grid_still import _title as title_of

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed: apt-get install nodejs")


def in_node(tmp_path, module: str, expression: str, value):
    """The JSON of a JavaScript expression that sees the picture's module as `m` and `value` as `input`."""
    (tmp_path / "picture.mjs").write_text(source(module), encoding="utf-8")
    (tmp_path / "input.json").write_text(json.dumps(value))
    program = (
        'import * as m from "./picture.mjs"; import { readFileSync } from "node:fs";'
        'const input = JSON.parse(readFileSync("input.json", "utf8"));'
        f"process.stdout.write(JSON.stringify({expression}));"
    )
    (tmp_path / "run.mjs").write_text(program)
    done = subprocess.run([NODE, "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- ScoreGrid ---------------------------------------------------------------------------------------------------------


def make_grid(experts=16, tokens=5, seed=0, biased=True, coarse=False, lower=0.0, **rules):
    """A grid of random logits; coarse ones have many ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) / 10 - lower if biased else None
    if coarse:
        logits, bias = logits.round(), None if bias is None else (bias * 4).round() / 4
    return score_grid(logits, e_score_correction_bias=bias, **({"top_k": 4, "routed_scaling_factor": 2.5} | rules))


CASES = [
    make_grid(seed=seed, coarse=coarse, biased=biased, **rules)
    for seed in range(3)
    for coarse in (False, True)
    for biased in (False, True)
    for rules in (
        {},
        {"n_group": 4, "topk_group": 2},
        {"n_group": 4, "topk_group": 1, "lower": 0.6},
        {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4},
        {"experts": 8, "top_k": 2, "scoring_func": "softmax", "norm_topk_prob": False},
        {"experts": 60, "top_k": 6, "n_group": 3, "topk_group": 1, "scoring_func": "softmax"},
    )
]
EXPRESSION = """input.map(({ data, state }) => data.scores.map((row) => {
  const bias = m.addBias(data.bias, row.length, state.expert, state.bias);
  return m.chooseExperts(row.map(Math.fround), bias, data);
}))"""


@needs_node
@pytest.mark.parametrize("extra", [0.0, 0.3, -0.25])
def test_the_browser_chooses_as_the_router_does(tmp_path, extra):
    for grid in CASES:
        grid.state = grid.state | {"bias": extra}
    found = in_node(tmp_path, "score_grid", EXPRESSION, [{"data": grid.data, "state": grid.state} for grid in CASES])
    for grid, rows in zip(CASES, found, strict=True):
        weights, ids = grid.chosen()
        assert [row["ids"] for row in rows] == ids.tolist()
        torch.testing.assert_close(torch.tensor([row["weights"] for row in rows]), weights, rtol=2e-6, atol=1e-7)
        size, groups = grid.choice().shape[1] // grid.data["n_group"], range(grid.data["n_group"])
        kept = [[group for group in groups if row[group * size]] for row in grid.kept().tolist()]
        assert [sorted(row["kept"]) for row in rows] == kept
        torch.testing.assert_close(torch.tensor([row["choice"] for row in rows]), grid.choice(), rtol=0, atol=0)


def test_the_cases_would_show_each_usual_mistake():
    """Ties, groups that would count by their best alone, and kept experts below 0 all occur above."""
    grouped = [grid for grid in CASES if grid.data["n_group"] > 1 and grid.data["bias"] is not None]
    assert any(len(row.unique()) < len(row) for grid in CASES for row in grid.choice())
    best = [
        grid.choice().view(len(grid.choice()), grid.data["n_group"], -1).amax(-1).topk(grid.data["topk_group"]).indices
        for grid in grouped
    ]
    kept = [grid.kept().view(*grid.choice().shape[:1], grid.data["n_group"], -1)[..., 0] for grid in grouped]
    assert any(not row.gather(1, index).all() for row, index in zip(kept, best, strict=True))
    assert any((grid.choice().gather(1, grid.chosen()[1].long()) < 0).any() for grid in grouped)


@needs_node
def test_the_browser_has_the_same_heat(tmp_path):
    steps = [i / 50 for i in range(51)]
    found = torch.tensor(in_node(tmp_path, "score_grid", "input.map(m.cividis)", steps), dtype=torch.float32)
    wanted = torch.tensor(colormaps["cividis"](steps))[:, :3] * 255
    assert (found - wanted).abs().max() < 12  # seventeen stops, one corner of the map between two of them


def test_scores_are_the_routers_bit_for_bit():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    grid = score_grid(logits, 4)
    assert torch.equal(torch.tensor(grid.data["scores"]), all_scores(logits, "sigmoid"))
    torch.testing.assert_close(all_scores(logits, "sigmoid"), logits.sigmoid(), rtol=0, atol=1e-6)


def test_the_still_names_a_bias_only_where_there_is_one():
    grid = score_grid(torch.randn(2, 8), 2)
    assert title_of(grid).startswith("score: blue low")
    grid.state = grid.state | {"expert": 3, "bias": 0.5}
    assert title_of(grid).startswith("score + bias: blue low") and "expert 3 moved by +0.50" in title_of(grid)
    assert title_of(make_grid()).startswith("score + bias: blue low")


def test_a_bias_moves_the_choice_and_not_the_sum():
    grid = make_grid()
    quiet = grid.text()
    expert = next(e for e in range(16) if not (grid.chosen()[1] == e).any())
    before = grid.chosen()[1]
    grid.state = {"expert": expert, "bias": 2.0}
    weights, ids = grid.chosen()
    assert (ids == expert).any(dim=1).all() and not torch.equal(ids, before)
    torch.testing.assert_close(weights.sum(dim=1), torch.full((5,), 2.5))
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        weights / 2.5, torch.nn.functional.normalize(logits.sigmoid().gather(1, ids.long()), p=1)
    )
    assert grid.text() != quiet and f"expert {expert} with +2.00 of bias" in grid.text()
    assert grid.bias()[expert] - torch.tensor(grid.data["bias"][expert]) == pytest.approx(2.0)


def test_line_of_text():
    logits = torch.full((6, 256), -2.0)
    logits[:, :7] = 2.0
    logits[torch.arange(6), torch.tensor([17, 17, 17, 20, 21, 22])] = 1.0
    grid = score_grid(logits, 8, routed_scaling_factor=2.5, tokens=list("def ad"))
    assert (
        repr(grid)
        == grid.text()
        == (
            "ScoreGrid: 6 tokens × 256 experts, 8 chosen each, weights of each token add up to 2.500; "
            "most wanted: expert 0 (6 tokens)"
        )
    )
    one = score_grid(torch.tensor([[0.0, 2.0, 1.0, 0.5]]), 1, norm_topk_prob=False)
    assert "1 token × 4 experts" in one.text() and one.text().endswith("no expert is wanted twice")
    assert "add up to 0.881" in one.text()
    two = score_grid(torch.tensor([[0.0, 2.0], [0.0, 1.0]]), 1, norm_topk_prob=False)
    assert "add up to 0.731 to 0.881" in two.text()


def test_tokens_are_shown_as_text_and_can_be_seen():
    grid = score_grid(torch.randn(3, 8), 2, tokens=[" x", "\n", "<b>$1_2$"])
    assert grid.data["tokens"] == ["␣x", "\\n", "<b>$1_2$"]
    assert score_grid(torch.randn(2, 8), 2).data["tokens"] == ["row 0", "row 1"]
    assert grid.still()


@pytest.mark.parametrize(
    "logits, options, words",
    [
        (torch.zeros(8), {}, r"shape \(8,\).*pass some rows"),
        (torch.zeros(65, 8), {}, r"shape \(65, 8\).*1 to 64"),
        (torch.zeros(0, 8), {}, r"shape \(0, 8\)"),
        (torch.zeros(2, 8), {"tokens": ["a"]}, "1 tokens for the 2 rows"),
        (torch.tensor([[0.0, float("nan")]]), {"top_k": 1}, r"router_logits\[0, 1\] is nan"),
        (torch.zeros(1, 2), {"e_score_correction_bias": torch.tensor([0.0, torch.inf])}, r"bias\[1\] is inf"),
        (torch.zeros(1, 8), {"top_k": 9}, "top_k 9 does not fit"),
        (torch.zeros(1, 8), {"n_group": 3}, "n_group 3 does not divide"),
        (torch.zeros(1, 8), {"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
    ],
)
def test_what_is_no_picture_is_refused(logits, options, words):
    with pytest.raises(ConfigError, match=words):
        score_grid(logits, **({"top_k": 2} | options))


# -- RankTimeline ------------------------------------------------------------------------------------------------------

#: (step, layer, stage, begin, end) in µs: rank 1 is late for dispatch, rank 0 for combine.
LANES = (
    [(0, -1, 4, 0, 100), (0, 3, 0, 100, 200), (0, 3, 1, 200, 900), (0, 3, 2, 900, 2000), (0, 3, 3, 2000, 2100)],
    [(0, -1, 4, 50, 600), (0, 3, 0, 600, 700), (0, 3, 1, 700, 900), (0, 3, 2, 900, 1000), (0, 3, 3, 1000, 2100)],
)
DECODE = [(1, -1, 4, 3000, 3100), (1, 3, 0, 3100, 3110), (1, 3, 1, 3110, 3120), (1, 3, 2, 3120, 3130)]


def make_trace(lanes=None, comparable=True, shape="all_to_all", offsets=(0, 0), **meta):
    """The part of a Trace that the timeline reads."""
    lanes = [lane + DECODE for lane in LANES] if lanes is None else lanes
    names = ("span_step", "span_layer", "span_stage", "span_begin_ns", "span_end_ns")
    found = []
    for lane, offset in zip(lanes, offsets, strict=True):
        table = torch.tensor([(*row[:3], *(1000 * t + offset for t in row[3:])) for row in lane], dtype=torch.int64)
        found.append(dict(zip(names, table.view(-1, 5).T, strict=True)))
    clock = {"comparable": comparable, "note": "" if comparable else "clocks differ"}
    meta = {"world_size": len(lanes), "prefill_passes": 1, "shape": shape, "clock": clock} | meta
    return SimpleNamespace(meta=meta, spans=lambda rank: found[rank])


def test_line_of_text_has_no_times():
    assert rank_timeline(make_trace()).text() == "RankTimeline: 2 ranks, 2 passes, 1 sparse layer, 18 spans"
    later = make_trace(offsets=(10**12, 10**12))
    assert repr(rank_timeline(later)) == repr(rank_timeline(make_trace()))
    one = rank_timeline(make_trace([LANES[0]], offsets=(0,)))
    assert one.text() == "RankTimeline: 1 rank, 1 pass, 1 sparse layer, 5 spans"


def test_waiting_ends_when_the_last_rank_comes():
    data = timeline_data(make_trace(offsets=(10**12, 10**12)))
    columns = [data["spans"][name] for name in ("rank", "stage", "step", "wait")]
    waits = {tuple(place): wait for *place, wait in zip(*columns, strict=True)}
    assert waits[0, 1, 0] == 500_000 and waits[1, 1, 0] == 0  # dispatch
    assert waits[0, 3, 0] == 0 and waits[1, 3, 0] == 1_000_000  # combine
    assert waits[0, 4, 0] == waits[1, 2, 0] == 0  # what is no exchange waits for nobody
    assert data["spans"]["begin"][0] == 0
    spent = totals(data)
    assert spent[0].tolist() == [110_000, 210_000, 1_110_000, 100_000, 200_000, 500_000]
    assert spent.sum() == sum(data["spans"]["time"])
    assert [entry["phase"] for entry in data["passes"]] == ["prefill", "decode"]


def test_an_exchange_that_is_over_waits_for_nobody_any_more():
    """Where rows are only sent, a rank may be done before the last one comes: it waited as long as it was there."""
    early = [(0, 3, 0, 0, 100), (0, 3, 1, 100, 150), (0, 3, 2, 150, 400), (0, 3, 3, 400, 500)]
    late = [(0, 3, 0, 0, 300), (0, 3, 1, 300, 350), (0, 3, 2, 350, 400), (0, 3, 3, 400, 500)]
    data = timeline_data(make_trace([early, late]))
    assert data["spans"]["wait"][:4] == [0, 50_000, 0, 0]
    assert (totals(data) >= 0).all()


def test_findings_name_ranks_and_times():
    assert findings(timeline_data(make_trace())) == (
        "longest pass: step 0 (prefill), 2.1 ms; most time in experts: rank 0, 1.1 ms; waits longest: rank 1, 1.0 ms"
    )


def test_clocks_of_several_hosts_are_not_compared():
    trace = make_trace(comparable=False, offsets=(10**15, 0))
    data = timeline_data(trace)
    assert data["note"] == "clocks differ" and not any(data["spans"]["wait"])
    firsts = [data["spans"]["begin"][data["spans"]["rank"].index(rank)] for rank in (0, 1)]
    assert firsts == [0, 0]
    assert findings(data) == "longest pass: step 0 (prefill), 2.1 ms; most time in experts: rank 0, 1.1 ms"


def test_where_rows_stay_dispatch_waits_for_nobody():
    spans = timeline_data(make_trace(shape="no_dp_ep"))["spans"]
    by_stage = {
        stage: sum(w for w, s in zip(spans["wait"], spans["stage"], strict=True) if s == stage) for stage in range(5)
    }
    assert by_stage == {0: 0, 1: 0, 2: 0, 3: 1_000_000, 4: 0}


def test_a_trace_without_spans_is_refused():
    with pytest.raises(TraceError, match="rank 1 has no spans.*record the run again"):
        rank_timeline(make_trace([LANES[0], []]))


@needs_node
@pytest.mark.parametrize("comparable", [True, False])
def test_the_browser_finds_the_same(tmp_path, comparable):
    data = timeline_data(make_trace(comparable=comparable))
    expression = "[m.findings(input, null), m.totals(input, m.spansOf(input, null)), m.findings(input, 1)]"
    words, spent, decode = in_node(tmp_path, "rank_timeline", expression, data)
    assert words == findings(data)
    assert spent == totals(data).tolist()
    assert decode == "step 1 (decode), 0.130 ms; most time in experts: rank 0, 0.010 ms"


@needs_node
def test_zoom_stays_inside(tmp_path):
    expression = (
        "[m.zoomed([0, 80], 0, 5), m.zoomed([0, 80], 2, 5), m.zoomed([0, 80], 2, 40), m.zoomed([0, 80], 2, 99)]"
    )
    assert in_node(tmp_path, "rank_timeline", expression, None) == [[0, 80], [0, 20], [30, 50], [60, 80]]


@needs_node
def test_looks_are_the_same_and_no_ranks_colour(tmp_path):
    assert in_node(tmp_path, "rank_timeline", "m.LOOKS", None) == {name: list(look) for name, look in LOOKS.items()}
    assert not {colour for colour, _ in LOOKS.values()} & set(RANKS)
    assert len({tall for _, tall in LOOKS.values()}) == 4  # dispatch and combine have letters, and never meet


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_grid, lambda: rank_timeline(make_trace())], ids=["score_grid", "rank_timeline"])
def test_bundle_is_live_still_and_text(make, tmp_path):
    picture = make()
    bundle, _ = picture._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(bundle)
    assert bundle["text/plain"] == picture.text()
    assert picture.still() == make().still()
    (tmp_path / "still.png").write_bytes(picture.still())
    assert imread(tmp_path / "still.png").std() > 0.05  # not an empty sheet
    json.dumps(picture.data, allow_nan=False)


def test_a_bias_is_seen_in_the_still_image():
    grid = make_grid()
    before = grid.still()
    grid.state = grid.state | {"bias": 1.0}
    assert grid.still() != before


@pytest.mark.parametrize("module", ["score_grid", "rank_timeline"])
def test_modules_are_alone_and_write_text_only(module):
    text = source(module)
    assert not re.search(
        r"^\s*import\b|import\(|https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text, re.M
    )
    assert "export { mount" in text and "export default adapter(mount)" in text
