"""HTML made of elements. Whatever goes into one is text, and escaped, unless an element was made of it here.

So a value that comes from a run cannot become markup by being forgotten. Built in: notebook 13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_VOID = ("br",)


class Html(str):
    """Markup. Only functions of this module make it."""

    __slots__ = ()


def element(name: str, *children: Any, **attributes: str | None) -> Html:
    """`<name …>children</name>`. Children that are not `Html` are escaped, and so are attributes; None is left out.

    A trailing underscore of an attribute's name is for Python's keywords: `class_`.
    """
    told = "".join(
        f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items() if value is not None
    )
    end = "" if name in _VOID else f"</{name}>"
    return Html(f"<{name}{told}>{joined(children)}{end}")


def joined(children: Iterable[Any]) -> Html:
    """Markup of some children, one behind the other."""
    return Html("".join(child if isinstance(child, Html) else escape(str(child)) for child in children))


def script(text: str) -> Html:
    """A script of the package. Nothing that comes from a run belongs in it."""
    closed = re.sub("</(?=script)", r"<\\/", text, flags=re.IGNORECASE)
    return Html(f"<script>\n{closed}</script>")


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", classes: Mapping[int, str] | None = None
) -> Html:
    """A table that can be scrolled sideways. `classes`: column -> the class of its cells."""
    known = classes or {}

    def line(cells: Sequence[Any], name: str) -> Html:
        cells = [element(name, cell, class_=known.get(place)) for place, cell in enumerate(cells)]
        return element("tr", *cells)

    body = Html("\n".join(line(row, "td") for row in rows))
    parts = [element("caption", caption)] if caption else []
    parts += ["\n", element("thead", line(heads, "th")), "\n", element("tbody", body)]
    return element("div", element("table", *parts), class_="scroll")
