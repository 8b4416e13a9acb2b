"""Texts of a run in a still image: a character that the font lacks becomes a box. Built in: notebook 02."""

from __future__ import annotations

from functools import cache


def drawable(text: str, family: str) -> str:
    """`text` without characters that the font `family` cannot draw: matplotlib would warn, once for each."""
    known = _characters(family)
    return "".join(char if ord(char) in known else "□" for char in text)


@cache
def _characters(family: str) -> frozenset[int]:
    from matplotlib import font_manager, ft2font

    path = font_manager.findfont(font_manager.FontProperties(family=family))
    return frozenset(ft2font.FT2Font(path).get_charmap())
