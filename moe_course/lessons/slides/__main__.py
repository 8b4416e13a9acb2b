"""`python -m moe_course.lessons.slides`: build decks, or store a recorded run for them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_course.errors import MoECourseError
from moe_course.lessons.slides import deck, page, pdf, record, tools

ROOT = Path(__file__).parents[3]


def main(argv: list[str] | None = None) -> int:
    """0, or the exit code of what went wrong, which is said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m moe_course.lessons.slides", description=__doc__.split("`: ")[1])
    parser.add_argument("decks", nargs="*", type=Path, metavar="FILE", help="Markdown decks; default: all in slides/")
    parser.add_argument("--no-pdf", action="store_true", help="HTML only; needs no chromium")
    parser.add_argument("--out", type=Path, help="folder for HTML and PDF; default: slides/build and slides")
    parser.add_argument("--record", nargs=2, type=Path, metavar=("TRACE", "FILE"), help="store a run for the player")
    parser.add_argument("--steps", type=int, nargs="+", help="of --record: only these steps")
    parser.add_argument("--made-by", default="", help="of --record: the command that made the trace")
    args = parser.parse_args(argv)
    try:
        if args.record:
            size = record.record(*args.record, args.steps, args.made_by)
            print(f"{args.record[1]}: {size} bytes")
            return 0
        return _build(args)
    except MoECourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _build(args: argparse.Namespace) -> int:
    folder = ROOT / "slides"
    reveal = tools.reveal(folder)
    if not args.no_pdf:
        tools.playwright(), tools.chromium()
    for path in args.decks or sorted(folder.glob("[0-9]*.md")):
        read = deck.read(path, ROOT / "notebooks")
        target = (args.out or folder / "build") / f"{read.name}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page.page(read, folder, reveal), encoding="utf-8")
        print(f"{read.name}: {len(read.slides)} slides, {read.minutes} min, {_shown(target)}")
        if not args.no_pdf:
            printed = (args.out or folder) / f"{read.name}.pdf"
            pdf.write(target, printed, pdf.digest(read, folder))
            print(f"{read.name}: {_shown(printed)}")
    return 0


def _shown(path: Path) -> str:
    short = path.resolve()
    short = short.relative_to(ROOT) if short.is_relative_to(ROOT) else short
    return f"{short} ({path.stat().st_size / 1e3:.0f} kB)"


if __name__ == "__main__":
    sys.exit(main())
