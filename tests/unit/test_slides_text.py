"""Decks say what their notebooks say: title and every measured number; every slide has notes and minutes."""

from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

from moe_course.lessons.slides import deck, numbers, page, pdf, record, tools
from moe_course.lessons.slides.errors import SlidesError

ROOT = Path(__file__).parents[2]
SLIDES, NOTEBOOKS = ROOT / "slides", ROOT / "notebooks"
DECKS = sorted(SLIDES.glob("[0-9]*.md"))
#: Numbers that name something, and are not measured: a model, an exercise.
NAMES = r"GLM-5\.1|Exercise \d+\.\d|bf16|fp32|fp8|int8"
#: What must come from an output: three digits, a decimal point, per cent, a multiple.
LOOKS_MEASURED = r"(?<![\w.])(?:\d[\d,]{2,}(?:\.\d+)?|\d+\.\d+|\d+ ?%|\d+ ?×)"

DECK = """---
notebook: 03_made_up
---

# 03 · Made up: a title

Note: 2 min. Say hello.

---

# Rank 1 sends [82](nb:03 "rank 1: #") rows

A sum of [1,312](nb:03 "sum: #").

Note: 3 min.
Say more.
"""


def by_name(path):
    return path.stem


@pytest.fixture
def made_up(tmp_path):
    """`made_up(deck, outputs)`: read a deck beside a notebook 03 with these outputs."""

    def read(text=DECK, outputs=("rank 1: 82\n", "sum: 1312\n"), title="# 03 · Made up: a title\n\nMore."):
        cells = [{"cell_type": "markdown", "source": [title]}]
        cells += [{"cell_type": "code", "outputs": [{"output_type": "stream", "text": [text]}]} for text in outputs]
        numbers._outputs.cache_clear()
        (tmp_path / "03_made_up.ipynb").write_text(json.dumps({"cells": cells}))
        (tmp_path / "03_made_up.md").write_text(text)
        return deck.read(tmp_path / "03_made_up.md", tmp_path)

    yield read
    numbers._outputs.cache_clear()


def test_there_are_decks():
    assert {"00_overview", "07_dispatch"} <= {path.stem for path in DECKS}


@pytest.mark.parametrize("path", DECKS, ids=by_name)
def test_title_and_numbers_are_those_of_the_notebook(path):
    read = deck.read(path, NOTEBOOKS)
    assert 5 <= len(read.slides) <= 9
    assert any(slide.sources for slide in read.slides)


@pytest.mark.parametrize("path", DECKS, ids=by_name)
def test_a_number_that_looks_measured_says_where_it_comes_from(path):
    for slide in deck.read(path, NOTEBOOKS).slides:
        plain = re.sub(r'<span class="measured".*?</span>|<[^>]+>', "", slide.body)
        assert not re.findall(LOOKS_MEASURED, re.sub(NAMES, "", unescape(plain))), slide.title


@pytest.mark.parametrize("path", DECKS, ids=by_name)
def test_titles_are_sentences_and_slides_short(path):
    for slide in deck.read(path, NOTEBOOKS).slides:
        words = re.sub(r"<[^>]+>", " ", slide.body).split()
        assert len(slide.title.split()) >= 4, slide.title
        assert len(words) <= 110, (slide.title, len(words))
        assert 1 <= slide.minutes <= 10


@pytest.mark.parametrize("path", DECKS, ids=by_name)
def test_the_pdf_was_printed_from_this_deck(path):
    printed = path.with_suffix(".pdf")
    wanted = pdf.digest(deck.read(path, NOTEBOOKS), SLIDES)
    assert pdf.digest_of(printed) == wanted, f"{printed.name} is of an older deck: `make slides` prints it anew"
    assert printed.stat().st_size <= 1_000_000


def test_runs_in_decks_are_recorded_and_small():
    for path in (SLIDES / "data").glob("*.json"):
        data = json.loads(path.read_text())
        assert data["schema"] == "moe_course.flow/1" and data["made_by"].startswith("moe-course run ")
        assert path.stat().st_size <= record.MOST_BYTES


