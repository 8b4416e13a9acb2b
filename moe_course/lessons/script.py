"""A notebook as a Python script that runs to its end in a shell, without Jupyter.

Texts become comments. What a cell ends with is printed, as a notebook shows it: a picture prints its line of text. A
cell that is meant to fail (tag `raises-exception`) prints its error, and the script goes on.
"""

from __future__ import annotations

import ast

from nbformat import NotebookNode

_DISPLAY = '''def display_text(value):
    """What a notebook shows below a cell."""
    if value is not None:
        print(value)'''
_CAUGHT = """except Exception as error:
    print(f"{type(error).__name__}: {error}")"""


def to_script(notebook: NotebookNode) -> str:
    """The text of the script. Raises SyntaxError, with the number of the cell, for one that is not Python."""
    parts = [_DISPLAY]
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            parts.append("\n".join(f"# {line}".rstrip() for line in cell.source.splitlines()))
            continue
        try:
            code = _with_result(cell.source)
        except SyntaxError as error:
            line = f", line {error.lineno}" if error.lineno else ""
            raise SyntaxError(f"cell {index}{line}: {error.msg}: it is not plain Python") from None
        parts.append(_caught(code) if "raises-exception" in cell.metadata.get("tags", []) else code)
    return "\n\n".join(parts) + "\n"


def _with_result(source: str) -> str:
    """`source` with `display_text(…)` around the expression it ends with."""
    body = ast.parse(source).body
    if not body or not isinstance(body[-1], ast.Expr):
        return source
    last, lines = body[-1], source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: last.lineno - 1])) + last.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    text = b"".join(lines)
    return (text[:start] + b"display_text(" + text[start:end] + b")" + text[end:]).decode()


def _caught(source: str) -> str:
    """`source` in a `try`; lines that begin inside a string stay, since blanks in front would change it."""
    inside = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr | ast.Constant)
        for line in range(node.lineno + 1, node.end_lineno + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return "\n".join(["try:", *(f"    {text}" if text and n not in inside else text for n, text in lines), _CAUGHT])
