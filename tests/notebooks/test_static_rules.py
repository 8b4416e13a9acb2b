"""Every notebook keeps the rules of the course, and the items of the note have the places they were promised."""

from __future__ import annotations

from collections import Counter

import pytest
from note_coverage import ITEMS, NOT_WRITTEN, SECTIONS, Item
from notebook_file import NOTEBOOKS, Notebook
from notebook_rules import RULES

FILES = sorted(NOTEBOOKS.glob("*.ipynb"))


def test_there_are_notebooks():
    assert "00_start_here.ipynb" in [file.name for file in FILES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_notebook_keeps_rule(file, rule):
    assert rule(Notebook.load(file)) == []


def lacking(item: Item, notebook: Notebook) -> list[str]:
    """What of a note item its notebook does not have: the tag, or a word in the tagged cells."""
    cells = notebook.tagged(item.tag)
    if not cells:
        return [f"no cell is tagged {item.tag}"]
    text = "\n".join(cell["source"] for cell in cells)
    return [f"cell {item.tag} lacks {word!r}" for word in item.mentions if word not in text]


@pytest.mark.parametrize("item", [item for item in ITEMS if item.written], ids=lambda item: item.tag)
def test_note_item_has_its_place(item):
    assert lacking(item, Notebook.load(NOTEBOOKS / f"{item.notebook}.ipynb")) == []


def test_missing_note_items_are_noticed():
    notebook = Notebook.load(NOTEBOOKS / "00_start_here.ipynb")
    item = next(item for item in ITEMS if item.tag == "note:symbol-map")

    def forget(content):
        for cell in content["cells"]:
            if item.tag in cell["metadata"].get("tags", []):
                cell["source"] = cell["source"].replace("`expert_map`", "the map")

    def untag(content):
        for cell in content["cells"]:
            cell["metadata"].pop("tags", None)

    assert lacking(item, notebook.changed(forget)) == ["cell note:symbol-map lacks '`expert_map`'"]
    assert lacking(item, notebook.changed(untag)) == ["no cell is tagged note:symbol-map"]


def test_items_of_notebooks_that_exist_are_written():
    there = {file.stem for file in FILES}
    wrong = [item.tag for item in ITEMS if item.written != (item.notebook in there)]
    assert not wrong, f"`written` in note_coverage.py does not fit the notebooks folder: {wrong}"


def test_the_whole_note_has_places():
    assert {item.section for item in ITEMS} == set(SECTIONS)
    counts = Counter(item.section for item in ITEMS)
    assert {section: counts[section] for section, rows in SECTIONS.items() if counts[section] < rows} == {}
    places = Counter((item.notebook, item.tag) for item in ITEMS)
    assert [place for place, count in places.items() if count > 1] == []


def test_what_is_not_written_yet_is_counted():
    assert sum(not item.written for item in ITEMS) == NOT_WRITTEN