def test_a_deck_that_agrees_is_read(made_up):
    read = made_up()
    assert [slide.title for slide in read.slides] == ["03 · Made up: a title", "Rank 1 sends 82 rows"]
    assert read.minutes == 5
    assert '<span class="measured" data-notebook="03">1,312</span>' in read.slides[1].body


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ("rank 1: 83\n", "sum: 1312\n")}, "slide 2: shows '82', but notebook 03 has 83"),
        ({"outputs": ("rank 1: 82\n", "sum: 1313\n")}, "slide 2: shows '1,312', but notebook 03 has 1313"),
        ({"outputs": ("rank one: 82\n", "sum: 1312\n")}, "slide 2: no stored output of notebook 03 has 'rank 1: #'"),
        ({"outputs": ("rank 1: 82\nrank 1: 8\n", "sum: 1312\n")}, "is found with"),
        ({"title": "# 03 · Made up: another title"}, "its notebook '03 · Made up: another title'"),
        ({"text": DECK.replace("Note: 3 min.\n", "")}, "slide 2: has no line `Note: 3 min.`"),
        ({"text": DECK.replace("Note: 2 min. Say", "Note: Say")}, "slide 1: has no line `Note: 3 min.`"),
        ({"text": DECK.replace("Say hello.", "")}, "slide 1: has no line"),
        ({"text": DECK.replace("# Rank", "Rank")}, "slide 2: begins with 'Rank"),
        ({"text": DECK.replace("nb:03", "nb:04")}, "0 notebooks"),
        ({"text": DECK.removeprefix("---\n")}, "begins without"),
    ],
)
def test_a_deck_that_disagrees_is_refused(made_up, change, message):
    with pytest.raises(SlidesError, match=re.escape(message)):
        made_up(**change)


def test_a_text_without_number_must_occur(made_up):
    text = DECK.replace('[82](nb:03 "rank 1: #")', '[equal](nb:03 "verdict: equal")')
    assert made_up(text, outputs=("verdict: equal", "sum: 1312")).slides[1].title == "Rank 1 sends equal rows"
    with pytest.raises(SlidesError, match="verdict: equal"):
        made_up(text, outputs=("verdict: different", "sum: 1312"))


def test_an_older_pdf_is_seen(tmp_path, made_up):
    """The digest at the end of a PDF changes with any word, number or recorded run of its deck."""
    digests = {
        pdf.digest(read, SLIDES)
        for read in (
            made_up(),
            made_up(DECK.replace("Say more", "Say less")),
            made_up(DECK.replace("82", "83"), outputs=("rank 1: 83", "sum: 1312")),
        )
    }
    assert len(digests) == 3
    (tmp_path / "old.pdf").write_bytes(b"%PDF-1.4 ... %%EOF\n%moe_course deck 0123456789abcdef\n")
    assert pdf.digest_of(tmp_path / "old.pdf") == "0123456789abcdef"


def test_what_is_missing_is_named_with_its_cure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    with pytest.raises(SlidesError, match="built in a copy of the repository"):
        tools.reveal(tmp_path)
    (tmp_path / "package-lock.json").write_text("{}")
    with pytest.raises(SlidesError, match="npm is missing.*apt install npm"):
        tools.reveal(tmp_path)
    with pytest.raises(SlidesError, match="no chromium here.*apt install chromium.*--no-pdf"):
        tools.chromium()
    monkeypatch.setenv("CHROMIUM", "/nowhere/chrome")
    with pytest.raises(SlidesError, match="CHROMIUM is '/nowhere/chrome', which is no program"):
        tools.chromium()
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    with pytest.raises(SlidesError, match="playwright is missing.*make setup"):
        tools.playwright()


def test_a_run_that_was_not_recorded_is_named(tmp_path):
    with pytest.raises(SlidesError, match="data/five_ranks.json is missing.*--record"):
        page.run(tmp_path, "five_ranks")
