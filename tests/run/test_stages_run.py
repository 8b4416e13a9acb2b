"""`moe-course run --stages`: your own stages in real processes, named when they are wrong, fail or hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from own_stage_texts import ALL, GATHERED

SMALL = ("--world-size=2", "--max-new-tokens=3", "--prompt=def add(", "--device=cpu")


@pytest.fixture
def my_moe(tmp_path):
    """`my_moe(texts)` writes the files of a folder; returns it."""

    def write(texts: dict[str, str], name: str = "my_moe") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for stage, text in texts.items():
            (folder / f"{stage}.py").write_text(text)
        return folder

    return write


def test_all_five_stages_of_your_own_give_the_text_of_one_process(warm, my_moe):
    folder = my_moe(ALL)
    ended = warm.run(*SMALL, f"--stages={folder}", "--check")
    assert ended.returncode == 0, ended.stderr
    assert ended.result["verdict"] == "equal" and ended.result["bound"]["ratio"] == 1.0
    assert ended.result["stages"] == {name: str(folder / f"{name}.py") for name in ALL}
    assert "stages   yours: route (" in ended.stdout and not warm.wait_until_gone()


def test_a_wrong_stage_is_named_with_its_file(warm, my_moe):
    folder = my_moe({"dispatch": GATHERED.replace("here & (ids >= 0)", "(comm.rank == 1) | here")})
    ended = warm.run(*SMALL, f"--stages={folder}", "--check")
    assert ended.returncode == 3, ended.stderr
    (line,) = ended.error_lines
    assert line.startswith(
        f"error: rank 1: your dispatch ({folder}/dispatch.py) differs from the package's in layer 1, "
    )
    assert "topk_ids[" in line and ended.result["verdict"] == "failed" and "your dispatch" in ended.result["error"]
    assert not warm.wait_until_gone()


def test_a_stage_that_raises_is_named_with_its_line(warm, my_moe):
    talks = "    print('.', end='')  # the next event starts on this line\n"
    text = GATHERED.replace("    weights, ids", f"{talks}    assert comm.rank == 0, 'not me'\n    weights, ids")
    folder = my_moe({"dispatch": text})
    ended = warm.run(*SMALL, f"--stages={folder}")
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.error_lines
    says = f"error: rank 1: your dispatch ({folder}/dispatch.py, line 8) raised AssertionError: not me; repair it"
    assert line.startswith(says) and not warm.wait_until_gone()


def test_a_dispatch_that_leaves_out_an_exchange_is_named(warm, my_moe):
    idle = (
        "    if len(hidden_states) == 0:\n        empty = [0] * comm.world_size\n"
        "        return Dispatched(hidden_states, None, topk_ids, topk_weights, None, 'rows', empty)\n    gathered"
    )
    folder = my_moe({"dispatch": GATHERED.replace("    gathered", idle, 1)})
    ended = warm.run(*SMALL, f"--stages={folder}")
    assert ended.returncode == 4, ended.stderr
    (line,) = ended.error_lines
    assert f"your dispatch ({folder}/dispatch.py" in line and "the same exchanges on all ranks: all_gather_rows" in line
    assert not warm.wait_until_gone()


def test_a_stage_that_hangs_is_named_with_its_line(warm, my_moe):
    folder = my_moe(
        {"dispatch": GATHERED.replace("    gathered", "    while comm.rank == 1:\n        pass\n    gathered")}
    )
    ended = warm.run(*SMALL, f"--stages={folder}", "--timeout=3", "--warn-after=1")
    assert ended.returncode == 5, ended.stderr
    assert "rank 1 is still computing, layer 1, step -1" in ended.stderr
    assert f"at {folder}/dispatch.py:" in ended.stderr and " in dispatch" in ended.stderr
    assert not warm.wait_until_gone()


def test_a_stage_that_hangs_on_every_rank_is_named_with_its_line(warm, my_moe):
    """Nobody waits for anybody then; and it does not help to catch every Exception."""
    catches = "        try:\n            sum(range(99))\n        except Exception:\n            pass\n"
    loop = f"    while True:\n{catches}    gathered"
    folder = my_moe({"dispatch": GATHERED.replace("    gathered", loop, 1)})
    ended = warm.run(*SMALL, f"--stages={folder}", "--timeout=3", "--warn-after=1")
    assert ended.returncode == 1, ended.stderr
    assert f"rank 0: your dispatch ({folder}/dispatch.py, line " in ended.stderr
    assert "has not come back for 3 s (--timeout), and no rank waits for another" in ended.stderr
    assert ended.stderr.count("has not come back") == 1
    assert not warm.wait_until_gone()


def test_ranks_with_other_files_end_before_a_row_moves(warm, my_moe):
    mine, other = my_moe({"dispatch": GATHERED}), my_moe({"dispatch": GATHERED + "\n# newer\n"}, "other")
    ended = warm.run(*SMALL, f"--stages={mine}", f"--override=1:stages={json.dumps(str(other))}")
    assert ended.returncode == 4, ended.stderr
    assert "handshake: stages.dispatch differs: rank 1 has " in ended.stderr and not warm.wait_until_gone()


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"dispatch": "def dispatch(:\n"}, "dispatch.py, line 1: invalid syntax; repair the file or remove it"),
        (
            {"helper": ""},
            "has no stage in it, only helper.py; a stage is a file of one of the names route, expert_map, dispatch",
        ),
    ],
    ids=["syntax", "empty"],
)
def test_files_that_do_not_load_are_refused_before_anything_starts(my_moe, texts, says, capsys):
    from moe_course.cli import main

    assert main(["run", *SMALL, f"--stages={my_moe(texts)}"]) == 2
    assert says in capsys.readouterr().err
