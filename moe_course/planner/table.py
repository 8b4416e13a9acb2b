"""What `moe-course plan` shows on the terminal: a table of ranks, one rank in full, the reasons.

Built in: notebook 04.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_course.cost.memory import RankMemory, expert_bytes, rank_memory
from moe_course.layout import AXES
from moe_course.parallel import Plan, RankPlan
from moe_course.planner.explain import explain
from moe_course.planner.spans import spans
from moe_course.planner.summary import NAMES, number, size, summary, unit_of

#: More ranks than this are shown in part: so many of the first and of the last.
SHOWN, FIRST, LAST = 16, 8, 4
#: From wide to narrow: how many stretches of a group are shown, and whether each axis has its own column.
LAYOUTS = ((4, True), (1, True), (1, False), (0, False))


def print_plan(
    console: Console, plan: Plan, *, model: str, dtype: str, max_num_batched_tokens: int, rank: int | None = None
) -> None:
    """Summary of the plan, then the table of its ranks, or one rank in full."""
    copies = plan.parallel.external_data_parallel_size  # each holds the same
    memories = [
        rank_memory(plan, at, dtype, max_num_batched_tokens) for at in range(plan.world_size // copies)
    ] * copies
    print_pairs(console, summary(plan, memories, model, dtype, max_num_batched_tokens))
    console.print()
    if rank is not None:
        print_pairs(console, one_rank(plan, plan.rank(rank), memories[rank], dtype))
        return
    for layout in LAYOUTS:
        table = rank_table(plan, memories, *layout)
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            break
    console.print(table)
    if plan.world_size > SHOWN:
        console.print(f"{plan.world_size - FIRST - LAST} more ranks; --rank R shows one in full, --json FILE has all")


def rank_table(plan: Plan, memories: list[RankMemory], most: int = 4, separate: bool = True) -> Table:
    """One row per rank; of a large world the first and the last. Axes of size 1 are left out.

    Args:
        most: stretches of ranks shown of a group, see `spans`.
        separate: a column per axis; otherwise one for all, `15.7.0`.
    """
    used = [axis for axis, many in zip(AXES, plan.parallel.sizes, strict=True) if many > 1]
    roles = ((plan.dispatch_group, "rows\ngo to"), (plan.reduce_group, "sum\nwith"), (plan.split_group, "split\nwith"))
    kinds: dict[str, str] = {}
    for kind, title in roles:
        if kind is not None:
            kinds.setdefault(kind, title)  # PCP ranks that share rows out are also those that gather them
    weights, buffers = ([getattr(memory, name) for memory in memories] for name in ("weights", "buffers"))
    weight_unit, buffer_unit = unit_of(weights), unit_of(buffers)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    axes = [NAMES[axis] for axis in used]
    table.add_column("rank", justify="right", no_wrap=True, min_width=len(str(plan.world_size - 1)))
    for title in [*(axes if separate or not axes else [".".join(axes)])]:
        table.add_column(title, justify="right", no_wrap=True)
    if plan.moe.use_ep:
        table.add_column("EP\nrank", justify="right", no_wrap=True)
    for title in ["experts" if plan.moe.tp_size == 1 else "slices of", *kinds.values()]:
        table.add_column(title, no_wrap=True)
    for title in (f"weights\n{weight_unit[0]}", f"buffers\n{buffer_unit[0]}"):
        table.add_column(title, justify="right", no_wrap=True)

    ranks = range(plan.world_size)
    partly = plan.world_size > SHOWN
    for at in [*ranks[:FIRST], *ranks[-LAST:]] if partly else ranks:
        mine = plan.rank(at)
        place = [str(mine.coordinates[axis]) for axis in used]
        if partly and at == ranks[-LAST]:
            table.add_row("…")
        table.add_row(
            str(at),
            *(place if separate or not place else [".".join(place)]),
            *([str(mine.ep_rank)] if plan.moe.use_ep else []),
            spans(mine.experts, max(most, 1)),
            *(spans(mine.groups[kind], most) for kind in kinds),
            number(weights[at], weight_unit),
            number(buffers[at], buffer_unit),
        )
    return table


def one_rank(plan: Plan, mine: RankPlan, memory: RankMemory, dtype: str) -> list[tuple[str, str]]:
    """`(label, text)` lines about one rank: everything, nothing shortened."""
    where = " · ".join(f"{NAMES[axis]} {at}" for axis, at in mine.coordinates.items())
    roles: dict[str | None, list[str]] = {}
    for kind, role in (
        (plan.dispatch_group, "rows travel"),
        (plan.reduce_group, "partial sums are added"),
        (plan.split_group, "rows are split and gathered"),
    ):
        roles.setdefault(kind, []).append(role)
    lines = [(f"rank {mine.rank}", f"{where} · EP rank {mine.ep_rank}")]
    lines.append(("experts" if plan.moe.tp_size == 1 else "slices of", _all(mine.experts)))
    lines.append(("layers", f"{_all(mine.layers)} (the sparse ones of its stage)"))
    for kind, members in mine.groups.items():
        role = f": {', '.join(roles[kind])}" if kind in roles else ""
        lines.append((f"{kind.upper()} group", _all(members) + role))
    one = expert_bytes(plan.config, dtype, plan.moe.tp_size)
    routed = f"{len(mine.layers)} layers * {len(mine.experts)} {'experts' if plan.moe.tp_size == 1 else 'slices'}"
    lines.append(("routed", f"{size(memory.routed)} = {routed} * {size(one)}" if one else "no equal slices"))
    lines.append(("shared", f"{size(memory.shared)} whole, as here; {size(memory.shared_upstream)} as vLLM holds it"))
    lines.append(("router", f"{size(memory.router)} in float32"))
    lines.append(("weights", f"{size(memory.weights)} in all, MoE part only"))
    if memory.buffers is not None:
        lines.append(("gathered", f"{size(memory.gathered_rows)} for rows, {size(memory.gathered_routes)} for routes"))
        lines.append(("partial sums", size(memory.partial_sums)))
    return lines


def _all(numbers: list[int]) -> str:
    return spans(numbers, None).replace(",", ", ")  # lines may break there


def print_steps(console: Console, plan: Plan) -> None:
    """The decisions behind the plan, numbered, each with where vLLM makes it."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="bold")
    grid.add_column()
    for place, step in enumerate(explain(plan), start=1):
        grid.add_row(f"{place}.", Text.assemble((step.topic, "bold"), f"\n{step.text}\n", (step.source, "dim")))
    console.print()
    console.print(grid)


def print_pairs(console: Console, lines: list[tuple[str, str]]) -> None:
    """Labels on the left, once for lines that follow each other, texts wrapped on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    before = ""
    for label, text in lines:
        grid.add_row("" if label == before else label, Text(text, overflow="fold"))
        before = label
    console.print(grid)
