"""What the build needs from outside: reveal.js through npm, and chromium. Says what is missing and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from moe_course.lessons.slides.errors import SlidesError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Chromium as root, without a GPU, and without asking anybody for updates.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def reveal(folder: Path) -> Path:
    """The folder of reveal.js, fetched into `folder`/node_modules as package-lock.json says, if it is not there."""
    found, wanted = folder / "node_modules" / ".package-lock.json", folder / "package-lock.json"
    if not wanted.exists():
        raise SlidesError(f"no {wanted}: decks are built in a copy of the repository, with `make slides`")
    if not found.exists() or found.stat().st_mtime < wanted.stat().st_mtime:
        npm = shutil.which("npm")
        if npm is None:
            raise SlidesError(
                "npm is missing, and it fetches reveal.js. Debian, Ubuntu: apt install npm; else https://nodejs.org"
            )
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SlidesError(f"`{' '.join(command[1:])}` in {folder.name}/ failed:\n{done.stderr.strip()[-1500:]}")
    return folder / "node_modules" / "reveal.js"


def chromium() -> str:
    """The browser that prints: $CHROMIUM, or the first that is installed."""
    named = os.environ.get("CHROMIUM")
    found = next(filter(None, map(shutil.which, [named] if named else _BROWSERS)), None)
    if found is None:
        wrong = f"CHROMIUM is {named!r}, which is no program" if named else "no chromium here, and it prints the PDF"
        raise SlidesError(
            f"{wrong}. Debian: apt install chromium; or name one with CHROMIUM=/path/to/chrome; or give --no-pdf"
        )
    return found


def playwright():
    """playwright's `sync_playwright`, which drives chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SlidesError(
            "the Python package playwright is missing, and it drives chromium. `make setup` installs it; "
            "or give --no-pdf"
        ) from None
    return sync_playwright
