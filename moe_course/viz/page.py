"""A page in one file, with pictures that live without a kernel: for the report and for slides.

No request leaves it, it opens from `file://`, and what comes from a run enters it as data, never as markup.
Built in: notebook 13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from moe_course.viz.source import source, styles

_PAGE_STYLE = """\
body { margin: 0 auto; max-width: 1116px; padding: 12px; color: #1b1b1b; background: #ffffff;
  font: 15px/1.5 ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
:root[data-theme="dark"] body { color: #ececec; background: #16181d; }
@media screen and (prefers-color-scheme: dark) { :root:not([data-theme]) body { color: #ececec; background: #16181d; } }
"""
_NO_SCRIPT = (
    "<noscript><p><b>The pictures are missing:</b> they are drawn by JavaScript, which is switched off or blocked in "
    "this browser. Allow it for this file and load it again. What stands in words and tables needs none.</p></noscript>"
)
_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Figure:
    """A picture in a page.

    Attributes:
        module: name of its module, e.g. "token_flow".
        data: what the picture shows, plain JSON.
        state: what is chosen at first.
        opts: settings of the picture.
    """

    module: str
    data: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    opts: dict[str, Any] = field(default_factory=dict)


def page(title: str, parts: Sequence[str | Figure], style: str = "") -> str:
    """A whole page.

    Args:
        title: text, escaped here; characters that turn the direction of what follows are named.
        parts: figures, and HTML between them. HTML is taken as it is: who writes it escapes what comes from a run.
        style: more CSS.
    """
    title = _DIRECTIONS.sub(lambda sign: f"\\u{ord(sign[0]):x}", title)
    figures = [part for part in parts if isinstance(part, Figure)]
    modules = list(dict.fromkeys(figure.module for figure in figures))
    body, names = [], {}  # id of data -> the holder it stands at: pictures of the same data share it
    for part in parts:
        if isinstance(part, Figure):
            name = f"picture-{sum(here.startswith('<div data-picture') for here in body)}"
            body.append(holder(part, name, names.setdefault(id(part.data), name)))
        else:
            body.append(part)
    inside = "\n".join(["<main>", *([_NO_SCRIPT] if figures else []), *body, "</main>", *map(script, modules)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_PAGE_STYLE}{sheet(modules)}{style}</style>\n</head>\n"
        f"<body>\n{inside}\n</body>\n</html>\n"
    )


def holder(figure: Figure, name: str, data_of: str | None = None) -> str:
    """The place of a picture in a page, and its data. `name` is an id that the page has once.

    `data_of` is the name of the holder whose data this one shows, too; its own, if not given.
    """
    data_of = data_of or name
    opts = {"state": figure.state} | figure.opts
    place = (
        f'<div data-picture="{escape(figure.module)}" id="{escape(name)}" data-of="{escape(data_of)}"></div>\n'
        f'<script type="application/json" id="{escape(name)}-opts">{as_data(opts)}</script>'
    )
    if data_of != name:
        return place
    return place + f'\n<script type="application/json" id="{escape(name)}-data">{as_data(figure.data)}</script>'


def script(module: str) -> str:
    """The script of a module, which fills all its holders. Once in a page, behind them."""
    start = (
        f"for (const root of document.querySelectorAll('[data-picture=\"{module}\"]')) {{\n"
        "  const read = (id) => JSON.parse(document.getElementById(id).textContent);\n"
        '  root.picture = mount(root, read(root.dataset.of + "-data"), read(root.id + "-opts"));\n}'
    )
    text = re.sub(r"</(?=script)", r"<\\/", source(module), flags=re.IGNORECASE)
    return f'<script type="module">\n{text}\n{start}\n</script>'


def sheet(modules: Iterable[str]) -> str:
    """The style sheets of some modules, what they share once."""
    shared = styles("")
    return shared + "".join(styles(module).removeprefix(shared) for module in modules)


def as_data(value: Any) -> str:
    """JSON that cannot end the element it stands in: `<` is written as an escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
