"""`run.json` is read strictly: whatever stands in it is right, or refused by name, or text on the page."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_cases import GONE, HOSTILE, WRONG, Skeleton, at, changed, leaves, places

from moe_course.cli import main
from moe_course.errors import MoECourseError, TraceError
from moe_course.trace import Trace
from moe_course.trace.report import report, report_of
from moe_course.trace.strict.meta import check_meta
from moe_course.trace.strict.result import check_result
from moe_course.trace.strict.same_run import check_same_run
from moe_course.viz.flow_data import flow_data

FILE = Path("run.json")
NULL = ("row_invariance", "max_over_mean", "prefill_tokens_per_s", "decode_tokens_per_s")


@pytest.fixture(scope="module")
def run(told):
    """The run's trace, what the player shows, its figures; and its page with others."""
    folder, result = told
    trace = Trace.load(folder / "trace")
    flow = flow_data(trace)

    def check(changed: dict) -> None:
        check_same_run(trace.meta, flow, check_result(changed, FILE), FILE)

    def page(changed: dict, meta: dict) -> str:
        if meta is trace.meta:
            check(changed)  # what is refused need not be drawn
        return report(Trace(check_meta(meta, folder), trace.columns, trace.ranks), changed)

    # as in the folder: rank 0 hands in the JSON without the seconds of the trace and the page
    return SimpleNamespace(meta=trace.meta, flow=flow, result=result, check=check, page=page)


def test_a_hostile_text_in_any_leaf_is_text_or_is_refused(run):
    """One leaf at a time, of both files where both tell of it; no element and no attribute comes of any."""
    clean = Skeleton(run.page(run.result, run.meta)).elements
    spoilt = [(changed(run.result, path, HOSTILE), run.meta) for path in leaves(run.result)]
    for path in leaves(run.meta):
        result = run.result
        with suppress(KeyError, IndexError, TypeError):
            if at(result, path) == at(run.meta, path):
                result = changed(result, path, HOSTILE)
        spoilt.append((result, changed(run.meta, path, HOSTILE)))
    texts = dict.fromkeys(run.meta["token_text"], HOSTILE)
    spoilt.append((run.result, run.meta | {"token_text": texts}))
    backend = [changed(each, ("plan", "backend"), HOSTILE) for each in (run.result, run.meta)]
    spoilt.append((backend[0] | {"backend": HOSTILE}, backend[1]))
    shown = 0
    for result, meta in spoilt:
        with suppress(MoECourseError):
            page = Skeleton(run.page(result, meta))
            shown += 1
            assert page.elements == clean, [name for name in result if result[name] != run.result[name]]
    assert 20 <= shown <= len(spoilt) - 100, (shown, len(spoilt))


def test_hostile_failures_and_stages_are_text(run):
    found = {"max_abs_logit_diff": 1.0, "topk_ids_equal": False, "routed_rows_compared": 1, "rows_after_near_ties": 0}
    found = run.result | found | {"verdict": "different", "failures": [HOSTILE], "stages": {HOSTILE: HOSTILE}}
    found["prompts"] = [prompt | {"matches_reference": False} for prompt in found["prompts"]]
    meta = run.meta | {"options": run.meta["options"] | {"stages": "my_moe"}}
    page = Skeleton(run.page(found, meta))
    assert ("svg", ("onload", "x")) not in page.elements and page.text.count(HOSTILE) == 3


def test_whatever_stands_in_a_field_is_right_or_refused_by_name(run):
    """Nothing else is raised. What is accepted is of the same kind, and no other figure and no route tells of it."""
    refused = 0
    for path in places(run.result):
        kept = at(run.result, path)
        for value in WRONG:
            if type(value) is type(kept) and value == kept:
                continue
            try:
                run.check(changed(run.result, path, value))
            except TraceError as error:
                assert str(error).startswith("run.json: "), error
                if value is GONE and isinstance(path[-1], str) and path[0] != "plan" and path != ("schema",):
                    assert f".{path[-1]} is missing" in str(error) or f"field {path[-1]} is missing" in str(error)
                refused += 1
            else:
                if value is GONE:
                    assert isinstance(path[-1], int) or path[0] == "guard", path
                    continue
                alike = type(value) is type(kept) or {type(value), type(kept)} <= {int, float}
                assert alike or value is None and path[-1] in NULL or kept is None and path == ("row_invariance",), path
    assert refused > 1000


def _swapped(result: dict) -> None:
    for entries in ("moved", "ledger"):
        for line in result[entries]:
            line["rows"] += 1


