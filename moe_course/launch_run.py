"""What `moe-course run` does with its options: check them, start this node's ranks, show what they do.

Built in: notebook 13.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError, MoECourseError
from moe_course.nodes import Nodes
from moe_course.options import NO_FOLDER, RunOptions


def launch_run(options: RunOptions, nodes: Nodes) -> int:
    """Check the options, start this node's ranks, show what they do. Returns the exit code."""
    from rich.console import Console

    from moe_course.console import print_result
    from moe_course.launch import launch
    from moe_course.progress import RunDisplay
    from moe_course.tokenizer import load_tokenizer

    config = MoEConfig.from_pretrained(options.model)
    tokenizer = load_tokenizer(options.model, config)
    if nodes.nnodes > 1 and options.sizes_are_open():
        options = replace(options, world_size=options.resolved_world_size() * nodes.nnodes)
    options.check_against(config, [len(tokenizer.encode(text)) for text in options.prompts])
    world_size = options.resolved_world_size()
    if _worth_planning(options) and not options.overrides:  # a rank may be meant to fail in its own way
        _plan(options, config, nodes)
    signal.signal(signal.SIGTERM, _interrupt)  # `timeout` and `kill` clean up like Ctrl-C
    console = Console()
    display = RunDisplay(console, options.prompts, tokenizer, nodes.processes_here(world_size), options.max_new_tokens)
    argv = options.as_arguments()
    if not any(arg.startswith(("--world-size", "--tensor", "--data", "--prefill")) for arg in argv):
        argv.append(f"--world-size={world_size}")
    if nodes.nnodes > 1:
        where = f"{nodes.master_addr}:{nodes.master_port}"
        console.print(f"node {nodes.node_rank} of {nodes.nnodes}, waiting for all of them to come to {where}")
    try:
        with _trace_of_report(options, nodes) as traced, display:
            ended = launch([*argv, *traced], world_size, display.on_event, options.time_limit, nodes=nodes)
    except KeyboardInterrupt:
        print("error: interrupted, all ranks were ended", file=sys.stderr)
        _say_report(options, nodes, False)
        return 130
    if ended.result is not None:
        print_result(ended.result, console, options.timings)
    elif nodes.node_rank and not ended.error:
        console.print("the ranks of this node are done; texts, figures and verdict are on node 0")
    if ended.error:
        print(ended.error, file=sys.stderr)
        for line in ended.graph:
            print(f"  {line}", file=sys.stderr)
        if ended.result is None:
            write_failure(options, ended.error)
    _say_report(options, nodes, any(event["event"] == "report" for event in ended.events))
    return ended.returncode


@contextlib.contextmanager
def _trace_of_report(options: RunOptions, nodes: Nodes) -> Iterator[list[str]]:
    """Where a report is asked for and no trace, a folder for one that goes when the run is over: as arguments."""
    if options.report is None or options.trace is not None:
        yield []
        return
    if nodes.nnodes > 1:
        raise ConfigError(NO_FOLDER)
    with tempfile.TemporaryDirectory(prefix="moe-course-", ignore_cleanup_errors=True) as folder:
        yield [f"--trace={Path(folder) / 'trace'}"]


def _say_report(options: RunOptions, nodes: Nodes, written: bool) -> None:
    """Where the page is; and that a page which is there is not of this run, when this run wrote none."""
    if options.report is None or nodes.node_rank:
        return
    if written:
        print(f"report     {options.report}: open it in a browser")
    elif options.report.is_file():
        print(f"report     {options.report} is of an earlier run and was left as it is: this run wrote none")


def write_failure(options: RunOptions, error: str) -> None:
    """`--json` is written also when nothing came of the run."""
    if options.json_file:
        from moe_course.result import SCHEMA
        from moe_course.targets import write_json

        with contextlib.suppress(MoECourseError):  # that may be what failed
            content = {"schema": SCHEMA, "error": error.removeprefix("error: "), "verdict": "failed"}
            write_json(options.json_file, content)


def _plan(options: RunOptions, config: MoEConfig, nodes: Nodes) -> None:
    """Raise here, once, what every rank would raise."""
    from moe_course.comm.dist import pick_device
    from moe_course.job import dtype_of
    from moe_course.own_stages import stages_for
    from moe_course.parallel import make_plan
    from moe_course.travel import travel

    plan = make_plan(options.parallel(), config, transport=options.transport)
    device = pick_device(options.device)
    travel(options, plan, device.type, dtype_of(options.dtype, device), nodes.nnodes == 1)
    stages_for(options, plan)


def _worth_planning(options: RunOptions) -> bool:
    """Flags whose mistakes only the plan, or torch, can see; it imports torch, so it is not made for nothing."""
    default = RunOptions()
    names = ("all2all_backend", "enable_expert_parallel", "sequence_parallel_moe", "tensor_parallel_size")
    names += ("data_parallel_size", "prefill_context_parallel_size", "transport", "ranks_per_node", "dispatch_quant")
    names += ("reduce_in_node", "static_shapes", "stages")
    return options.device == "cuda" or any(getattr(options, name) != getattr(default, name) for name in names)


def _interrupt(number, frame) -> None:
    raise KeyboardInterrupt
