"""Ribbon: the five stages of a sparse layer in a row. Built in: notebook 00."""

from __future__ import annotations

from typing import Any

from moe_course.errors import ConfigError
from moe_course.viz.picture import Picture, png

#: Name, what goes in and out, its order, one sentence, file of the package, vLLM's name for it.
STAGES: tuple[dict[str, str], ...] = (
    {
        "name": "router",
        "in": "hidden_states [T, H]",
        "out": "topk_weights, topk_ids [T, K]",
        "order": "source order",
        "says": "Each rank scores its own rows against all E experts and keeps the K best of each row, with weights.",
        "file": "moe_course/router.py",
        "vllm": "grouped_topk_router.py : grouped_topk",
    },
    {
        "name": "expert map",
        "in": "global ids 0 … E−1",
        "out": "owner rank, slot",
        "order": "source order",
        "says": "A table that all ranks share says which rank owns an expert, and in which slot of its shelf.",
        "file": "moe_course/expert_map.py",
        "vllm": "expert_map_manager.py : determine_expert_map",
    },
    {
        "name": "dispatch",
        "in": "rows in source order",
        "out": "rows where their experts are",
        "order": "source order → owner order",
        "says": "Rows go to the ranks that own their experts, with ids and weights. vLLM's default sends all to all.",
        "file": "moe_course/dispatch.py and backends/",
        "vllm": "modular_kernel.py : prepare",
    },
    {
        "name": "local experts",
        "in": "rows that came, slots",
        "out": "their outputs",
        "order": "owner order",
        "says": "Each rank sorts what came by expert, and computes w13, SiLU times up, w2 for its own experts.",
        "file": "moe_course/experts.py",
        "vllm": "RoutedExperts and its kernels",
    },
    {
        "name": "combine",
        "in": "outputs in owner order",
        "out": "one row each, [T, H]",
        "order": "owner order → source order",
        "says": "Outputs travel home, and the K contributions of a row are weighed and added up in its old place.",
        "file": "moe_course/combine.py and backends/",
        "vllm": "modular_kernel.py : finalize",
    },
)
NAMES = tuple(stage["name"] for stage in STAGES)


class Ribbon(Picture):
    """router → expert map → dispatch → local experts → combine; `state` is `{"stage": name}`, the one that is open."""

    module = "ribbon"

    @classmethod
    def of(cls, stage: str | None = None) -> Ribbon:
        """Lit is `stage`, by its name or its beginning ("experts" too); None lights all.

        Raises ConfigError for a name that is no stage.
        """
        name = None if stage is None else _named(stage)
        data = {"schema": "moe_course.ribbon/1", "stages": list(STAGES), "lit": name}
        return cls(data=data, state={} if name is None else {"stage": name})

    def text(self) -> str:
        lit = self.data["lit"]
        marked = " → ".join(f"[{name}]" if name == lit else name for name in NAMES)
        if lit is None:
            return f"Ribbon: {marked}; source order → owner order → source order"
        stage = STAGES[NAMES.index(lit)]
        return f"Ribbon: {marked}; {lit}: {stage['in']} → {stage['out']}"

    def still(self) -> bytes:
        return _draw(self.data["lit"])


def _named(stage: str) -> str:
    wanted = stage.strip().lower().replace("_", " ")
    for name in NAMES:
        if wanted and (name.startswith(wanted) or name.split()[-1] == wanted):
            return name
    raise ConfigError(f"stage is {stage!r}, known stages: {', '.join(NAMES)}; leave it out to light all")


def _draw(lit: str | None) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(11, 1.5), dpi=100, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1100), ylim=(150, 0))
    axes.axis("off")

    def write(x: float, y: float, text: str, size: float, **look: Any) -> None:
        axes.text(x, y, text, fontsize=size * 0.72, ha="center", va="center", **({"color": "#1b1b1b"} | look))

    for number, stage in enumerate(STAGES):
        left, on = 8 + number * 220, lit in (None, stage["name"])
        face, ink = (
            ("#1845fb", "#ffffff") if stage["name"] == lit else ("#e8ecff", "#1b1b1b") if on else ("#f3f3f3", "#5c5c5c")
        )
        axes.add_patch(
            FancyBboxPatch(
                (left, 12),
                186,
                86,
                boxstyle="round,pad=0,rounding_size=8",
                facecolor=face,
                edgecolor="#1845fb" if on else "#c9c9c9",
            )
        )
        write(left + 93, 32, f"{number + 1}  {stage['name']}", 15, weight="bold", color=ink)
        write(left + 93, 60, stage["in"], 11.5, color=ink)
        write(left + 93, 80, f"→ {stage['out']}", 11.5, color=ink)
        if number < len(STAGES) - 1:
            axes.annotate(
                "",
                xy=(left + 217, 55),
                xytext=(left + 189, 55),
                arrowprops={"arrowstyle": "-|>", "color": "#5c5c5c", "lw": 1.6},
            )
    spans = (
        (8, 414, "rows in source order"),
        (448, 634, "they travel"),
        (668, 854, "owner order"),
        (888, 1074, "they travel home"),
    )
    for start, end, text in spans:
        axes.plot([start, end], [112, 112], color="#c9c9c9" if "travel" in text else "#5c5c5c", lw=2.5)
        write((start + end) / 2, 130, text, 12, color="#5c5c5c")
    return png(figure)
