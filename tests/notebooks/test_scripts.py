"""A notebook as a script: it runs to its end in plain Python and prints what the notebook stores."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebook_file import NOTEBOOKS

from moe_course.lessons import notebooks as runner
from moe_course.lessons.folder import FOLDER_ENV
from moe_course.lessons.script import to_script

FILES = sorted(NOTEBOOKS.glob("*.ipynb"))
WHOLE = [file for file in FILES if "run_live" not in file.read_text(encoding="utf-8")]  # those without processes


def stored_text(notebook) -> str:
    """Everything that its cells print, show as text, or raise."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            error = f"{output.get('ename')}: {output.get('evalue')}\n"
            shown = output.get("data", {}).get("text/plain", "") + "\n"
            found.append({"stream": output.get("text"), "error": error}.get(output.output_type, shown))
    return "".join(found)


def run(text: str, folder) -> subprocess.CompletedProcess:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    environment = os.environ | {FOLDER_ENV: str(folder / "my_moe"), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, path]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_a_notebook_runs_as_a_script_and_prints_what_it_stores(file, tmp_path, capsys):
    assert runner.main([str(file), "--script"]) == 0
    done = run(capsys.readouterr().out, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == stored_text(nbformat.read(file, as_version=4))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_notebook_becomes_a_script(file):
    script = to_script(nbformat.read(file, as_version=4))
    ast.parse(script)
    assert "get_ipython" not in script


FAILING = '''text = """
 a
b"""  # a string keeps its lines
def fails():
    raise ValueError(f"""{text}
  end""")

fails()'''


def test_ends_and_errors_of_cells_are_printed(tmp_path):
    cells = [
        new_markdown_cell("# Title\n\nText"),
        new_code_cell("class Shown:\n    def __repr__(self): return 'grüß'\nShown()  # a picture"),
        new_code_cell("x = 1; (x +\n 1)\n# the end"),
        new_code_cell("print('printed')"),
        new_code_cell(FAILING, metadata={"tags": ["raises-exception"]}),
        new_code_cell("y = 3  # nothing to show"),
        new_code_cell("# only a comment"),
    ]
    script = to_script(new_notebook(cells=cells))
    assert "# Title\n#\n# Text\n" in script
    done = run(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "grüß\n2\nprinted\nValueError: \n a\nb\n  end\n"


def test_an_error_that_is_not_meant_ends_the_script(tmp_path):
    done = run(to_script(new_notebook(cells=[new_code_cell("1 / 0"), new_code_cell("print(2)")])), tmp_path)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and done.stdout == ""


def test_one_notebook_becomes_one_script(capsys):
    for arguments in ([*map(str, FILES[:2]), "--script"], [str(FILES[0]), "--script", "--check"]):
        with pytest.raises(SystemExit):
            runner.main(arguments)
        assert "--script takes one notebook and no other option" in capsys.readouterr().err
