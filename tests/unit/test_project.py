"""The three lists of dependencies say the same, and the Makefile has every target the texts name."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [Requirement(r) for r in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]]
FIXED_BY_USER = {"jupyterlab", "torch", "matplotlib", "ipywidgets", "pytest", "nbval"}


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {pin.name.lower(): Version(str(pin.specifier).removeprefix("==")) for pin in pins}


def conda() -> dict[str, str]:
    entries = re.findall(r"^  - ([a-z-]+)(.*)$", (ROOT / "environment.yml").read_text(), re.M)
    return {name.replace("pytorch", "torch"): spec.strip() for name, spec in entries}


@pytest.mark.parametrize("requirement", WANTED, ids=str)
def test_the_tested_version_is_in_the_promised_range(requirement):
    assert requirement.specifier.contains(constraints()[requirement.name.lower()])


def test_torch_is_pinned_to_the_tested_release():
    assert str(constraints()["torch"]) == "2.13.0"


def test_conda_lists_what_pip_lists():
    """transformers, playwright and ruff come with `pip: -e .[test]`: conda-forge may lag behind the range."""
    names = {r.name for r in WANTED} - {"transformers", "ruff", "playwright"}
    assert names <= conda().keys() and conda().keys() >= FIXED_BY_USER
    for requirement in WANTED:
        if spec := conda().get(requirement.name):
            assert spec == str(requirement.specifier), requirement


def test_conda_uses_living_channels():
    text = (ROOT / "environment.yml").read_text()
    channels = re.search(r"channels:\n((?:  - .*\n)+)", text)[1]
    assert "conda-forge" in channels and "  - pytorch\n" not in channels and "cpuonly" not in text
    assert "-e .[test]" in text


def test_every_make_target_named_in_the_texts_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(
            re.findall(
                r"\bmake ([a-z]+)\b(?= |`|$|\n)",
                "\n".join(re.findall(r"`[^`]+`|```.*?```", (ROOT / name).read_text(), re.S)),
            )
        )
        assert named <= targets, (name, named - targets)
    assert {"setup", "run", "test", "lab", "notebooks", "lint", "clean"} <= targets


def test_the_project_speaks_of_itself_alone():
    """No path of one machine in what others will read."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("moe_course/**/*.py"), *ROOT.glob("notebooks/*.ipynb")]:
        assert not re.search(r"(?<![\w.~])/(home|root|work|tmp)/\w", path.read_text()), path


def test_every_test_file_is_collected_and_in_the_repository(request):
    """Neither pytest nor git may leave out a folder because of its name, as both do with `dist`."""
    tests, patterns = ROOT / "tests", request.config.getini("norecursedirs")
    files = [path for path in tests.rglob("test_*.py") if "__pycache__" not in path.parts]
    folders = {parent.name for path in files for parent in path.relative_to(tests).parents if parent.name}
    assert {"unit", "comm", "dist", "glm", "run", "notebooks"} <= folders
    assert not [name for name in folders for pattern in patterns if fnmatch(name, pattern)]
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *map(str, files)]
        assert not subprocess.run(command, capture_output=True, text=True).stdout
