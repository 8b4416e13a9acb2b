"""Ways to spoil `run.json` and `meta.json`, and what a page is made of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

HOSTILE = "</script></td>\"'><svg onload=x>"
GONE = object()
WRONG = (GONE, None, "x", -1, 1.5, 2**70, float("nan"), True, [], {}, [None])


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The place of every leaf; of a list only the first entry."""
    if isinstance(value, dict) and value:
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from leaves(value[0], (*path, 0))
    else:
        yield path


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The place of everything that is inside; of a list only the first entry."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(value: Any, path: tuple, new: Any) -> Any:
    """A copy with another value at this place, or without it."""
    value = copy.deepcopy(value)
    outer = at(value, path[:-1])
    if new is GONE:
        del outer[path[-1]]
    else:
        outer[path[-1]] = new
    return value


class Skeleton(HTMLParser):
    """Every element of a page with its attributes, in order, and the text outside of scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, *attrs))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.elements.append(("/", tag))
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def rows_of(text: str, caption: str) -> list[list[str]]:
    """Cells of the table whose caption begins like this, row by row, as text."""
    found: list[list[str]] = []

    class Reader(HTMLParser):
        here = False
        cell: list[str] | None = None

        def handle_starttag(self, tag, attrs):
            if tag == "table":
                self.rows = []
            elif tag == "tr":
                self.rows.append([])
            elif tag in ("td", "th"):
                self.cell = []
            elif tag == "caption":
                self.caption = []
                self.cell = self.caption
            elif tag == "span" and self.cell is not None:
                self.cell += [value for name, value in attrs if name == "style"]

        def handle_data(self, data):
            if self.cell is not None:
                self.cell.append(data)

        def handle_endtag(self, tag):
            if tag in ("td", "th"):
                self.rows[-1].append("".join(self.cell))
            if tag in ("td", "th", "caption"):
                self.cell = None
            if tag == "table" and "".join(getattr(self, "caption", ())).startswith(caption):
                found.extend(self.rows)
                self.caption = []

    Reader().feed(text)
    return found
