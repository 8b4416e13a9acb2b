"""`moe-course run`: its flags. They are vLLM's where vLLM has them. `launch_run.py` does what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_course.errors import MoECourseError
from moe_course.launch_run import launch_run, write_failure
from moe_course.nodes import Nodes, slurm_nodes
from moe_course.options import TINY, RunOptions, started_by_torchrun
from moe_course.prompts import DEFAULT_PROMPTS, read_prompts
from moe_course.run_flags import (
    BackendFlag,
    CombineDtypeFlag,
    Device,
    Dtype,
    MaxTokensFlag,
    Quant,
    QuantFlag,
    RanksPerNodeFlag,
    ReduceInNodeFlag,
    StaticShapesFlag,
    Strategy,
    Transport,
    TransportFlag,
)


def run(
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeat it for several prompts.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="One prompt a line; .jsonl: one JSON string a line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 32,
    world_size: Annotated[
        int | None,
        typer.Option(help="Ranks in all. Alone: data parallel, with experts spread over all of them (DP + EP)."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share their rows.")
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option("--data-parallel-size", "-dp", help="Ranks, or groups of ranks, with own prompts.")
    ] = None,
    prefill_context_parallel_size: Annotated[
        int | None,
        typer.Option("--prefill-context-parallel-size", "-pcp", help="Ranks that split the rows of a prompt."),
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "-pp", help="Only in moe-course plan and its drill.")
    ] = None,
    enable_expert_parallel: Annotated[
        bool | None,
        typer.Option(
            "--enable-expert-parallel/--no-enable-expert-parallel",
            help="Spread whole experts over the ranks. With a size flag off unless given, as in vLLM; else on.",
        ),
    ] = None,
    sequence_parallel_moe: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel-moe/--no-sequence-parallel-moe",
            help="TP ranks split the rows of a sparse layer. vLLM has no such flag: it derives it, and so does this.",
        ),
    ] = None,
    all2all_backend: BackendFlag = "allgather_reducescatter",
    expert_placement_strategy: Annotated[
        Strategy, typer.Option(help="Which rank owns which expert.")
    ] = Strategy.linear,
    ranks_per_node: RanksPerNodeFlag = None,
    max_num_batched_tokens: MaxTokensFlag = 256,
    dispatch_quant: QuantFlag = Quant.none,
    combine_dtype: CombineDtypeFlag = Dtype.auto,
    reduce_in_node: ReduceInNodeFlag = False,
    static_shapes: StaticShapesFlag = False,
    model: Annotated[
        Path, typer.Option(help="Folder with config.json and safetensors. Default: the tiny model.", show_default=False)
    ] = TINY,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
    transport: TransportFlag = Transport.auto,
    dtype: Annotated[Dtype, typer.Option(help="auto: float32 on CPUs, bfloat16 on GPUs.")] = Dtype.auto,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy. Sampling does not depend on the number of ranks.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos/--no-stop-at-eos", help="End a prompt at the end-of-text token.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the untouched one-process model.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Folder for the trace: every route of every token.")] = None,
    trace_values: Annotated[
        bool, typer.Option("--trace-values/--no-trace-values", help="Also store contributions and outputs.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="File for a page of the run (.html): text, player, timeline, load, bytes against the bound."),
    ] = None,
    stages: Annotated[
        Path | None, typer.Option(help="Folder with stages of your own, e.g. my_moe; the rest is the package's.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures of the run.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds a rank waits for its peers in one exchange; then the culprit is named.")
    ] = 60.0,
    warn_after: Annotated[float, typer.Option(help="Seconds in one exchange after which a rank says so.")] = 10.0,
    time_limit: Annotated[float, typer.Option(help="Seconds until the whole run is ended.")] = 600.0,
    guard: Annotated[
        bool,
        typer.Option("--guard/--no-guard", help="Handshake, watchdog, audit and canary. Off: what bare gloo does."),
    ] = True,
    timings: Annotated[
        bool, typer.Option("--timings/--no-timings", help="Print where the time went, the guard's share with it.")
    ] = False,
    nnodes: Annotated[int, typer.Option(help="Machines; start the same command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(help="This machine, from 0.")] = 0,
    master_addr: Annotated[str | None, typer.Option(help="Name or address of machine 0.")] = None,
    master_port: Annotated[int, typer.Option(help="A free port of machine 0.")] = 29500,
    slurm: Annotated[bool, typer.Option("--slurm", help="Take the four above from the Slurm job.")] = False,
    reference_model: Annotated[Path | None, typer.Option(hidden=True)] = None,
    fault: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    override: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> int:
    """Run a model expert-parallel on real text.

    Starts its own ranks under torchrun. Prompt i goes to data-parallel rank i modulo their number.

    \b
    moe-course run --check --prompt "def add(a, b):"
    moe-course run --world-size 3 --prompts-file prompts.jsonl --json out.json --trace trace/
    moe-course run --check --report run.html
    moe-course run -tp 2 -dp 2 --enable-expert-parallel --check
    torchrun --standalone --nproc-per-node 2 -m moe_course.run --check
    """
    prompts = tuple(prompt or ()) + (read_prompts(prompts_file) if prompts_file else ())
    if not prompts and not prompts_file:
        prompts = DEFAULT_PROMPTS
    options = RunOptions(
        model=model,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        world_size=world_size,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        prefill_context_parallel_size=prefill_context_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        sequence_parallel_moe=sequence_parallel_moe,
        all2all_backend=all2all_backend,
        expert_placement_strategy=expert_placement_strategy.value,
        ranks_per_node=ranks_per_node,
        max_num_batched_tokens=max_num_batched_tokens,
        dispatch_quant=dispatch_quant.value,
        combine_dtype=combine_dtype.value,
        reduce_in_node=reduce_in_node,
        static_shapes=static_shapes,
        device=device.value,
        transport=transport.value,
        dtype=dtype.value,
        temperature=temperature,
        seed=seed,
        stop_at_eos=stop_at_eos,
        check=check,
        trace=trace,
        trace_values=trace_values,
        report=report,
        stages=stages,
        json_file=json_file,
        timeout=timeout,
        warn_after=warn_after,
        time_limit=time_limit,
        guard=guard,
        timings=timings,
        reference_model=reference_model,
        faults=tuple(fault or ()),
        overrides=tuple(override or ()),
    )
    if started_by_torchrun():  # this is a rank
        from moe_course.run import rank_main

        return rank_main(options)
    try:
        return launch_run(options, slurm_nodes() if slurm else Nodes(nnodes, node_rank, master_addr, master_port))
    except MoECourseError as error:
        write_failure(options, str(error))
        raise
