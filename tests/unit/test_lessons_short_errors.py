"""What a cell shows of an error: of the package's own the message and your lines; of every other all there is."""

import queue

import pytest
from jupyter_client.manager import start_new_kernel

from moe_course.lessons.short_errors import your_lines

ASKED = "from moe_course.lessons import start\nstart()\nfrom moe_course.expert_map import make_placement"
YOURS = "def f(ranks):\n    return make_placement(ranks, 4)\n"


@pytest.fixture(scope="module")
def run():
    """`run(source)`: the error of a cell, as sent to the page: its lines, without colours."""
    manager, client = start_new_kernel()

    def cell(source: str) -> list[str]:
        shown = []

        def keep(message):
            if message["msg_type"] == "error":
                shown.extend(message["content"]["traceback"])

        client.execute_interactive(source, output_hook=keep, timeout=60)
        return shown

    assert cell(ASKED) == []
    yield cell
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_an_error_of_the_package_stands_below_your_own_lines(run):
    *steps, message = run(YOURS + "f(8)")
    assert [step.split(", ", 1)[1] for step in steps] == ["line 3: f(8)", "line 2: return make_placement(ranks, 4)"]
    assert all(step.startswith("Cell In[") for step in steps)
    assert message.startswith("ConfigError: ") and "\n" not in message


def test_a_long_message_is_folded_between_words(run):
    said = " ".join(f"word-{i}" for i in range(40))
    _, *message = run(f"from moe_course.errors import ConfigError\nraise ConfigError({said!r})")
    assert len(message) == 1, "one entry of the traceback for each line of the message"
    assert max(map(len, message[0].splitlines())) <= 100
    assert message[0].replace("\n", " ") == f"ConfigError: {said}"


def test_the_whole_way_is_there_for_who_asks(run):
    short = run(YOURS + "f(8)")
    whole = "\n".join(run("%tb"))
    assert "expert_map.py" in whole and "expert_map.py" not in "\n".join(short)


def test_other_errors_keep_their_traceback(run):
    shown = "\n".join(run("def f():\n    return {}['x']\nf()"))
    assert "Traceback (most recent call last)" in shown and "KeyError" in shown


def test_a_file_of_yours_counts_as_yours(tmp_path):
    """Stages kept in `my_moe` are files, and so is a script."""
    mine = tmp_path / "dispatch.py"
    mine.write_text("def dispatch(queue):\n    return queue.get_nowait()\n")
    names: dict = {}
    exec(compile(mine.read_text(), str(mine), "exec"), names)
    with pytest.raises(queue.Empty) as found:
        names["dispatch"](queue.Queue())
    steps = [(step.filename, step.lineno) for step in your_lines(found.value.__traceback__)]
    assert steps[1:] == [(str(mine), 2)], "Python's queue.py is left out"


def test_without_a_notebook_nothing_happens():
    from moe_course.lessons.short_errors import shorten_errors

    assert shorten_errors() is None
