"""TokenFlow: the player. Every token of a recorded run on its way to its experts and home.

Built in: notebook 13.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moe_course.viz.flow_data import flow_data
from moe_course.viz.picture import Picture

if TYPE_CHECKING:
    from moe_course.trace import Trace

_MOST_LISTED = 16  # ranks whose loads fit into a line


class TokenFlow(Picture):
    """`data` is that of `flow_data`; `state` has step, layer, phase, token, rank and expert, None where all are shown.

    `token` is a place in the pass's `tokens`. Phases: at source, router, dispatch, experts, combine, done.
    """

    module = "token_flow"

    @classmethod
    def of(
        cls,
        trace: Trace | str | Path,
        steps: Iterable[int] | None = None,
        layers: Iterable[int] | None = None,
        **state: object,
    ) -> TokenFlow:
        """The player of a run recorded with `--trace`.

        Args:
            trace: `Trace.load(folder)`, or the folder.
            steps, layers: those to show; None shows all.
            state: what to show first, e.g. `step=3, phase="dispatch", token=5`.

        Raises ConfigError and TraceError, see `flow_data`.
        """
        return cls(data=flow_data(trace, steps, layers), state=state)

    def shown(self) -> dict:
        """The pass of `data` that is on the screen."""
        passes = self.data["passes"]
        for names in (("step", "layer"), ("step",), ("layer",)):
            for found in passes:
                if all(found[name] == self.state.get(name, passes[0][name]) for name in names):
                    return found
        return passes[0]

    def text(self) -> str:
        return summary(self.data, self.shown())

    def still(self) -> bytes:
        from moe_course.viz.token_flow_still import draw

        return draw(self.data, self.shown())


def loads(data: dict, shown: dict) -> list[int]:
    """Routes that each rank computes in a pass."""
    owner = shown["routes"]["owner"]
    return [owner.count(rank) for rank in range(data["ranks"])]


def summary(data: dict, shown: dict) -> str:
    """One pass in a line."""
    routes, tokens = shown["routes"], shown["tokens"]
    distinct = len({(token["prompt"], token["position"]) for token in tokens})  # ranks may share rows
    pairs = zip(routes["token"], routes["owner"], strict=True)
    away = sum(tokens[token]["rank"] != owner for token, owner in pairs)
    load = loads(data, shown)
    most = max(load)
    busiest = [rank for rank, n in enumerate(load) if n == most]
    named = f"rank {busiest[0]}" if len(busiest) == 1 else f"ranks {', '.join(map(str, busiest))}"
    listed = " ".join(map(str, load)) if len(load) <= _MOST_LISTED else f"up to {most}"
    return (
        f"TokenFlow: {_count(data['ranks'], 'rank')}, {_count(distinct, 'token')}, "
        f"{_count(len(routes['k']), 'route')} in layer {shown['layer']} step {shown['step']}; {away} to another rank; "
        f"routes per rank {listed} (busiest: {named})"
    )


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
