"""A deck as one HTML file: reveal.js, styles, players and runs are inside, so it needs neither network nor server."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path

from moe_course.lessons.slides.deck import Deck, Slide
from moe_course.lessons.slides.errors import SlidesError
from moe_course.viz import colours
from moe_course.viz.page import as_data
from moe_course.viz.source import source, styles

_PLAYER = re.compile(r'<div class="player" data-run="(\w+)"([^>]*)></div>')
_PAGE = """<!doctype html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
{styles}
</head>
<body>
<div class="reveal"><main class="slides">
{slides}
</main></div>
{data}
{scripts}
</body>
</html>
"""


def page(deck: Deck, folder: Path, reveal: Path) -> str:
    """The text of the HTML file. `folder` is `slides/`; `reveal` the folder of reveal.js.

    Raises SlidesError if a run that the deck plays is not in `folder`/data.
    """
    runs = {name: run(folder, name) for name in deck.runs}
    sheets = [reveal / "dist" / "reset.css", reveal / "dist" / "reveal.css", folder / "style.css"]
    scripts = [reveal / "dist" / "reveal.js", reveal / "plugin" / "notes" / "notes.js"]
    player, player_styles = (source("token_flow"), styles("token_flow")) if runs else ("", "")
    stills = {name: base64.b64encode(_still(data)).decode() for name, data in runs.items()}
    return _PAGE.format(
        title=html.escape(deck.title),
        styles="\n".join(_style(text) for text in [*map(_read, sheets), _rank_colours(), player_styles] if text),
        slides="\n".join(_section(slide, deck, stills) for slide in deck.slides),
        data="\n".join(_data(name, data) for name, data in runs.items()),
        scripts="\n".join(_script(_read(path)) for path in scripts)
        + "\n"
        + _script(player + "\n" + _read(folder / "deck.js"), kind=' type="module"'),
    )


def run(folder: Path, name: str) -> dict:
    """The recorded run `name`: data of the token flow."""
    path = folder / "data" / f"{name}.json"
    if not path.exists():
        raise SlidesError(
            f"{path.parent.name}/{path.name} is missing, and a player shows it. Record it with "
            f"`python -m moe_course.lessons.slides --record TRACE_FOLDER {path.parent.parent.name}/data/{path.name}`"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _section(slide: Slide, deck: Deck, stills: dict[str, str]) -> str:
    def player(match: re.Match) -> str:
        name, attributes = match.groups()
        alt = html.escape(f"A recorded run: {_text(name)}")
        still = f'<img class="still" alt="{alt}" src="data:image/png;base64,{stills[name]}">'
        return f'<div class="player" data-run="{name}"{attributes}><div class="live"></div>{still}</div>'

    sources = ""
    if slide.sources:
        sources = f'<p class="sources">numbers: outputs of notebook {", ".join(slide.sources)}</p>\n'
    notes = f"<p>{slide.minutes} min of {deck.minutes}.</p>\n{slide.notes}"
    return (
        f'<section data-minutes="{slide.minutes}"><div class="slide {slide.layout}">\n'
        f'{_PLAYER.sub(player, slide.body)}{sources}</div>\n<aside class="notes">{notes}</aside></section>'
    )


def _text(name: str) -> str:
    return name.replace("_", " ")


def _still(data: dict) -> bytes:
    from moe_course.viz.token_flow import TokenFlow

    return TokenFlow(data=data).still()


def _rank_colours() -> str:
    return "\n".join(f".rank{rank} {{ --rank: {colour}; }}" for rank, colour in enumerate(colours.RANKS))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _style(text: str) -> str:
    return f"<style>\n{text}\n</style>"


def _script(text: str, kind: str = "") -> str:
    closed = re.sub(r"</(?=script)", r"<\\/", text, flags=re.I)
    return f"<script{kind}>\n{closed}\n</script>"


def _data(name: str, data: dict) -> str:
    return f'<script type="application/json" id="run-{name}">{as_data(data)}</script>'
