"""`run --report` and `report DIR`: one page that holds the run and nothing it could be made to run."""

from __future__ import annotations

import copy
import html
import json
import re

from report_cases import rows_of

from moe_course.cli import main
from moe_course.launch import RunResult
from moe_course.trace import Trace, report_tables
from moe_course.viz.flow_data import printable

PROMPTS = ("def add(a, b):", "</script><img src=x onerror=alert(1)>", "größe")


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
    _, *ranks = rows_of(text, "Rank")
    assert [row[-3] for row in ranks] == [f"width:{200 * n / max(routes):.0f}px" for n in routes]
    for rank, (row, numbers) in enumerate(zip(ranks, result["ranks"], strict=True)):
        assert row[:2] == [str(rank), "64"] and row[4] == f"{routes[rank]:,}"
        assert row[-2:] == [f"{numbers['rows_sent']:,}", f"{numbers['rows_received']:,}"]
    _, *lines = rows_of(text, "The transport was given")
    for line, row in zip(result["moved"], lines, strict=True):
        amounts = [f"{line[name]:,}" for name in ("rows", "payload", "bound")]
        assert row == [str(line["layer"]), line["phase"], *amounts, f"{line['ratio']:.3f}", f"{line['padding']:,}"]
    read, new = (sum(len(prompt[name]) for prompt in result["prompts"]) for name in ("prompt_tokens", "tokens"))
    assert f"<dd>3 prompts, {read} tokens read, {new} written</dd>" in text and read != new == 9
    assert "<b>not checked</b>" in text


def test_figures_that_are_equal_in_this_run_stand_in_their_own_columns(told):
    folder, result = told[0], copy.deepcopy(told[1])
    for number, rank in enumerate(result["ranks"]):
        rank |= {"rows_sent": 1000 + number, "rows_received": 2000 + number}
    for line in result["moved"]:
        line |= {"rows": 3000, "payload": 4000, "bound": 5000, "ratio": 0.8, "padding": 6000}
    result["bytes"] = {"payload": 7000, "padding": 8000, "metadata": 9000}
    ranks = rows_of(report_tables.load(Trace.load(folder / "trace"), result), "Rank")
    assert ranks[0][-2:] == ["rows out", "rows in"]
    assert [row[-2:] for row in ranks[1:]] == [[f"1,00{rank}", f"2,00{rank}"] for rank in range(4)]
    says = "The transport was given 7,000 bytes of rows, 8,000 of padding and 9,000 of ids"
    heads, *lines = rows_of(report_tables.moved(result), says)
    assert heads[2:] == ["rows", "bytes", "bound", "counted / bound", "padding"] and len(lines) == 4
    assert all(row[2:] == ["3,000", "4,000", "5,000", "0.800", "6,000"] for row in lines)


def test_every_written_token_is_on_the_page(told):
    folder, result = told
    text = (folder / "run.html").read_text(encoding="utf-8")
    (line,) = re.findall(r'<p class="quiet">The last token .*?</p>', text)
    last = [printable(chr(prompt["tokens"][-1])) for prompt in result["prompts"]]
    named = ", ".join(f"{token} in prompt {number}" for number, token in enumerate(last))
    assert html.unescape(re.sub(r"<.*?>", "", line)).endswith(f" It is {named}.")
    shown = [each for each in data_of(text)["token_flow"]["passes"] if each["layer"] == 1]
    held = {(token["prompt"], token["position"]) for each in shown for token in each["tokens"]}
    assert len(held) + len(last) == sum(len(p["prompt_tokens"]) + len(p["tokens"]) for p in result["prompts"])


def test_a_run_says_where_its_page_is_when_it_wrote_one(tmp_path, monkeypatch, capsys):
    """A page that is there after a run without one is of an earlier run."""
    page, says = tmp_path / "run.html", {}
    page.write_text("old")
    for name, event in {"written": "report", "failed": "plan"}.items():
        ended = RunResult(1, "error: rank 0: no", None, [{"event": event}], [], 0.0)
        monkeypatch.setattr("moe_course.launch.launch", lambda *_, ended=ended, **__: ended)
        assert main(["run", "--device=cpu", f"--report={page}"]) == 1
        says[name] = capsys.readouterr().out
    assert says["written"] == f"report     {page}: open it in a browser\n"
    assert says["failed"] == f"report     {page} is of an earlier run and was left as it is: this run wrote none\n"
    page.unlink()
    assert main(["run", "--device=cpu", f"--report={page}"]) == 1 and "report  " not in capsys.readouterr().out


def test_a_report_without_experts_or_folder_is_refused_before_a_rank_starts(tmp_path, capsys):
    page = str(tmp_path / "run.html")
    assert main(["run", "-tp", "2", "--report", page]) == 2
    assert "--report needs expert parallelism" in capsys.readouterr().err
    assert main(["run", "--report", str(tmp_path / "no" / "run.html")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["run", "--world-size=2", "--nnodes=2", "--master-addr=127.0.0.1", "--report", page]) == 2
    assert "--report needs --trace DIR here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
