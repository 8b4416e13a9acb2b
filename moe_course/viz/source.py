"""The text of a picture's module and style sheet, as the browser gets it. Needs neither anywidget nor matplotlib."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def source(module: str) -> str:
    """The ES module of a picture: what all pictures share, its parts `<module>_*.js`, then its own. No imports."""
    files = [_HERE / "common.js", *sorted(_HERE.glob(f"{module}_*.js")), _HERE / f"{module}.js"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def styles(module: str) -> str:
    """The style sheet of a picture: what all share, then its own, if it has one."""
    files = [_HERE / "common.css", _HERE / f"{module}.css"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.exists())
