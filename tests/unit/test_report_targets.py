"""Where a command may write, and how: nothing is lost, whatever stands there."""

from __future__ import annotations

import os
import stat

import pytest

from moe_course import options, targets
from moe_course.cli import main
from moe_course.config import MoEConfig
from moe_course.errors import ConfigError
from moe_course.options import TINY, RunOptions
from moe_course.targets import write_text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "meta.json").write_text("old")
    (tmp_path / "to_meta").symlink_to(tmp_path / "trace" / "meta.json")
    (tmp_path / "to_page").symlink_to(tmp_path / "page.html")
    (tmp_path / "here").symlink_to(tmp_path)
    return tmp_path


REFUSED = {
    "a folder": ({"report": ""}, "--report FOLDER: is a folder; name a file in it"),
    "the folder of the trace": ({"report": "trace"}, "--report FOLDER/trace: is a folder"),
    "a folder for figures": ({"json_file": "trace"}, "--json FOLDER/trace: is a folder"),
    "what describes the trace": ({"report": "trace/meta.json"}, "--report .*: is a file of the trace itself"),
    "the figures in it": ({"report": "trace/run.json"}, "is a file of the trace itself"),
    "a rank of it": ({"json_file": "trace/rank0000.safetensors"}, "--json .*: is a file of the trace itself"),
    "its routes": ({"report": "trace/../trace/routes.jsonl"}, "is a file of the trace itself"),
    "a link to one of them": ({"report": "to_meta"}, "is a file of the trace itself"),
    "one file twice": ({"report": "a", "json_file": "a"}, "--json and --report are both .*/a: one would replace"),
    "one file by two names": ({"report": "a", "json_file": "here/a"}, "--json and --report are both"),
    "one file by a link": ({"report": "to_page", "json_file": "page.html"}, "--json and --report are both"),
    "a trace to be": ({"report": "new", "trace": "new"}, "--report .*/new: is the folder of the trace"),
    "no folder": ({"report": "no/page"}, "--report .*: folder .*no does not exist"),
    "below a file": ({"report": "trace/meta.json/page"}, "--report .*: cannot write there"),
    "a trace in a file": ({"trace": "trace/meta.json"}, "--trace .*: is a file; name a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_would_lose_something_are_refused_before_anything_starts(case, folder):
    named, says = REFUSED[case]
    named = {option: folder / path if path else folder for option, path in ({"trace": "trace"} | named).items()}
    with pytest.raises(ConfigError, match=says.replace("FOLDER", str(folder))):
        RunOptions(**named).check_against(MoEConfig.from_pretrained(TINY), [1])


def test_other_targets_are_allowed(folder):
    device = folder / "device"
    os.mkfifo(device)
    allowed = [{"report": path} for path in ("page.html", "trace/report.html", "to_page", "meta.json")]
    for named in (*allowed, {"report": "device", "json_file": "device"}):
        named = {"trace": folder / "trace"} | {option: folder / path for option, path in named.items()}
        RunOptions(**named).check_against(MoEConfig.from_pretrained(TINY), [1])
    assert not hasattr(options, "write_text")  # checking writes nothing
    assert {path.name for path in folder.iterdir()} == {"trace", "to_meta", "to_page", "here", "device"}


@pytest.mark.parametrize(("out", "says"), [("", "is a folder"), ("trace", "is a folder"), ("no/x", "does not exist"),
                                           ("trace/meta.json", "is a file of the trace itself")])  # fmt: skip
def test_a_page_is_refused_its_place_in_one_line(folder, monkeypatch, capsys, out, says):
    monkeypatch.chdir(folder)
    assert main(["report", "trace", "--out", out]) == ConfigError.exit_code
    told = capsys.readouterr()
    assert told.err.startswith(f"error: --out {out or '.'}: ") and says in told.err and told.err.count("\n") == 1
    assert "open it" not in told.out and (folder / "trace" / "meta.json").read_text() == "old"


def test_a_link_stays_a_link_and_a_device_is_written_to(folder):
    write_text(folder / "to_page", "new")
    assert (folder / "to_page").is_symlink() and (folder / "page.html").read_text() == "new"
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 99) == b"through" and stat.S_ISFIFO(pipe.lstat().st_mode)
    os.close(reader)
    assert not list(folder.glob(".*.tmp"))


def test_what_cannot_be_written_leaves_what_was_there(folder, monkeypatch):
    for path in (folder / "trace", folder / ("x" * 256), folder / "no" / "x", folder / "nul\0"):
        with pytest.raises(ConfigError, match="cannot be written: .*; name another file"):
            write_text(path, "text")
    page = folder / "page.html"
    page.write_text("old")
    monkeypatch.setattr(targets.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ConfigError, match="page.html cannot be written: No space left; name another file"):
        write_text(page, "new")
    assert page.read_text() == "old" and not list(folder.glob(".*.tmp"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_full_device_is_named_and_stays_a_device(folder):
    (folder / "full").symlink_to("/dev/full")  # a mistake would replace the link, not the machine's device
    with pytest.raises(ConfigError, match="full cannot be written: No space left on device"):
        write_text(folder / "full", "text")
    assert (folder / "full").is_symlink()


def test_half_a_surrogate_pair_is_spelt_out(folder):
    write_text(folder / "page.html", "a\ud800b")
    assert (folder / "page.html").read_text() == "a\\ud800b"
