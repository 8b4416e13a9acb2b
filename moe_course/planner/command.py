"""`moe-course plan`: from the flags to who holds what, who talks to whom, and why. Starts nothing.

Built in: notebook 04.
"""

from __future__ import annotations

import contextlib
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_course.config import GLM_5_1, MoEConfig
from moe_course.errors import ConfigError, MoECourseError
from moe_course.flags import ParallelConfig, parallel_config
from moe_course.options import DEFAULT_RANKS, TINY, parse_ranks_per_node
from moe_course.planner.document import SCHEMA, dumps, plan_json
from moe_course.run_flags import RanksPerNodeFlag, Strategy, Transport
from moe_course.targets import write_text

if TYPE_CHECKING:
    from moe_course.parallel import Plan

#: Models that are known by name.
MODELS = {"tiny": TINY, "glm-5.1": GLM_5_1}

#: More ranks than this would fill memory and show nothing new.
MOST_RANKS = 2**16


class WeightDtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def plan(
    world_size: Annotated[
        int | None, typer.Option(help=f"Ranks. Alone: data parallel with expert parallelism. Default: {DEFAULT_RANKS}.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share rows and cut matrices.")
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option("--data-parallel-size", "-dp", help="Engines with rows of their own.")
    ] = None,
    prefill_context_parallel_size: Annotated[
        int | None, typer.Option("--prefill-context-parallel-size", "-pcp", help="Ranks that share out a prompt.")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "-pp", help="Stages of layers.")
    ] = None,
    external_data_parallel_size: Annotated[
        int, typer.Option(help="Copies of all this that share nothing; vLLM infers it from the world.")
    ] = 1,
    enable_expert_parallel: Annotated[
        bool | None,
        typer.Option(
            "--enable-expert-parallel/--no-enable-expert-parallel",
            help="Spread whole experts. Default: on with --world-size alone, off with a size, as in vLLM.",
            show_default=False,
        ),
    ] = None,
    sequence_parallel_moe: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel-moe/--no-sequence-parallel-moe",
            help="TP ranks take slices of the rows. Default: as vLLM derives it (it has no such flag).",
            show_default=False,
        ),
    ] = None,
    all2all_backend: Annotated[
        str,
        typer.Option(help="How rows travel, by vLLM's names; all_to_all and two_hop are names of this package."),
    ] = ParallelConfig.all2all_backend,
    transport: Annotated[
        Transport, typer.Option(help="Who is to carry the rows; vendor asks for the library itself.")
    ] = Transport.auto,
    expert_placement_strategy: Annotated[
        Strategy, typer.Option(help="Which rank owns which expert.")
    ] = Strategy.linear,
    ranks_per_node: RanksPerNodeFlag = None,
    model: Annotated[
        str, typer.Option(help="Folder with config.json, a config.json, or a name: tiny, glm-5.1.")
    ] = "tiny",
    dtype: Annotated[WeightDtype, typer.Option(help="Of weights and rows, for sizes in bytes.")] = WeightDtype.bfloat16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Rows of one engine in a step, for buffers.")] = 256,
    rank: Annotated[int | None, typer.Option(help="Show this rank only, in full.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say how every decision came about.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all of it; - is stdout.")] = None,
) -> int:
    """Show who holds which experts and who talks to whom. For any model and number of ranks; starts nothing.

    \b
    moe-course plan --world-size 8 --model glm-5.1
    moe-course plan -tp 2 -dp 4 --enable-expert-parallel --explain
    moe-course plan -tp 8 -dp 16 -pp 8 --enable-expert-parallel --model glm-5.1 --rank 100
    """
    try:
        parallel = parallel_config(
            world_size=world_size,
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            prefill_context_parallel_size=prefill_context_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            external_data_parallel_size=external_data_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            all2all_backend=all2all_backend,
            expert_placement_strategy=expert_placement_strategy.value,
            sequence_parallel_moe=sequence_parallel_moe,
            ranks_per_node=parse_ranks_per_node(ranks_per_node),
            default_world_size=DEFAULT_RANKS,
        )
        if parallel.world_size > MOST_RANKS:
            raise ConfigError(f"{parallel.world_size} ranks are too many to list, the most is {MOST_RANKS}; plan fewer")
        if rank is not None and not 0 <= rank < parallel.world_size:
            raise ConfigError(f"--rank {rank} is not in a world of {parallel.world_size}; ranks begin with 0")
        if max_num_batched_tokens < 1:
            raise ConfigError(f"--max-num-batched-tokens is {max_num_batched_tokens}, needs to be at least 1")
        config = read_model(model)
        found = _make(parallel, config, transport.value)
    except MoECourseError as error:
        if json_file is not None:
            with contextlib.suppress(MoECourseError):  # the first error is the one to report
                _write(json_file, {"schema": SCHEMA, "error": str(error)})
        raise
    sizes = {"model": model, "dtype": dtype.value, "max_num_batched_tokens": max_num_batched_tokens}
    if json_file != Path("-"):
        _show(found, sizes, rank, explain)
    if json_file is not None:
        _write(json_file, plan_json(found, **sizes, ranks=None if rank is None else [rank]))
    if found.refusals:
        raise found.refusals[0]
    return 0


def read_model(name: str) -> MoEConfig:
    """The config behind `--model`: a known name, a JSON file, or a folder with one. Raises ConfigError."""
    known = MODELS.get(name.lower(), Path(name))
    if isinstance(known, MoEConfig):
        return known
    if not os.path.exists(known):
        raise ConfigError(f"--model {name}: no such folder or file; known names: {', '.join(MODELS)}")
    return MoEConfig.from_json(known) if known.is_file() else MoEConfig.from_pretrained(known)


def _make(parallel: ParallelConfig, config: MoEConfig, transport: str) -> Plan:
    """The plan, also one that cannot run. Raises MoECourseError when there is nothing to show."""
    from moe_course.backends.select import AVAILABLE
    from moe_course.errors import BackendUnavailable
    from moe_course.parallel import make_plan

    found = make_plan(parallel, config, strict=False, transport=transport)
    if parallel.all2all_backend not in AVAILABLE:  # no backend of vLLM's or ours: a bad value
        raise next(error for error in found.refusals if isinstance(error, BackendUnavailable))
    return found


def _show(found: Plan, sizes: dict, rank: int | None, explain: bool) -> None:
    from rich.console import Console

    from moe_course.planner.table import print_plan, print_steps

    console = Console(highlight=False)
    print_plan(console, found, **sizes, rank=rank)
    if explain:
        print_steps(console, found)


def _write(file: Path, content: dict) -> None:
    if file == Path("-"):
        sys.stdout.write(dumps(content))
        sys.stdout.flush()
    else:
        try:
            write_text(file, dumps(content))
        except ConfigError as error:
            raise ConfigError(f"--json {error}") from None
