"""What a run's page says, from figures written by hand, and that no value becomes markup in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from moe_course.comm.ledger import Entry, Ledger
from moe_course.console import _ledger_table
from moe_course.trace import report, report_tables, report_words
from moe_course.trace.html import Html, element, joined, script, table
from moe_course.trace.trace import Trace

BAD = "</p>\"'<svg onload=x>"
SAFE = "&lt;/p&gt;&quot;&#x27;&lt;svg onload=x&gt;"


def result_of(**fields) -> dict:
    prompt = {"prompt": "a", "prompt_tokens": [0], "tokens": [1, 2], "matches_reference": True}
    return {
        "world_size": 4, "backend": "all_to_all", "model": "/m/tiny", "device": "cpu", "dtype": "float32",
        "transport": "gloo", "transport_reason": "why", "stages": {}, "verdict": "equal", "failures": [],
        "max_abs_logit_diff": 1.5e-5, "near_ties": [], "quantised": None, "prompts": [prompt],
    } | fields  # fmt: skip


def trace_of(**meta) -> Trace:
    columns = {"prompt": torch.tensor([0, 0]), "position": torch.tensor([0, 1])}
    meta = {"world_size": 4, "shape": "all_to_all", "experts": 8, "top_k": 2, "token_text": {}} | meta
    return Trace({"prompts": [{"prompt": "a", "tokens": [0]}], "new_tokens": [[1, 2]]} | meta, columns)


# -- markup ------------------------------------------------------------------------------------------------------------


def test_children_and_attributes_are_text_unless_an_element_was_made():
    assert element("p", BAD, class_=BAD) == f'<p class="{SAFE}">{SAFE}</p>'
    assert element("p", element("b", BAD), 3, class_=None) == f"<p><b>{SAFE}</b>3</p>"
    assert joined([BAD, element("br")]) == f"{SAFE}<br>" and isinstance(joined([BAD]), Html)
    made = table([BAD], [[BAD], [element("i")]], BAD, {0: BAD})
    assert made.count(SAFE) == 6 and "<svg" not in made  # caption, head, cell; and the class of three cells
    assert script("a </SCRIPT> b").count("</") == 1


def test_what_is_made_of_markup_and_text_is_text_again():
    assert not isinstance(element("b") + BAD, Html)  # so that it is escaped when it goes into a page


@pytest.mark.parametrize("module", [report, report_words, report_tables])
def test_nothing_but_the_builder_writes_markup(module):
    tree = ast.parse(Path(module.__file__).read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in texts if "<" in text or "&" in text]
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert calls and not [call for call in calls if getattr(call, "id", "") == "Html"]


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({}, "equal", "equal the untouched one-process model (largest difference of a logit 1.5e-05)"),
        ({"max_abs_logit_diff": 0.0}, "equal", "(largest difference of a logit 0)"),
        ({"near_ties": [{}]}, "equal", "1.5e-05), but for 1 near tie and what follows from it"),
        ({"verdict": "not checked", "max_abs_logit_diff": None}, "other", "nobody compared this run; add --check"),
        ({"verdict": "reported", "dtype": "bfloat16"}, "other", "1 of 1 text equal, logits differ by up to 1.5e-05; equality is promised for float32 only"),  # noqa: E501
        ({"verdict": "reported", "quantised": {"format": "fp8_group"}}, "other", "rows are quantised (fp8_group)"),
        ({"verdict": "reported"}, "other", "what comes home is rounded to bfloat16, so equality is not promised"),
        ({"verdict": "different", "failures": ["<b>"]}, "different", "one-process model<br>&lt;b&gt;</p>"),
        ({"verdict": "different", "failures": ["f"] * 7}, "different", "f<br>f<br>and 2 other differences</p>"),
    ],
)  # fmt: skip
def test_every_verdict_has_its_words(fields, kind, says):
    said = report_words.verdict(result_of(**fields))
    assert said.startswith(f'<p class="verdict {kind}"><b>{fields.get("verdict", "equal")}</b>') and says in said


@pytest.mark.parametrize(
    ("sums", "says"),
    [
        ([3, 9, 5, 7], "Rank 1 was the busiest: 9 routes, 1.50 times the mean."),
        ([9, 1, 2, 3, 9], "Ranks 0 and 4 were the busiest: 9 routes each, 1.88 times the mean."),
        ([9, 9, 9, 0], "Ranks 0, 1 and 2 were the busiest: 9 routes each, 1.33 times the mean."),
        ([4, 4], "All ranks were equally busy: 4 routes each."),
        ([1_336], "The one rank computed all 1,336 routes."),
        ([0, 1], "Rank 1 was the busiest: 1 route, 2.00 times the mean."),
    ],
)
def test_all_of_the_busiest_are_named(sums, says):
    assert report_tables.busiest(sums) == says


def test_facts_count_what_was_read_and_written_in_plain_words():
    said = report_words.facts(trace_of(), result_of())
    assert "<dd>1 prompt, 1 token read, 2 written</dd>" in said and "<dd>tiny: 8 experts, 2 per token</dd>" in said
    assert "<dd>as all_to_all, carried by gloo (why)</dd>" in said
    two = result_of(prompts=[{"tokens": [1], "prompt_tokens": [0, 5, 6]}] * 2)
    assert "<dd>2 prompts, 6 tokens read, 2 written</dd>" in report_words.facts(trace_of(), two)
    said = report_words.facts(trace_of(), result_of(transport=BAD, stages={BAD: BAD}, model=BAD))
    assert "<svg" not in said and said.count("&lt;svg") == 4
    assert report_words.title(result_of(world_size=1)) == "Expert parallelism on 1 rank: all_to_all"


def test_where_no_row_travels_the_page_does_not_say_how():
    assert "<dd>no: one rank has all rows" in report_words.facts(trace_of(world_size=1, shape="no_dp_ep"), result_of())
    said = report_words.facts(trace_of(shape="no_dp_ep"), result_of(backend="no_dp_ep"))
    assert "<dd>as partial sums alone (no_dp_ep): every rank has every row; carried by gloo" in said


def test_the_last_token_of_a_text_is_shown_with_the_reason_for_its_missing_colour():
    said = report_words.never_fed(trace_of(token_text={"2": "<\n"}))
    assert said.startswith(
        '<p class="quiet">The last token of a text is missing above: it was written and never fed back'
    )
    assert said.endswith(" It is <code>&lt;\\n</code> in prompt 0.</p>")
    assert "<code>#2</code>" in report_words.never_fed(trace_of())  # an id without text
    fed = trace_of(new_tokens=[[1]])
    assert report_words.never_fed(fed) == ""  # as with --stop-at-eos, where a text ended before others did


def test_what_ranks_agree_on_outside_of_layers_is_no_row():
    ledger = Ledger()
    ledger.add("all_reduce", -1, 0, 1, Entry(payload=8, padding=2, metadata=1, rows=1, messages=1))
    ledger.add("all_reduce", 2, 0, 1, Entry(payload=64, metadata=4, rows=2, messages=1))
    ledger.receive(-1, 1)
    ledger.receive(2, 3)
    inside = Ledger.merge([ledger, Ledger()]).of_layers()
    assert inside.total() == Entry(payload=64, metadata=4, rows=2, messages=1)
    assert inside.rows_received == 3 and ledger.rows_received == 4
    cells = [list(column.cells) for column in _ledger_table({"ledger": ledger.as_rows()}).columns]
    assert [cell[-1] for cell in cells] == ["all", "2", "2", "64", "0", "15"]  # the bytes are there, as metadata
