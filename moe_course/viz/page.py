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
  font: 15px/1.5 ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
:root[data-theme="dark"] body { color: #ececec; background: #16181d; }
@media (prefers-color-scheme: dark) { :root:not([data-theme]) body { color: #ececec; background: #16181d; } }
"""


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
        title: text, escaped here.
        parts: figures, and HTML between them. HTML is taken as it is: who writes it escapes what comes from a run.
        style: more CSS.
    """
    figures = [part for part in parts if isinstance(part, Figure)]
    modules = list(dict.fromkeys(figure.module for figure in figures))
    body, number = [], 0
    for part in parts:
        if isinstance(part, Figure):
            body.append(holder(part, f"picture-{number}"))
            number += 1
        else:
            body.append(part)
    inside = "\n".join(["<main>", *body, "</main>", *map(script, modules)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_PAGE_STYLE}{sheet(modules)}{style}</style>\n</head>\n"
        f"<body>\n{inside}\n</body>\n</html>\n"
    )


def holder(figure: Figure, name: str) -> str:
    """The place of a picture in a page, and its data. `name` is an id that the page has once."""
    data = {"data": figure.data, "opts": figure.opts | {"state": figure.state}}
    return (
        f'<div data-picture="{escape(figure.module)}" id="{escape(name)}"></div>\n'
        f'<script type="application/json" id="{escape(name)}-data">{as_data(data)}</script>'
    )


def script(module: str) -> str:
    """The script of a module, which fills all its holders. Once in a page, behind them."""
    start = (
        f"for (const root of document.querySelectorAll('[data-picture=\"{module}\"]')) {{\n"
        '  const { data, opts } = JSON.parse(document.getElementById(root.id + "-data").textContent);\n'
        "  root.picture = mount(root, data, opts);\n}"
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
