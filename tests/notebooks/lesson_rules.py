"""What a lesson has to have, from its title to its questions; rules about exercises are in `exercise_rules`.

Each is a function from a notebook to a list of violations, like those of `notebook_rules`.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from difflib import SequenceMatcher
from functools import cache

from notebook_file import NOTEBOOKS, Notebook

PACKAGE = NOTEBOOKS.parent / "moe_course"
#: What the lessons build. A function of a notebook may not bear the name of one of these without saying that it is
#: another one.
BUILT = (
    *("config", "router", "experts", "parallel", "expert_map", "dispatch", "combine", "layer", "layout"),
    *("glm/checkpoint", "glm/model", "comm/sim", "backends/*", "quant/*", "cost/bounds"),
)
OTHERS_NAMES = ("naive_", "my_")
COPIED, COPIED_LINES = 0.7, 4  # that part of its lines, and at least so many, make a copy
PICTURES = r"^(token_flow|rank_timeline|score_grid)\("
QUESTIONS = 3


def anatomy(notebook: Notebook) -> list[str]:
    """Title with the file's number, time, goals, `start()` first, the ribbon, a guess, `show`, what is next."""
    code = [cell["source"] for cell in notebook.code]
    opening = "\n".join(cell["source"] for cell in notebook.cells[:2])
    heads = ("You will be able to", "You need", "vLLM reads along")
    found = [f"the first two cells lack {head!r}" for head in heads if head not in opening]
    if not re.search(r"\*Read \d+ min, do \d+ min\.\*", opening):
        found.append("the first two cells do not say `*Read 15 min, do 25 min.*`")
    if not notebook.cells[0]["source"].startswith(f"# {notebook.name[:2]} · "):
        found.append(f"the title does not start with {notebook.name[:2]}")
    if not code[0].endswith("\nstart()"):
        found.append("the first code cell is not start()")
    if not re.search(r"^ribbon\(", code[1], re.MULTILINE):
        found.append("the second code cell is not the ribbon")
    for wanted in (r"^guess = None\b", r"\breport\(guess\b", r"^show\("):
        if not any(re.search(wanted, source, re.MULTILINE) for source in code):
            found.append(f"no cell has {wanted}")
    if "**Next:**" not in notebook.cells[-1]["source"]:
        found.append("the last cell does not say what is next")
    return found


def guess_is_tagged(notebook: Notebook) -> list[str]:
    """The cells that wait for a guess, and no others, are tagged `predict`."""
    waiting = [cell["id"] for cell in notebook.code if re.match(r"guess\w* = None\b", cell["source"])]
    tagged = [cell["id"] for cell in notebook.tagged("predict")]
    return [] if waiting == tagged else [f"cells {waiting} wait for a guess, {tagged} are tagged predict"]


def has_a_live_picture(notebook: Notebook) -> list[str]:
    """A picture that moves, and one thing to look at."""
    found = []
    if not any(re.search(PICTURES, cell["source"], re.MULTILINE) for cell in notebook.code):
        found.append("no cell shows a live picture")
    if not any(re.search(r"(?i)one thing to look at|look at one thing", cell["source"]) for cell in notebook.prose):
        found.append("no cell names one thing to look at")
    return found


def breaks_it(notebook: Notebook) -> list[str]:
    """Text that says so, and code behind it."""
    pairs = zip(notebook.cells, notebook.cells[1:], strict=False)
    broken = any(
        re.search(r"(?i)\bbreak it\b", cell["source"])
        for cell, then in pairs
        if (cell["cell_type"], then["cell_type"]) == ("markdown", "code")
    )
    return [] if broken else ["nothing is broken: no text says `Break it` with a code cell behind it"]


def ends_with_contract_and_questions(notebook: Notebook) -> list[str]:
    """In the last three cells: what goes in and out, what is simplified, what vLLM adds, three folded answers."""
    end = "\n".join(cell["source"] for cell in notebook.cells[-3:])
    wanted = {
        "the layout contract (`in → out`)": r"(?is)(contract|layout|in → out).{0,200}(→|out:)",
        "`simplified`": r"(?i)\bsimplified\b",
        "what vLLM adds": r"(?i)\bvLLM adds\b",
    }
    found = [f"the last three cells lack {what}" for what, pattern in wanted.items() if not re.search(pattern, end)]
    questions = re.findall(r"<details><summary>[^<]*(?:<code>[^<]*</code>[^<]*)*\?</summary>\s*(?!</details>)\S", end)
    if len(questions) < QUESTIONS:
        found.append(f"the last three cells have {len(questions)} quick questions with an answer, wanted {QUESTIONS}")
    return found


def names_in_prose_exist(notebook: Notebook) -> list[str]:
    """Every `moe_course.…` in backquotes can be imported."""
    found = []
    for cell in notebook.prose:
        for name in re.findall(r"`(moe_course(?:\.\w+)+)`", cell["source"]):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                found.append(f"{cell['id']}: no {name}")
    return found


def nothing_is_retyped(notebook: Notebook) -> list[str]:
    """A function of the package is shown, not copied; another one of the same name is called `naive_…` or `my_…`."""
    found = []
    for cell in notebook.code:
        if "stub" in cell["metadata"].get("tags", []):
            continue
        try:
            tree = ast.parse(cell["source"])
        except SyntaxError as error:
            found.append(f"{cell['id']}: not Python, line {error.lineno}")
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in built():
                cure = f"call it {' or '.join(f'{start}{node.name}' for start in OTHERS_NAMES)}, or import it"
                found.append(f"{cell['id']}: {node.name} is the name of moe_course.{built()[node.name]}'s; {cure}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (original := copied_from(node)):
                found.append(f"{cell['id']}: {node.name} repeats {original}; import it, and print it with show")
    return found


@cache
def package_modules() -> dict[str, ast.Module]:
    """Name -> parsed text of what lessons build."""
    paths = sorted(path for pattern in BUILT for path in PACKAGE.glob(f"{pattern}.py"))
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
    }


@cache
def built() -> dict[str, str]:
    """Public functions and classes of these modules, with the module of each."""
    return {
        node.name: module
        for module, tree in package_modules().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }


@cache
def package_functions() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(name with module, lines) of all functions of these modules that are long enough to be copied."""
    functions = [
        (f"moe_course.{module}.{node.name}", lines_of(node))
        for module, tree in package_modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    return tuple((name, lines) for name, lines in functions if len(lines) >= COPIED_LINES)


def lines_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Its body as lines of one style, without docstring and comments."""
    body = function.body[ast.get_docstring(function) is not None :]
    return tuple(line.strip() for node in body for line in ast.unparse(node).splitlines())


def copied_from(function: ast.FunctionDef) -> str | None:
    """The package's function that has most of these lines in this order."""
    lines = lines_of(function)
    if len(lines) < COPIED_LINES:
        return None
    for name, theirs in package_functions():
        if not set(lines) & set(theirs):
            continue
        same = sum(block.size for block in SequenceMatcher(None, lines, theirs, autojunk=False).get_matching_blocks())
        if same >= COPIED * max(len(lines), len(theirs)):
            return name
    return None
