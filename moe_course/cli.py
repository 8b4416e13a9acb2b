"""The command line: `moe-course run`, `moe-course doctor`.

Flags are vLLM's where vLLM has them. Errors are one line on stderr. Exit codes: 2 usage, 3 verification failed,
4 mismatch between ranks, 5 lost rank or time-out, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moe_course.config import MoEConfig
from moe_course.errors import MoECourseError
from moe_course.options import DEFAULT_PROMPTS, TINY, RunOptions, read_prompts, started_by_torchrun

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Expert parallelism in mixture-of-experts models: run it, trace it, check it.",
)


#: Base of everything typer says about wrong flags and values.
UsageError = typer.BadParameter.__base__


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Strategy(StrEnum):
    linear = "linear"
    round_robin = "round_robin"


class Transport(StrEnum):
    auto = "auto"
    threads = "threads"
    gloo = "gloo"
    nccl = "nccl"
    shm = "shm"
    vendor = "vendor"


@app.command(
    epilog="Exit codes: 2 usage, 3 verification failed, 4 ranks disagree, 5 lost rank or time-out, 130 Ctrl-C."
)
def run(
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeat it for several prompts.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="One prompt a line; .jsonl: one JSON string a line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 32,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks: data parallel with expert parallelism. Default: one per GPU, else 4.")
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option(help="Data-parallel ranks; the same as --world-size here.")
    ] = None,
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel/--no-enable-expert-parallel", help="Spread whole experts over the ranks."
        ),
    ] = True,
    all2all_backend: Annotated[
        str, typer.Option(help="How rows travel: allgather_reducescatter (also naive, pplx).")
    ] = "allgather_reducescatter",
    expert_placement_strategy: Annotated[
        Strategy, typer.Option(help="Which rank owns which expert.")
    ] = Strategy.linear,
    model: Annotated[
        Path, typer.Option(help="Folder with config.json and safetensors. Default: the tiny model.", show_default=False)
    ] = TINY,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
    transport: Annotated[
        Transport, typer.Option(help="What carries the rows; auto: nccl on GPUs, gloo on CPUs.")
    ] = Transport.auto,
    dtype: Annotated[Dtype, typer.Option(help="auto: float32 on CPUs, bfloat16 on GPUs.")] = Dtype.auto,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy. Sampling does not depend on the number of ranks.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="End a prompt at the end-of-text token.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the untouched one-process model.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Folder for the trace: every route of every token.")] = None,
    trace_values: Annotated[bool, typer.Option("--trace-values", help="Also store contributions and outputs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures of the run.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until the whole run is ended.")] = 600.0,
    exchange_timeout: Annotated[float, typer.Option(help="Seconds a rank waits for its peers in one exchange.")] = 60.0,
) -> int:
    """Run a model expert-parallel on real text.

    Starts its own ranks under torchrun. Prompt i goes to rank i modulo the number of ranks.

    \b
    moe-course run --check --prompt "def add(a, b):"
    moe-course run --world-size 3 --prompts-file prompts.jsonl --json out.json --trace trace/
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
        data_parallel_size=data_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        all2all_backend=all2all_backend,
        expert_placement_strategy=expert_placement_strategy.value,
        device=device.value,
        transport=transport.value,
        dtype=dtype.value,
        temperature=temperature,
        seed=seed,
        stop_at_eos=stop_at_eos,
        check=check,
        trace=trace,
        trace_values=trace_values,
        json_file=json_file,
        timeout=timeout,
        exchange_timeout=exchange_timeout,
    )
    if started_by_torchrun():  # this is a rank
        from moe_course.run import rank_main

        return rank_main(options)
    return _launch(options)


@app.command()
def doctor() -> int:
    """Say which parts of the course work on this machine, and how to get the rest."""
    from moe_course.doctor import doctor as examine

    return examine()


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        code = app(args=argv, prog_name="moe-course", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UsageError as error:
        print(f"error: {error.format_message().replace('Value error, ', '')}", file=sys.stderr)
        return 2
    except MoECourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _launch(options: RunOptions) -> int:
    from rich.console import Console

    from moe_course.console import RunDisplay, print_result
    from moe_course.launch import launch
    from moe_course.tokenizer import load_tokenizer

    if options.all2all_backend != RunOptions.all2all_backend:
        from moe_course.backends.select import select

        select(options.all2all_backend, use_all2all=True)
    config = MoEConfig.from_pretrained(options.model)
    tokenizer = load_tokenizer(options.model, config)
    options.check_against(config, [len(tokenizer.encode(text)) for text in options.prompts])
    world_size = options.resolved_world_size()
    signal.signal(signal.SIGTERM, _interrupt)  # `timeout` and `kill` clean up like Ctrl-C
    console = Console()
    display = RunDisplay(console, options.prompts, tokenizer, world_size, options.max_new_tokens)
    argv = [*_passed_on(options), f"--world-size={world_size}"]
    try:
        with display:
            ended = launch(argv, world_size, display.on_event, options.timeout)
    except KeyboardInterrupt:
        print("error: interrupted, all ranks were ended", file=sys.stderr)
        return 130
    if ended.result is not None:
        print_result(ended.result, console)
    if ended.error:
        print(ended.error, file=sys.stderr)
        if options.json_file and ended.result is None:
            from moe_course.result import SCHEMA, write_json

            with contextlib.suppress(MoECourseError):  # that may be what failed
                write_json(options.json_file, {"schema": SCHEMA, "error": ended.error, "verdict": "failed"})
    return ended.returncode


def _interrupt(number, frame) -> None:
    raise KeyboardInterrupt


def _passed_on(options: RunOptions) -> list[str]:
    """The options again as arguments for the ranks."""
    argv = [f"--prompt={text}" for text in options.prompts]
    argv += [
        f"--model={options.model}",
        f"--max-new-tokens={options.max_new_tokens}",
        f"--all2all-backend={options.all2all_backend}",
        f"--expert-placement-strategy={options.expert_placement_strategy}",
        f"--device={options.device}",
        f"--transport={options.transport}",
        f"--dtype={options.dtype}",
        f"--temperature={options.temperature}",
        f"--seed={options.seed}",
        f"--exchange-timeout={options.exchange_timeout}",
        "--check" if options.check else "--no-check",
        "--enable-expert-parallel" if options.enable_expert_parallel else "--no-enable-expert-parallel",
    ]
    argv += ["--stop-at-eos"] * options.stop_at_eos + ["--trace-values"] * options.trace_values
    argv += [f"--trace={options.trace}"] if options.trace else []
    return argv + ([f"--json={options.json_file}"] if options.json_file else [])


if __name__ == "__main__":
    sys.exit(main())
