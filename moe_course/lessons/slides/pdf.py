"""A deck as PDF, printed by chromium; the same deck gives the same file, and the file says which deck it was."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from moe_course.lessons.slides import tools
from moe_course.lessons.slides.deck import Deck

_DATE = re.compile(rb"(/(?:CreationDate|ModDate) \(D:)[^)]*\)")
_MARK = b"%moe_course deck "


def digest(deck: Deck, folder: Path) -> str:
    """What the PDF depends on: texts with their numbers, recorded runs, style. Sixteen hexadecimal digits."""
    parts = [repr(deck), *((folder / "data" / f"{name}.json").read_text() for name in deck.runs)]
    parts += [(folder / name).read_text() for name in ("style.css", "deck.js", "package-lock.json")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def digest_of(pdf: Path) -> str:
    """The digest of the deck that `pdf` was printed from; empty if it does not say."""
    return pdf.read_bytes().rpartition(_MARK)[2].strip().decode(errors="replace")


def write(page: Path, pdf: Path, mark: str) -> None:
    """Print the HTML file `page`, one slide a sheet, all fragments shown, into `pdf`, which ends with `mark`."""
    with tools.playwright()() as started:
        browser = started.chromium.launch(executable_path=tools.chromium(), args=tools.CHROMIUM_FLAGS)
        try:
            tab = browser.new_page(viewport={"width": 1280, "height": 720})
            tab.goto(f"{page.resolve().as_uri()}?print-pdf")
            tab.wait_for_selector("html[data-ready]", state="attached")
            printed = tab.pdf(prefer_css_page_size=True, print_background=True)
        finally:
            browser.close()
    pdf.write_bytes(_undated(printed) + _MARK + mark.encode() + b"\n")


def _undated(printed: bytes) -> bytes:
    """Dates of the same length, so that the offsets in the file stay right."""
    return _DATE.sub(lambda match: match[1] + b"0" * (len(match[0]) - len(match[1]) - 1) + b")", printed)
