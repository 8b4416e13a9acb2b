"""`moe-course replay FILE`: what a recorded routing would move, in every shape, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_course.errors import ConfigError
from moe_course.options import parse_ranks_per_node
from moe_course.planner.command import WeightDtype, read_model
from moe_course.run_flags import CombineDtypeFlag, Dtype, Quant, RanksPerNodeFlag, Strategy


def replay(
    file: Annotated[
        Path, typer.Argument(help="Expert ids [T, L, K]: .npy, .npz, .pt, .safetensors, .json; or a --trace folder.")
    ],
    world_size: Annotated[int, typer.Option("--world-size", "--ranks", help="EP ranks that share the experts.")] = 8,
    ranks_per_node: RanksPerNodeFlag = None,
    model: Annotated[
        str | None, typer.Option(help="Folder with config.json, or a name: tiny, glm-5.1. For E, H and its layers.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="E. Default: the model's, else the largest id + 1, rounded up.")
    ] = None,
    expert_placement_strategy: Annotated[
        Strategy, typer.Option(help="Which rank owns which expert; taken as it is, no fallback.")
    ] = Strategy.linear,
    rows_of: Annotated[
        str | None,
        typer.Option(help="Whose row is it: contiguous, round_robin, trace. Default: trace if it says so."),
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="H. Default: the model's, else 6144.")] = None,
    dtype: Annotated[WeightDtype, typer.Option(help="Of rows.")] = WeightDtype.bfloat16,
    dispatch_quant: Annotated[Quant, typer.Option(help="Rows go out quantised, with their scales.")] = Quant.none,
    combine_dtype: CombineDtypeFlag = Dtype.auto,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="T_max: rows of a rank in one batch, for shapes with fixed places.")
    ] = 256,
    key: Annotated[str | None, typer.Option(help="Name of the array in a file with several.")] = None,
    layout: Annotated[str, typer.Option(help="TLK: rows, layers, routes. LTK: a list of layers.")] = "TLK",
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """Say how many rows and bytes a routing would move. A recording of any engine, every backend, any number of ranks.

    Nothing is sent: rows are counted as each shape moves them. A name of vLLM stands for its shape between ranks of
    one node; with --ranks-per-node, notes say which go another way across nodes. "x uniform" compares with a router
    that picks K of E experts at random. Ids of -1 are no routes.

    \b
    vLLM: start it with enable_return_routed_experts=True, then
        np.save("routed.npy", output.outputs[0].routed_experts)
    transformers: pass output_router_logits=True, then, for a router without a bias,
        torch.save(torch.stack([l.topk(K).indices for l in logits]), "routed.pt")   and --layout LTK
    here: moe-course run --trace DIR

    \b
    moe-course replay routed.npy --model glm-5.1 --ranks 64 --ranks-per-node 8
    moe-course replay routed.npy --ranks 16 --dispatch-quant fp8_group --combine-dtype bfloat16
    """
    from rich.console import Console

    from moe_course.cost.replay import replay as counted
    from moe_course.cost.routing import fit_to_model, number_of_experts, ranks_of_rows
    from moe_course.cost.routing_file import read_routing
    from moe_course.cost.sizes import row_sizes
    from moe_course.cost.tables import print_replay
    from moe_course.expert_map import make_placement

    for name, value, least in (
        ("world-size", world_size, 1),
        ("hidden-size", hidden_size if hidden_size is not None else 1, 1),
        ("max-num-batched-tokens", max_num_batched_tokens, 1),
        ("experts", experts if experts is not None else 1, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name} is {value}, needs to be at least {least}")
    config = read_model(model) if model is not None else None
    hidden = hidden_size or (config.hidden_size if config else 6144)
    quant = None if dispatch_quant == Quant.none else dispatch_quant.value
    home = None if combine_dtype == Dtype.auto else combine_dtype.value
    sizes = row_sizes(hidden, dtype.value, quant, home)
    console = Console(highlight=False)
    with console.status(f"reading {file}"):
        routing = read_routing(file, key=key, layout=layout)
        if config is not None:
            routing = fit_to_model(routing, config, model)
        total, routing = number_of_experts(routing, experts, config)
        placement = make_placement(
            world_size, total, expert_placement_strategy.value, ranks_per_node=parse_ranks_per_node(ranks_per_node)
        )
        rank = ranks_of_rows(routing, world_size, rows_of)
    if hidden_size is None and config is None:
        routing = routing.noting(f"H is not known, {hidden} is taken, as of GLM-5.1; --hidden-size or --model says it")
    if quant is not None:
        routing = routing.noting(*_quantising(quant))
    with _progress(console) as show:
        found = counted(
            routing,
            rank,
            placement,
            sizes,
            max_num_tokens=max_num_batched_tokens,
            hidden_size=hidden,
            progress=show,
        )
    found |= {"model": model, "hidden_size": hidden, "dtype": dtype.value}
    found |= {"dispatch_quant": quant, "combine_dtype": home}
    print_replay(console, found)
    if json_file is not None:
        from moe_course.targets import write_json

        write_json(json_file, found)
    return 0


def _quantising(fmt: str) -> list[str]:
    """Which of vLLM's backends do not send rows in this format."""
    from moe_course.quant import WHEN

    others = [name for name, answers in WHEN.items() if answers[fmt] != "before"]
    if not others:
        return []
    return [f"counted as if all rows went out as {fmt}; these quantise later or not at all: {', '.join(others)}"]


class _progress:
    """A bar over layers, on a terminal only."""

    def __init__(self, console):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("counting layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=None)

    def __enter__(self):
        self.bar.start()
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *error) -> None:
        self.bar.stop()
