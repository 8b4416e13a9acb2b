"""`moe-course backends`: one routing through every shape, for real; counted, compared with the bound, and timed."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError, RankLost, VerificationFailed
from moe_course.options import TINY, parse_ranks_per_node
from moe_course.run_flags import Quant, Strategy

if TYPE_CHECKING:
    from moe_course.cost.compare import Job

_TIMEOUT_S, _TIME_LIMIT_S = 60.0, 900.0


class Carrier(StrEnum):
    threads = "threads"
    gloo = "gloo"
    shm = "shm"


class RowDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def backends(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Expert ids as for moe-course replay. Default: a recording, the tiny model on the default prompts."
        ),
    ] = None,
    world_size: Annotated[int, typer.Option("--world-size", "--ranks", help="Ranks.")] = 4,
    transport: Annotated[Carrier, typer.Option(help="Who carries the rows; one_sided needs threads or shm.")] = (
        Carrier.gloo
    ),
    ranks_per_node: Annotated[
        str | None, typer.Option(help="Ranks that share a host: 2, or one number a host: 1,3. Default: two hosts.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of each rank in a pass; of a file, at most.")] = 64,
    experts: Annotated[
        int | None, typer.Option(help="E, if the file does not say. Without a file: a router with random weights.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="K of a router with random weights, in place of a file.")
    ] = None,
    expert_placement_strategy: Annotated[
        Strategy, typer.Option(help="Which rank owns which expert; taken as it is, no fallback.")
    ] = Strategy.linear,
    rows_of: Annotated[
        str | None, typer.Option(help="With a file, whose row is it: contiguous, round_robin, trace.")
    ] = None,
    passes: Annotated[int, typer.Option(help="Passes in a round: of a file, so many, spread over it.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds that are timed; backends take turns in each.")] = 10,
    hidden_size: Annotated[int, typer.Option(help="H.")] = 256,
    dtype: Annotated[RowDtype, typer.Option(help="Of rows and experts.")] = RowDtype.float32,
    dispatch_quant: Annotated[Quant, typer.Option(help="Rows go out quantised, with their scales.")] = Quant.none,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="T_max: places for the rows of a rank. Default: --rows, so that they are used.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of rows, weights and router.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """Send the same rows through every backend. All in one run, side by side; what they really send is counted.

    rows, payload: counted by the transport. bound: what a shape must move for it. bits: are the
    outputs those of allgather_reducescatter? Seconds are dispatch and combine, not the experts. Exit code 3 when
    something else was sent than the bound says, or when outputs differ.

    \b
    moe-course backends
    moe-course backends --transport shm --ranks 4 --rows 256
    moe-course run --trace DIR  and then  moe-course backends DIR
    """
    from rich.console import Console

    from moe_course.cost.backends_job import make_job
    from moe_course.cost.backends_result import build_result
    from moe_course.cost.tables import print_backends

    max_num_tokens = rows if max_num_batched_tokens is None else max_num_batched_tokens
    _check(
        {"world-size": world_size, "rows": rows, "passes": passes, "rounds": rounds}
        | {"hidden-size": hidden_size, "max-num-batched-tokens": max_num_tokens}
        | {name: value for name, value in (("experts", experts), ("top-k", top_k)) if value is not None}
    )
    if file is not None and top_k is not None:
        raise ConfigError(f"--top-k is for a router with random weights; {file} holds its own K, leave it out")
    if file is None and experts is None and top_k is None:
        file, experts = TINY / "routing.npy", MoEConfig.from_pretrained(TINY).n_routed_experts
    if file is None and rows_of is not None:
        raise ConfigError("--rows-of says whose the rows of a file are; a router with random weights has no file")
    console = Console(highlight=False)
    nodes = parse_ranks_per_node(ranks_per_node) or -(-world_size // 2)  # two nodes, for two_hop
    sizes = {
        "world_size": world_size,
        "strategy": expert_placement_strategy.value,
        "ranks_per_node": nodes,
        "hidden_size": hidden_size,
        "inter": 64,
        "dtype": dtype.value,
        "dispatch_quant": None if dispatch_quant == Quant.none else dispatch_quant.value,
        "max_num_tokens": max_num_tokens,
        "rounds": rounds,
        "seed": seed,
    }
    with console.status("reading the routing"):
        job, refused, notes = make_job(file, rows_of, rows, experts, top_k or 8, passes, transport.value, sizes)
    parts = _measure(console, job, transport.value)
    found = build_result(job, parts, refused, notes, transport.value, file)
    print_backends(console, found)
    if json_file is not None:
        from moe_course.targets import write_json

        write_json(json_file, found)
    if found["failures"]:
        raise VerificationFailed("; ".join(found["failures"][:3]))
    return 0


def _check(numbers: dict[str, int]) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"--{name} is {value}, needs to be at least 1")


def _measure(console, job: Job, transport: str) -> list[dict]:
    """What each rank saw. Raises what the ranks raise."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{job.world_size} ranks on {transport}", total=job.rounds + 1)
        if transport == "threads":
            return _in_threads(job, lambda done: bar.update(task, completed=done + 1))
        from moe_course.cost.backend_ranks import write_job
        from moe_course.launch import launch

        with tempfile.TemporaryDirectory(prefix="moe-course-backends-") as folder:
            ended = launch(
                [str(write_job(job, Path(folder))), transport, str(_TIMEOUT_S)],
                job.world_size,
                lambda event: bar.update(task, completed=event["done"] + 1) if event["event"] == "round" else None,
                _TIME_LIMIT_S,
                module="moe_course.cost.backend_ranks",
            )
    if ended.error:
        _raise_again(ended)
    return ended.result["parts"]


def _in_threads(job: Job, on_round) -> list[dict]:
    import torch

    from moe_course.comm.sim import run_threads
    from moe_course.cost.compare import measure

    def run(comm) -> dict:
        with torch.inference_mode():
            return measure(comm, job, on_round if comm.rank == 0 else lambda done: None)

    return run_threads(job.world_size, run, timeout=_TIMEOUT_S)


def _raise_again(ended) -> None:
    """A rank's error, here: the same exit code, the same words."""
    from moe_course import errors

    text = ended.error.removeprefix("error: ")
    kind = next((event["kind"] for event in ended.events if event["event"] == "error"), "")
    found = getattr(errors, kind, RankLost)
    raise (found if found.exit_code == ended.returncode else RankLost)(text)
