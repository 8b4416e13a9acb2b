"""What may import what: the package stays light, stages know nothing of transports, the oracle knows only torch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_course

PACKAGE = Path(moe_course.__file__).parent
HEAVY = {"transformers", "IPython", "matplotlib", "anywidget", "ipywidgets", "typer", "rich", "safetensors"}
STAGES = ("router", "expert_map", "dispatch", "experts", "combine")
SEEN_BY_STAGES = {*STAGES, "config", "errors", "fits", "rows", "quant"}
#: What of `comm` is its contract: the group, and how rows lie in bytes and in segments of a fixed size.
CONTRACT = {"moe_course.comm.base", "moe_course.comm.packing", "moe_course.comm.padded"}
SEEN_BY_COMM = {"moe_course.errors", "moe_course.gradients"}
LAYER = (
    *STAGES,
    "config",
    "rows",
    "errors",
    "parallel",
    "stages",
    "layer",
    "backends",
    "comm.base",
    "comm.sim",
    "comm.dist",
)


def new_modules(statement: str) -> list[str]:
    """Modules that a statement loads in a fresh interpreter that already has torch."""
    program = (
        "import json, sys, torch, torch.distributed\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imported_names(file: Path) -> set[str]:
    """Full names of the modules a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            found.add(node.module)
    return found


def outside(names: set[str], allowed: set[str]) -> set[str]:
    """Names whose top-level package is neither allowed nor in the standard library."""
    return {name for name in names if name.split(".")[0] not in allowed | sys.stdlib_module_names}


def test_import_of_the_package_alone():
    assert new_modules("import moe_course") == ["moe_course"]


def test_stages_layer_and_transports_load_nothing_heavy():
    """Beyond torch only the package itself and the standard library."""
    statement = "import " + ", ".join(f"moe_course.{name}" for name in LAYER)
    names = set(new_modules(statement))
    assert not {name.split(".")[0] for name in names} & HEAVY
    assert not outside(names, {"moe_course"})
    assert not [name for name in names if name.startswith(("moe_course.glm", "moe_course.lessons", "moe_course.trace"))]


@pytest.mark.parametrize("stage", STAGES)
def test_stages_import_torch_and_each_other(stage):
    names = imported_names(PACKAGE / f"{stage}.py")
    assert not outside(names, {"torch", "moe_course"})
    ours = {name.removeprefix("moe_course.") for name in names if name.startswith("moe_course")}
    assert ours <= SEEN_BY_STAGES


def test_oracle_imports_torch_only():
    names = imported_names(PACKAGE / "lessons" / "reference.py")
    assert {name.split(".")[0] for name in names} == {"torch"}
    by_path = f"import runpy; runpy.run_path({str(PACKAGE / 'lessons' / 'reference.py')!r})"
    assert not outside(set(new_modules(by_path)), set())


def test_backends_know_transports_by_their_contract():
    """And transports know nothing of stages."""
    for file in (PACKAGE / "backends").glob("*.py"):
        assert {name for name in imported_names(file) if name.startswith("moe_course.comm")} <= CONTRACT, file.name
    for file in (PACKAGE / "comm").glob("*.py"):
        ours = {name for name in imported_names(file) if name.startswith("moe_course")}
        assert {name for name in ours if not name.startswith("moe_course.comm")} <= SEEN_BY_COMM, file.name


def test_a_forbidden_import_would_be_seen(tmp_path):
    file = tmp_path / "stage.py"
    file.write_text(
        "import torch\ndef late():\n    from transformers import AutoModel\n    import moe_course.comm.sim\n"
    )
    names = imported_names(file)
    assert outside(names, {"torch", "moe_course"}) == {"transformers"}
    assert "moe_course.comm.sim" in names
