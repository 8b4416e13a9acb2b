"""What all pictures keep: modules without imports or requests, colours that agree, pages that take data as data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

from moe_course import viz
from moe_course.errors import ConfigError
from moe_course.viz import colours
from moe_course.viz.page import Figure, page
from moe_course.viz.ribbon import NAMES, STAGES
from moe_course.viz.source import source, styles

VIZ = Path(viz.__file__).parent
MODULES = sorted(p.stem for p in VIZ.glob("*.js") if "export default" in p.read_text(encoding="utf-8"))
EVIL = "</script><img src=x onerror=alert(1)><!--<script>"


def test_the_pictures_of_the_course_are_here():
    assert {"ribbon", "token_flow"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_module_is_one_file_without_imports_requests_or_markup(module):
    text = source(module)
    assert not re.search(r"^\s*import\b|\bimport\s*\(|\bfetch\s*\(|XMLHttpRequest|WebSocket|EventSource", text, re.M)
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\s*\(", text)
    assert not re.search(r"url\s*\(|@import|https?://", styles(module))
    assert text.count("export default adapter(mount);") == 1 and "function mount(root, data, opts" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("module", MODULES)
def test_module_is_javascript(module, tmp_path):
    (tmp_path / f"{module}.mjs").write_text(source(module), encoding="utf-8")
    done = subprocess.run(["node", "--check", tmp_path / f"{module}.mjs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_colours_and_marks_are_the_same_live_and_still():
    common = (VIZ / "common.js").read_text(encoding="utf-8")
    listed = {name: json.loads(re.search(rf"const {name} = (\[.*?\]);", common)[1]) for name in ("COLOURS", "MARKS")}
    assert tuple(listed["COLOURS"]) == colours.RANKS
    names = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond"}
    assert listed["MARKS"] == [names[mark] for mark in colours.MARKS]


def test_heat_is_cividis():
    text = source("token_flow")
    stops = json.loads(re.search(r"const CIVIDIS = (\[.*?\]);", text, re.S)[1])
    colormap = matplotlib.colormaps[colours.HEAT]
    for place, stop in enumerate(stops):
        wanted = [round(255 * part) for part in colormap(place / (len(stops) - 1))[:3]]
        found = [int(stop[at : at + 2], 16) for at in (1, 3, 5)]
        assert all(abs(a - b) <= 8 for a, b in zip(wanted, found, strict=True)), (place, stop, wanted)


def test_ribbon_lights_a_stage():
    lit = viz.ribbon("dispatch")
    assert lit.text() == (
        "Ribbon: router → expert map → [dispatch] → local experts → combine; "
        "dispatch: rows in source order → rows where their experts are"
    )
    assert lit.state == {"stage": "dispatch"} and lit.still() == viz.ribbon("dispatch").still() != viz.ribbon().still()
    assert viz.ribbon("experts").data["lit"] == "local experts" and viz.ribbon("expert_map").data["lit"] == "expert map"
    assert viz.ribbon().state == {} and "[" not in viz.ribbon().text().split(";")[0]
    dispatch = lit.data["stages"][2]["says"]  # a row goes to its owners; in vLLM's default, to everybody
    assert dispatch.startswith("Rows go to the ranks that own their experts") and "default sends all to all" in dispatch
    with pytest.raises(ConfigError, match="stage is 'gather', known stages: router, expert map, dispatch"):
        viz.ribbon("gather")


def test_an_expert_has_a_slot_and_a_token_a_row():
    """A row is a token's vector, in every word that a viewer reads; an expert's place on its shelf is a slot."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in VIZ.glob("*.*") if path.suffix in (".py", ".js")}
    assert not [name for name, text in texts.items() if re.search(r"\blocal (row|id)s?\b", text)]
    assert viz.ribbon().data["stages"][1]["out"] == "owner rank, slot"


def test_functions_stay_functions_when_their_modules_are_imported():
    """A package's attribute of a submodule's name is the submodule, once it was imported."""
    program = (
        "import sys\nfrom moe_course import viz\n"
        "assert not {'anywidget', 'matplotlib'} & set(sys.modules)\n"
        "import moe_course.viz.token_flow\nfrom moe_course.viz.ribbon import Ribbon\n"
        "assert viz.ribbon('router').text() == viz.ribbon('router').text() and callable(viz.token_flow)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_files_of_the_ribbon_exist():
    assert NAMES == ("router", "expert map", "dispatch", "local experts", "combine")
    for stage in STAGES:
        for name in re.findall(r"moe_course/\w+\.py", stage["file"]):
            assert (VIZ.parent.parent / name).exists()


def test_bundle_has_widget_image_and_line():
    bundle, _ = viz.ribbon("router")._repr_mimebundle_()
    assert set(bundle) >= {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert bundle["text/plain"] == viz.ribbon("router").text()


def test_page_takes_data_as_data():
    data = dict(viz.ribbon("router").data) | {"prompt": EVIL}
    text = page(EVIL, ["<h1>Run</h1>", Figure("ribbon", data, {"stage": "router"}), Figure("ribbon", {"n": 1})])
    assert "<img" not in text and "<h1>Run</h1>" in text
    assert text.count("<script") == text.count("</script>") == 5  # two pictures' data and settings, one module
    assert text.count("function mount(") == 1 and text.count("--mc-accent: #1845fb") == 1
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', text, re.S)
    names = ["picture-0-opts", "picture-0-data", "picture-1-opts", "picture-1-data"]
    assert [name for name, _ in found] == names
    assert json.loads(found[0][1]) == {"state": {"stage": "router"}}
    assert json.loads(found[1][1]) == json.loads(json.dumps(data))


def test_pictures_of_the_same_data_share_it():
    data = {"n": 1}
    text = page("x", [Figure("ribbon", data), "<p>and</p>", Figure("token_flow", data), Figure("ribbon", {"n": 1})])
    assert re.findall(r'id="(picture-\d)" data-of="([\w-]+)"', text) == [
        ("picture-0", "picture-0"),
        ("picture-1", "picture-0"),
        ("picture-2", "picture-2"),
    ]
    assert text.count('{"n":1}') == 2


def test_page_makes_no_request():
    text = page("x", [Figure(module, {}) for module in MODULES])
    assert not re.search(r"""(src|href)\s*=\s*["']|https?://|url\(|@import""", text)


def test_numbers_that_json_lacks_are_refused():
    with pytest.raises(ValueError):
        page("x", [Figure("ribbon", {"weight": float("nan")})])
