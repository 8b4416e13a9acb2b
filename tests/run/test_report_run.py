"""`run --report` and `report DIR`: one page that holds the run and nothing it could be made to run."""

from __future__ import annotations

import json
import re

import pytest

from moe_course.cli import main
from moe_course.errors import TraceError
from moe_course.trace import Trace
from moe_course.trace.report import report, report_of, write_report

PROMPTS = ("def add(a, b):", "</script><img src=x onerror=alert(1)>", "größe")
ASKED = ("--device=cpu", "--world-size=4", "--max-new-tokens=3", *(f"--prompt={text}" for text in PROMPTS))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A page made by a run, and one made later from the folder of its trace."""
    from warm import warm_starts

    from conftest import Course

    folder = tmp_path_factory.mktemp("report")
    with warm_starts():
        course = Course(folder)
        ended = course.run(*ASKED, "--trace", str(folder / "trace"), "--report", str(folder / "run.html"))
    assert ended.returncode == 0, ended.stderr
    assert re.sub(r"\s", "", f"{folder}/run.html: open it in a browser") in re.sub(r"\s", "", ended.stdout)
    return folder, ended.result


def data_of(text: str) -> dict[str, dict]:
    """Module -> the data it shows."""
    found = {}
    for module, name in re.findall(r'data-picture="(\w+)" id="[\w-]+" data-of="([\w-]+)"', text):
        found[module] = json.loads(re.search(rf'id="{name}-data">(.*?)</script>', text, re.S)[1])
    return found


def test_the_page_of_a_run_is_that_of_its_trace(told, capsys):
    folder, _ = told
    text = (folder / "run.html").read_text(encoding="utf-8")
    assert main(["report", str(folder / "trace")]) == 0
    assert (folder / "trace" / "report.html").read_text(encoding="utf-8") == text
    assert "report.html" in capsys.readouterr().out


def test_pictures_show_the_run_and_prompts_stay_text(told):
    folder, result = told
    text = (folder / "run.html").read_text(encoding="utf-8")
    data = data_of(text)
    assert set(data) == {"token_text", "token_flow", "rank_timeline"} and data["token_text"] == data["token_flow"]
    assert [prompt["text"] for prompt in data["token_flow"]["prompts"]] == list(PROMPTS)
    assert [prompt["length"] for prompt in data["token_flow"]["prompts"]] == [
        len(prompt["prompt_tokens"]) for prompt in result["prompts"]
    ]
    assert "<img" not in text and "onerror" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"""(src|href)\s*=\s*["']|https?://|url\(|@import""", text)
    assert len(text) <= 3e6


def test_tables_hold_the_figures_of_the_run(told):
    folder, result = told
    text = (folder / "run.html").read_text(encoding="utf-8")
    routes = Trace.load(folder / "trace").columns["owner_rank"].bincount(minlength=4).tolist()
    for rank, numbers in enumerate(result["ranks"]):
        row = next(row for row in re.findall(r"<tr>(.*?)</tr>", text) if row.startswith(f"<td>{rank}</td><td>64</td>"))
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
        assert cells[4] == f"{routes[rank]:,}" and cells[-2:] == [
            f"{numbers['rows_sent']:,}",
            f"{numbers['rows_received']:,}",
        ]
    for line in result["moved"]:
        assert f"<td>{line['payload']:,}</td><td>{line['bound']:,}</td><td>{line['ratio']:.3f}</td>" in text
    assert "<b>not checked</b>" in text
    failed = report(Trace.load(folder / "trace"), result | {"verdict": "different", "failures": ["prompt 0: <b>"]})
    assert '<p class="verdict different"><b>different</b>' in failed and "prompt 0: &lt;b&gt;" in failed


def test_a_page_of_two_runs_is_refused(told):
    folder, result = told
    trace = Trace.load(folder / "trace")
    other = json.loads(json.dumps(result))
    other["prompts"][1]["tokens"][0] += 1
    with pytest.raises(TraceError, match="trace and figures are of different runs: new_tokens is"):
        report(trace, other)
    with pytest.raises(TraceError, match="world_size is 4 and 3"):
        report(trace, result | {"world_size": 3})


def test_a_folder_without_the_figures_is_refused(told, tmp_path, capsys):
    folder, _ = told
    for path in (folder / "trace").iterdir():
        if path.name not in ("run.json", "report.html"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(TraceError, match="run.json: the figures of the run cannot be read .* record the run again"):
        report_of(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == TraceError.exit_code
    assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / "run.json").write_bytes((folder / "trace" / "run.json").read_bytes())
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "page.html")]) == TraceError.exit_code
    assert "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="folder: cannot be written"):
        write_report("text", tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    write_report("text", tmp_path / "page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "page.html"}


def test_a_report_without_experts_or_folder_is_refused_before_a_rank_starts(tmp_path, capsys):
    page = str(tmp_path / "run.html")
    assert main(["run", "-tp", "2", "--report", page]) == 2
    assert "--report needs expert parallelism" in capsys.readouterr().err
    assert main(["run", "--report", str(tmp_path / "no" / "run.html")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["run", "--world-size=2", "--nnodes=2", "--master-addr=127.0.0.1", "--report", page]) == 2
    assert "--report needs --trace DIR here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
