"""Every button, list and place to click of ribbon, score grid and timeline, on a page whose numbers are known."""

from __future__ import annotations

import re

import checks
import pytest
from control_data import STAGES, open_page, timeline, told, write_page

from moe_course.viz.ribbon import STAGES as RIBBON

pytestmark = pytest.mark.browser
TIMES = timeline()


@pytest.fixture(scope="module")
def shared(watched, tmp_path_factory):
    opened = open_page(watched, write_page(tmp_path_factory.mktemp("controls")))
    yield opened
    opened.context.close()


@pytest.fixture
def on(shared):
    """`on(name)`: the root of a picture. Nothing may be complained about meanwhile."""
    yield lambda name: shared.locator(f"[data-picture={name}]")
    assert checks.quiet(shared) == []


def data(root, name: str) -> str:
    return root.get_attribute(f"data-{name}")


# -- ribbon ------------------------------------------------------------------------------------------------------------


def test_a_stage_names_its_file_and_vllms_name(on):
    ribbon = on("ribbon")
    for stage in RIBBON:
        ribbon.get_by_role("button", name=stage["name"]).click()
        assert ribbon.locator(".mc-says").text_content() == f"{stage['name']}: {stage['says']} ({stage['order']})"
        said = ribbon.locator(".mc-note .mc-quiet").text_content()
        assert said == f"here {stage['file']} · in vLLM {stage['vllm']}"


# -- score grid --------------------------------------------------------------------------------------------------------


def test_a_click_chooses_the_cell_under_the_pointer(on):
    grid = on("score_grid")
    cells = grid.locator("canvas").first
    box = cells.bounding_box()
    for x, y in ((0.5, 0.55), (0.9, 0.9)):
        place = {"x": box["width"] * x, "y": box["height"] * y}
        cells.hover(position=place)
        token, expert = re.search(r"^Token (\d+) .*, expert (\d+):", grid.locator("p.mc-quiet").text_content()).groups()
        cells.click(position=place)
        assert (data(grid, "token"), data(grid, "expert")) == (token, expert) != ("0", "0")


# -- timeline ----------------------------------------------------------------------------------------------------------


def test_buttons_of_the_timeline_choose_steps_and_zoom(on):
    lanes, seen = on("rank_timeline"), []
    for name in ("Next step", "Next step", "Previous step", "Next step", "longest pass", "Zoom in", "Zoom in"):
        lanes.get_by_role("button", name=name, exact=True).click()
        seen.append((data(lanes, "step"), data(lanes, "zoom")))
    lanes.get_by_role("button", name="Zoom out", exact=True).click()
    seen.append((data(lanes, "step"), data(lanes, "zoom")))
    assert seen == [
        *(("0", "0"), ("1", "0"), ("0", "0"), ("1", "0")),
        *(("1", "0"), ("1", "1"), ("1", "2"), ("1", "1")),
    ]
    lanes.get_by_role("combobox").select_option("2")
    assert (data(lanes, "step"), data(lanes, "zoom")) == ("2", "0")
    lanes.get_by_role("button", name="longest pass", exact=True).click()
    assert data(lanes, "step") == "1"


def test_clicks_on_lanes_choose_the_span_and_the_step_that_is_there(on):
    lanes, spans = on("rank_timeline"), TIMES["spans"]
    lanes.get_by_role("combobox").select_option("whole")
    canvas, detail = lanes.locator(".mc-lanes canvas"), lanes.locator("p.mc-quiet").first
    wide = canvas.bounding_box()["width"] - 72
    end = max(begin + time for begin, time in zip(spans["begin"], spans["time"], strict=True))
    for i in (7, 23, 18):
        assert data(lanes, "span") != str(i)
        x = 62 + wide * (spans["begin"][i] + spans["time"][i] / 2) / end
        canvas.click(position={"x": x, "y": 26 + 34 * (spans["rank"][i] + 0.5)})
        assert (data(lanes, "span"), data(lanes, "rank")) == (str(i), str(spans["rank"][i]))
        assert data(lanes, "phase") == STAGES[spans["stage"][i]]
        lanes.locator("p").first.hover()  # away from the canvas: the chosen one is told of
        assert detail.text_content() == told(spans, i)
    canvas.click(position={"x": 62 + wide / 2, "y": 10})
    assert data(lanes, "step") == "1"


def test_the_table_of_the_timeline_is_in_milliseconds(on):
    lanes = on("rank_timeline")
    lanes.get_by_role("combobox").select_option("1")
    lanes.get_by_role("button", name="as table").click()
    rows = [
        row.split("|")
        for row in lanes.locator("tr").evaluate_all(
            "(r) => r.map((e) => [...e.children].map((c) => c.textContent).join('|'))"
        )
    ]
    lanes.get_by_role("button", name="as table").click()
    assert rows[0] == ["ms", *STAGES, "waiting", "sum"]
    assert rows[1] == ["rank 0", "4.000", "3.770", "4.140", "4.210", "4.280", "0.300", "20.700"]
    assert rows[2] == ["rank 1", "4.011", "3.781", "4.151", "4.221", "4.291", "0.300", "20.755"]


# -- all ---------------------------------------------------------------------------------------------------------------

WISHES = {
    "ribbon": ["stage: 'gather'", "stage: 3"],
    "score_grid": ["expert: 12", "expert: -1", "expert: 1.5", "token: 5", "token: 'x'", "bias: 'x'", "bias: NaN"],
    "token_text": ["layer: 99", "step: 0, token: 9", "step: 7, token: 0", "token: 'x'"],
    "token_flow": ["step: 99", "layer: 99", "token: 9", "rank: 77", "expert: -1", "phase: 'nope'"],
    "rank_timeline": ["step: 99", "step: '1'", "rank: 77", "rank: 'x'", "layer: 99", "stage: 'x'", "span: 1e9"],
}


@pytest.mark.parametrize("name", WISHES)
def test_what_does_not_exist_is_refused(on, name):
    root = on(name)
    get = "(e) => JSON.stringify([e.picture.get(), {...e.dataset}])"
    before = root.evaluate(get)
    for wish in WISHES[name]:
        root.evaluate(f"(e) => e.picture.set({{{wish}}})")
        assert root.evaluate(get) == before, wish


def test_a_combination_that_does_not_exist_is_named_no_longer(on):
    lanes = on("rank_timeline")
    state = "(e, wanted) => { e.picture.set(wanted); return e.picture.get(); }"
    there = {"step": 1, "rank": 1, "layer": 1, "stage": "combine"}
    assert lanes.evaluate(state, there) == there and data(lanes, "phase") == "combine"
    assert lanes.evaluate(state, there | {"stage": "other"}) == there | {"layer": None, "stage": None}
    assert data(lanes, "phase") == "experts"
