"""A deck file, read: its slides as HTML, with notes and minutes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from moe_course.lessons.slides import numbers
from moe_course.lessons.slides.errors import SlidesError

# markdown-it comes with rich, which the command line needs.
_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_FRONT = re.compile(r"\A---\nnotebook: (\w+)\n---\n")
_CLASS = re.compile(r"\A<!-- class: ([\w -]+) -->\n+")
_NOTE = re.compile(r"^Note:\s*(\d+) min\.\s*", re.M)


@dataclass(frozen=True)
class Slide:
    """One slide. `body` and `notes` are HTML; `minutes` is the time it takes; `sources` the notebooks it quotes."""

    title: str
    layout: str
    body: str
    notes: str
    minutes: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Deck:
    """All slides of a file. `runs` are the recorded runs that its players show."""

    name: str
    title: str
    slides: tuple[Slide, ...]
    runs: tuple[str, ...]

    @property
    def minutes(self) -> int:
        return sum(slide.minutes for slide in self.slides)


def read(path: Path, notebooks: Path) -> Deck:
    """The deck in `path`, held against the notebooks in the folder `notebooks`.

    Raises SlidesError if it lacks a title, notes or minutes, or says other than its notebook.
    """
    text = path.read_text(encoding="utf-8")
    front = _FRONT.match(text)
    if not front:
        raise SlidesError(f"{path.name}: begins without `notebook: NAME` between two lines `---`")
    parts = re.split(r"\n\n---\n\n", text[front.end() :].strip())
    slides = tuple(_slide(part, notebooks, f"{path.name}, slide {i}") for i, part in enumerate(parts, start=1))
    wanted = numbers.title(notebooks, front[1])
    if slides[0].title != wanted:
        raise SlidesError(f"{path.name}: is called {slides[0].title!r}, its notebook {wanted!r}; use the notebook's")
    runs = tuple(dict.fromkeys(re.findall(r'data-run="(\w+)"', text)))
    return Deck(path.stem, wanted, slides, runs)


def _slide(text: str, notebooks: Path, where: str) -> Slide:
    layout = _CLASS.match(text)
    text = text[layout.end() :] if layout else text
    heading, _, rest = text.partition("\n")
    if not heading.startswith("# "):
        raise SlidesError(f"{where}: begins with {heading!r}; a slide begins with `# ` and a sentence")
    note = _NOTE.search(rest)
    if not note or not rest[note.end() :].strip():
        raise SlidesError(f"{where}: has no line `Note: 3 min.` with what to say in that time")
    body = rest[: note.start()]
    title = re.sub(r"[*`]", "", numbers.MARKED.sub(r"\g<shown>", heading[2:])).strip()
    return Slide(
        title=title,
        layout=layout[1] if layout else "",
        body=_heading(heading[2:].strip(), notebooks, where, first=where.endswith("slide 1"))
        + _MARKDOWN.render(numbers.checked(body, notebooks, where)),
        notes=_MARKDOWN.render(numbers.checked(rest[note.end() :], notebooks, where)),
        minutes=int(note[1]),
        sources=tuple(sorted({match["notebook"] for match in numbers.MARKED.finditer(heading + body)})),
    )


def _heading(text: str, notebooks: Path, where: str, first: bool) -> str:
    text = _MARKDOWN.renderInline(numbers.checked(text, notebooks, where))
    if not first:
        return f"<h2>{text}</h2>\n"
    lesson, _, promise = text.partition(": ")  # "07 · Dispatch: bring the rows to the experts"
    lesson = f'<span class="lesson">{lesson}<span class="unseen">: </span></span>'
    return f"<h1>{lesson}{promise[:1].upper()}{promise[1:]}</h1>\n"
