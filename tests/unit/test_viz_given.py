"""What a cell hands to a picture by mistake is refused with its name, its value and the cure; odd letters are drawn."""

from __future__ import annotations

import warnings

import pytest
import torch
from trace_cases import change_folder

from moe_course import viz
from moe_course.errors import ConfigError, TraceError
from moe_course.trace import Trace
from moe_course.viz.flow_data import flow_data


@pytest.fixture
def trace(tmp_path) -> Trace:
    return Trace.load(change_folder(tmp_path))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"steps": 0}, r"steps is 0, needs to be several numbers: steps=\[0\]"),
        ({"steps": ["a"]}, r"steps is \['a'\], needs to hold whole numbers: steps=\[0, 1\]"),
        ({"steps": "01"}, "steps is '01', needs to be several numbers"),
        ({"layers": [1.0]}, r"layers is \[1.0\], needs to hold whole numbers"),
        ({"layers": [True]}, r"layers is \[True\], needs to hold whole numbers"),
        ({"layers": torch.tensor(1)}, r"layers is tensor\(1\), needs to hold whole numbers"),
    ],
)
def test_steps_that_are_no_numbers_are_refused(trace, options, words):
    with pytest.raises(ConfigError, match=words):
        viz.token_flow(trace, **options)


def test_a_folder_stands_for_the_trace_in_it(tmp_path):
    folder = change_folder(tmp_path)
    assert viz.token_flow(str(folder)).text() == viz.token_flow(Trace.load(folder)).text()
    assert viz.rank_timeline(folder).text() == "RankTimeline: 2 ranks, 2 passes, 1 sparse layer, 16 spans"
    for picture in (viz.token_flow, viz.rank_timeline):
        with pytest.raises(TraceError, match="nowhere: no readable meta.json"):
            picture("nowhere")
        with pytest.raises(ConfigError, match=r"trace is 5, needs to be a recorded run: Trace.load\(folder\)"):
            picture(5)


def test_characters_that_the_font_lacks_draw_without_a_warning(trace):
    texts = [{"prompt": "日", "tokens": [300, 301]}, {"prompt": "🙂", "tokens": [302, 303]}]
    meta = trace.meta | {"prompts": texts, "token_text": {"300": "日", "301": "🙂", "302": "本", "303": "👍"}}
    assert "日" in str(flow_data(Trace(meta, trace.columns))["passes"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert viz.token_flow(Trace(meta, trace.columns)).still()


@pytest.mark.parametrize(
    "logits, options, words",
    [
        ([[1.0, 2.0]], {}, r"router_logits is \[\[1.0, 2.0\]\], needs to be a tensor \[T, E\]: torch.tensor"),
        (torch.zeros(1, 8).int(), {}, r"router_logits has dtype torch.int32, .*: router_logits.float\(\)"),
        (torch.zeros(1, 8), {"top_k": 2.0}, "top_k is 2.0, needs to be a whole number: top_k=8"),
        (torch.zeros(1, 8), {"top_k": True}, "top_k is True, needs to be a whole number"),
        (torch.zeros(1, 8), {"n_group": "2"}, "n_group is '2', needs to be a whole number"),
        (torch.zeros(1, 8), {"topk_group": None}, "topk_group is None, needs to be a whole number"),
        (torch.zeros(2, 8), {"tokens": [1, 2]}, r"tokens\[0\] is 1, needs to be text: tokens=\[str\(token\)"),
        (torch.zeros(2, 8), {"tokens": 2}, "tokens is 2, needs to be 2 texts, one for each row"),
        (torch.zeros(1, 8), {"norm_topk_prob": "no"}, "norm_topk_prob is 'no', needs to be True or False"),
        (torch.zeros(1, 8), {"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf, .* finite number"),
        (torch.zeros(1, 8), {"routed_scaling_factor": "2"}, "routed_scaling_factor is '2', needs to be a finite numb"),
        (torch.zeros(1, 8), {"e_score_correction_bias": [0.0] * 8}, r"bias is \[0.0, .*, needs to be a tensor \[E\]"),
    ],
)
def test_what_no_router_takes_is_refused(logits, options, words):
    with pytest.raises(ConfigError, match=words):
        viz.score_grid(logits, **({"top_k": 2} | options))


def test_characters_that_the_font_lacks_are_boxes_without_a_warning():
    tokens = ["🙂", "日本", "a👍b", "ö"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = viz.score_grid(torch.zeros(4, 8), 2, tokens=tokens).still()
    assert image == viz.score_grid(torch.zeros(4, 8), 2, tokens=["□", "□□", "a□b", "ö"]).still()
