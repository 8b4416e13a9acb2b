"""Colours that everybody can tell apart, in live and still pictures alike. `common.js` repeats them; a test compares.

Eight ranks: petroff8 (arXiv:2107.02270), the widest of the usual palettes for colour-blind eyes. Never colour alone:
a rank also has its number, and a shape that changes with every eighth. Heat: cividis.
"""

from __future__ import annotations

RANKS = ("#1845fb", "#ff5e02", "#c91f16", "#c849a9", "#adad7d", "#86c8dd", "#578dff", "#656364")
#: matplotlib's markers for ranks 0-7, 8-15, 16-23, 24-31.
MARKS = ("o", "s", "^", "D")
HEAT = "cividis"


def of_rank(rank: int) -> str:
    """Colour of a rank; ranks 8 apart share one."""
    return RANKS[rank % len(RANKS)]


def mark_of_rank(rank: int) -> str:
    """Shape of a rank, which tells those apart that share a colour."""
    return MARKS[rank // len(RANKS) % len(MARKS)]