DIFFERENT = {
    "another schema": (lambda r: r | {"schema": "other/2"}, "schema is 'other/2', this version reads 'moe_course.run"),
    "a field more": (lambda r: r | {"more": 1}, "field more is not known"),
    "a field more of a rank": (lambda r: r["ranks"][1].update(more=1), r"field ranks\[1\].more is not known"),
    "other ranks": (lambda r: r | {"world_size": 3}, "field world_size is 3, the trace says 4"),
    "one rank less": (lambda r: r["ranks"].pop() and None, r"field ranks is \[0, 1, 2\], the trace says \[0, 1, 2, 3"),
    "ranks the other way": (lambda r: r["ranks"].reverse(), r"field ranks is \[3, 2, 1, 0\], the trace says"),
    "no ranks": (lambda r: r | {"ranks": []}, r"field ranks is \[\]"),
    "experts": (lambda r: r["ranks"][2].update(experts=63), r"field ranks\[2\].experts is 63, the trace says 64"),
    "a place": (lambda r: r["ranks"][2].update(dp=1), r"field ranks\[2\].dp is 1, the trace says 2"),
    "rows out": (lambda r: r["ranks"][0].update(rows_sent=1), r"field ranks\[0\].rows_sent is 1, the trace says \d+"),
    "rows in": (lambda r: r["ranks"][3].update(rows_received=1), r"field ranks\[3\].rows_received is 1"),
    "all rows": (lambda r: r["rows"].update(sent=1), r"field rows.sent is 1, expected \d+, as ranks adds up to"),
    "another backend": (lambda r: r | {"backend": "two_hop"}, "field backend is 'two_hop', the trace says 'allgather_"),
    "another transport": (lambda r: r | {"transport": "shm"}, "field transport is 'shm', the trace says 'gloo'"),
    "another dtype": (lambda r: r | {"dtype": "bfloat16"}, "field dtype is 'bfloat16', the trace says 'float32'"),
    "another plan": (lambda r: r["plan"].update(tp=2), "field plan is "),
    "another prompt": (lambda r: r["prompts"][1].update(prompt="x"), r"prompts\[1\].prompt is 'x', the trace says"),
    "another token": (lambda r: r["prompts"][1]["tokens"].append(3), r"prompts\[1\].tokens \(new_tokens\) is .*, 3\]"),
    "one prompt less": (lambda r: r["prompts"].pop() and None, "field prompts is 2, the trace says 3"),
    "a prompt elsewhere": (lambda r: r["prompts"][0].update(dp_rank=4), r"prompts\[0\].dp_rank is 4, expected 0 to 3"),
    "nothing moved": (lambda r: r | {"moved": []}, r"field moved is \[\], the trace says \[\(1, 'prefill'\), "),
    "a layer": (lambda r: r["moved"][0].update(layer=7), r"field moved is \[\(7, 'prefill'\)"),
    "a phase": (lambda r: r["moved"][0].update(phase="x"), r"field moved is \[\(1, 'x'\)"),
    "passes": (lambda r: r["moved"][0].update(passes=2), r"moved\[0\].passes is 2, the trace says 1"),
    "the bound": (lambda r: r["moved"][2].update(bound=1, ratio=1.0), r"moved\[2\].bound is 1, the trace says \d+"),
    "the bytes": (lambda r: r["moved"][2].update(payload=1), r"moved\[2\].payload is 1, the trace says \d+"),
    "the padding": (lambda r: r["moved"][1].update(padding=1), r"moved\[1\].padding is 1, the trace says 0"),
    "the ratio": (lambda r: r["moved"][1].update(ratio=0.5), r"moved\[1\].ratio is 0.5, the trace says 1.0"),
    "rows and ledger": (_swapped, r"moved\[0\].rows is \d+, the trace says \d+"),
    "a ledger": (lambda r: r | {"ledger": []}, r"field bytes is \d+, expected 0, as ledger adds up to"),
    "all bytes": (lambda r: r["bytes"].update(payload=1), "field bytes.payload is 1, expected .*, as moved adds up to"),
    "the bound of all": (lambda r: r["bound"].update(payload=1), "field bound.payload is 1, expected"),
    "no such verdict": (lambda r: r | {"verdict": "failed"}, "verdict is 'failed', expected equal or different or"),
    "equal and not compared": (lambda r: r | {"verdict": "equal"}, "max_abs_logit_diff is None, expected a value"),
    "failures of nobody": (lambda r: r | {"failures": ["x"]}, r"failures is \['x'\], expected none: verdict is 'not"),
    "a difference of nobody": (lambda r: r | {"max_abs_logit_diff": 0.0}, "is 0.0, expected null: verdict is 'not"),
    "no difference": (lambda r: r | {"verdict": "different"}, r"failures is \[\], expected what differs"),
    "stages of nobody": (lambda r: r | {"stages": {"route": "x.py"}}, "field stages is True, the trace says False"),
    "routes of a rank": (lambda r: r["load"]["routes_per_rank"].reverse(), r"field load.routes_per_rank is \["),
    "a long value": (lambda r: r | {"model": "x" * 999}, "field model is 'x{196}…, the trace says"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_figures_of_another_run_are_refused_by_name(run, case):
    change, says = DIFFERENT[case]
    result = copy.deepcopy(run.result)
    result = change(result) or result
    with pytest.raises(TraceError, match=r"^run.json: .*" + says):
        run.check(result)


EQUAL = {"verdict": "equal", "max_abs_logit_diff": 0.0, "topk_ids_equal": True}
EQUAL |= {"routed_rows_compared": 1, "rows_after_near_ties": 0}


def test_an_equal_run_has_nothing_that_differs(run):
    result = run.result | EQUAL
    result["prompts"] = [prompt | {"matches_reference": True} for prompt in result["prompts"]]
    run.check(result)
    tie = [{"prompt": 0, "position": 1, "layer": 1, "gap": -1e-9}]
    cases = [({"failures": ["x"]}, "failures"), ({"max_abs_logit_diff": float("nan")}, "max_abs_logit_diff")]
    other = changed(result, ("prompts", 1, "matches_reference"), False)
    for change, name in [*cases, ({"topk_ids_equal": False}, "topk_ids_equal"), (other, r"prompts\[1\].matches_ref")]:
        with pytest.raises(TraceError, match=f"run.json: field {name}.* is .*, expected .*: verdict is 'equal'"):
            run.check(result | change)
    run.check(other | {"near_ties": tie})  # after one, texts may go on in two ways


def test_a_trace_that_lost_routes_is_of_another_run(run):
    flow = copy.deepcopy(run.flow)
    lost = next(each for each in flow["passes"] if each["wire"]["dispatch"])
    lost["wire"]["dispatch"].pop()
    with pytest.raises(TraceError, match=r"moved\[0\].bound is \d+, the trace says \d+: .* record the run again"):
        check_same_run(run.meta, flow, run.result, FILE)
    flow["passes"].remove(lost)
    with pytest.raises(TraceError, match=r"moved\[0\].passes is 1, the trace says 0"):
        check_same_run(run.meta, flow, run.result, FILE)


def test_a_stage_of_your_own_may_send_more_than_the_routes_ask_for(run):
    result, meta = copy.deepcopy(run.result), run.meta | {"options": run.meta["options"] | {"stages": "my_moe"}}
    result["stages"] = {"dispatch": "my_moe/dispatch.py"}
    for line in result["moved"]:
        line |= {"payload": line["payload"] * 2, "ratio": 2.0}
    more = sum(line["payload"] for line in result["moved"]) // 2
    result["bytes"]["payload"] += more
    result["bound"]["ratio"] = 2.0
    for entry in result["ledger"]:
        entry["payload"] *= 2
    check_same_run(meta, run.flow, check_result(result, FILE), FILE)
    with pytest.raises(TraceError, match=r"moved\[0\].bound is 1, the trace says"):
        check_same_run(meta, run.flow, changed(result, ("moved", 0, "bound"), 1), FILE)


def test_a_folder_without_the_figures_is_refused(told, tmp_path, capsys):
    folder, _ = told
    for path in (folder / "trace").iterdir():
        if path.name not in ("run.json", "report.html"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(TraceError, match="run.json: the figures of the run cannot be read .* record the run again"):
        report_of(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == TraceError.exit_code
    assert "nowhere: no readable meta.json" in capsys.readouterr().err
    for content in ([], None, "x", {}):
        (tmp_path / "run.json").write_text(json.dumps(content))
        assert main(["report", str(tmp_path)]) == TraceError.exit_code
        assert "run.json: schema is " in capsys.readouterr().err and not (tmp_path / "report.html").exists()
    result = json.loads((folder / "trace" / "run.json").read_text())
    for change, says in (({"transport": "shm"}, "the trace says 'gloo'"), ({"wall_s": "x"}, "float")):
        content = result | change
        (tmp_path / "run.json").write_text(json.dumps(content))
        assert main(["report", str(tmp_path)]) == TraceError.exit_code and says in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
