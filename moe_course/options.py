"""What a run is asked to do, checked before anything starts. Does not import torch.

Built in: notebook 13.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError
from moe_course.flags import ParallelConfig, parallel_config
from moe_course.guard.faultspec import FaultSpec, parse_fault, parse_override
from moe_course.prompts import DEFAULT_PROMPTS
from moe_course.targets import check_place, check_targets

#: The model that comes with the package.
TINY = Path(__file__).parent / "glm" / "tiny"
DEFAULT_RANKS = 4  # on a machine without GPUs


#: A report is made from a trace, and ranks that nobody here starts need a folder for it that all of them can see.
NO_FOLDER = "--report needs --trace DIR here: a folder that the ranks of all machines can write to"


@dataclass(frozen=True)
class RunOptions:
    """The options of `moe-course run`. Sizes and switches of None are worked out, see `flags.parallel_config`.

    timeout: seconds a rank waits for its peers in one exchange; warn_after: seconds until it says so;
    time_limit: seconds until the whole run is ended. `faults` and `overrides` break a run on purpose.
    """

    model: Path = TINY
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    max_new_tokens: int = 32
    world_size: int | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    prefill_context_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    sequence_parallel_moe: bool | None = None
    all2all_backend: str = "allgather_reducescatter"
    expert_placement_strategy: str = "linear"
    ranks_per_node: str | None = None
    max_num_batched_tokens: int = 256
    dispatch_quant: str = "none"
    combine_dtype: str = "auto"
    reduce_in_node: bool = False
    static_shapes: bool = False
    device: str = "auto"
    transport: str = "auto"
    dtype: str = "auto"
    temperature: float = 0.0
    seed: int = 0
    stop_at_eos: bool = False
    check: bool = False
    trace: Path | None = None
    trace_values: bool = False
    report: Path | None = None
    stages: Path | None = None  # folder with stages of your own
    json_file: Path | None = None
    timeout: float = 60.0
    warn_after: float = 10.0
    time_limit: float = 600.0
    guard: bool = True
    timings: bool = False
    reference_model: Path | None = None  # for drills: what --check compares with, if not `model`
    faults: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def parallel(self) -> ParallelConfig:
        """All sizes: as asked for, set by torchrun, one rank per GPU, or 4. Raises ConfigError on contradiction."""
        started = int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else None
        config = parallel_config(
            world_size=self.world_size,
            tensor_parallel_size=self.tensor_parallel_size,
            data_parallel_size=self.data_parallel_size,
            prefill_context_parallel_size=self.prefill_context_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            all2all_backend=self.all2all_backend,
            expert_placement_strategy=self.expert_placement_strategy,
            sequence_parallel_moe=self.sequence_parallel_moe,
            ranks_per_node=parse_ranks_per_node(self.ranks_per_node),
            default_world_size=started or (self.device != "cpu" and visible_gpus()) or DEFAULT_RANKS,
        )
        if started is not None and started != config.world_size:
            raise ConfigError(f"torchrun started {started} ranks, the options ask for {config.world_size}")
        return config

    def sizes_are_open(self) -> bool:
        """Was no number of ranks asked for, in any form?"""
        sizes = ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "world_size")
        return all(getattr(self, name) is None for name in sizes)

    def resolved_world_size(self) -> int:
        """Ranks of the run."""
        return self.parallel().world_size

    def check_against(self, config: MoEConfig, prompt_lengths: list[int]) -> None:
        """Everything that can be wrong before a process starts. Raises ConfigError, BackendUnavailable."""
        parallel = self.parallel()
        if parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: pipelines are planned "
                "(moe-course plan) and run only in their drill (moe-course drill pipeline); use 1"
            )
        flat = parallel.world_size
        if parallel.enable_expert_parallel and config.n_routed_experts < flat:
            raise ConfigError(
                f"{config.n_routed_experts} experts cannot be spread over {flat} EP ranks; "
                f"use at most --world-size {config.n_routed_experts}"
            )
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}, needs to be at least 1")
        if self.max_num_batched_tokens < 1:
            raise ConfigError(f"--max-num-batched-tokens is {self.max_num_batched_tokens}, needs to be at least 1")
        if self.temperature < 0:
            raise ConfigError(f"--temperature is {self.temperature}, needs to be 0 (greedy) or more")
        for name, seconds in (("timeout", self.timeout), ("warn-after", self.warn_after)):
            if not 0 < seconds < 1e9:
                raise ConfigError(f"--{name} is {seconds}, needs to be more than 0 and less than 1e9")
        for index, text in enumerate(self.prompts):
            if "\0" in text:
                raise ConfigError(f"prompt {index} holds a NUL character, which no command line carries; leave it out")
        if not self.prompts:
            raise ConfigError("there is no prompt; the prompts file is empty")
        context = config.max_position_embeddings
        for index, length in enumerate(prompt_lengths):
            if context and length + self.max_new_tokens > context:
                raise ConfigError(
                    f"prompt {index} has {length} tokens, with {self.max_new_tokens} new ones "
                    f"{length + self.max_new_tokens}: more than the context of {context}; "
                    "shorten it or lower --max-new-tokens"
                )
        self._check_trace(parallel)
        for rank in [fault.rank for fault in self.fault_specs()] + [rank for rank, *_ in self.parsed_overrides()]:
            if rank >= flat:
                raise ConfigError(f"--fault and --override name rank {rank}, the run has ranks 0 to {flat - 1}")

    def _check_trace(self, parallel: ParallelConfig) -> None:
        if self.trace_values and self.trace is None:
            raise ConfigError("--trace-values needs --trace DIR")
        if self.report is not None and self.trace is None and started_by_torchrun():
            raise ConfigError(NO_FOLDER)
        traced = "--report" if self.trace is None else "--trace"
        if (self.trace or self.report) and not parallel.enable_expert_parallel and parallel.world_size > 1:
            raise ConfigError(
                f"{traced} needs expert parallelism: without it every rank holds a slice of each expert, and a route "
                "has no owner; add --enable-expert-parallel"
            )
        check_targets({"--json": self.json_file, "--report": self.report}, self.trace)
        if self.trace is not None:
            if self.trace.exists() and not self.trace.is_dir():
                raise ConfigError(f"--trace {self.trace}: is a file; name a folder")
            check_place("--trace", self.trace)

    def fault_specs(self) -> list[FaultSpec]:
        return [parse_fault(text) for text in self.faults]

    def parsed_overrides(self) -> list[tuple[int, str, Any]]:
        return [parse_override(text) for text in self.overrides]

    def on_rank(self, rank: int) -> tuple[RunOptions, dict[str, Any]]:
        """The options this rank goes by, and overrides of fields that follow from them (only stated, not acted on)."""
        names = {field.name for field in fields(self)} - {"faults", "overrides", "prompts"}
        mine = {name: value for target, name, value in self.parsed_overrides() if target == rank}
        acted_on = {n: _typed(n, value) for n, value in mine.items() if n in names}
        return replace(self, **acted_on), {n: value for n, value in mine.items() if n not in names}

    def as_arguments(self) -> list[str]:
        """The options as arguments of the rank program: what differs from the defaults."""
        argv = [f"--prompt={text}" for text in self.prompts]
        for option in fields(self):
            value = getattr(self, option.name)
            flag = {"json_file": "json", "faults": "fault", "overrides": "override"}.get(option.name, option.name)
            flag = flag.replace("_", "-")
            if option.name == "prompts" or value is None or value == option.default:
                continue
            if isinstance(value, bool):
                argv.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                argv += [f"--{flag}={item}" for item in (value if isinstance(value, tuple) else (value,))]
        return argv


def _typed(name: str, value: Any) -> Any:
    """A value for an option, from an override. Raises ConfigError for one of the wrong kind."""
    kinds = next(field.type for field in fields(RunOptions) if field.name == name)  # as written: "int | None"
    if value is None and "None" in kinds:
        return None
    if "Path" in kinds:
        return Path(str(value))
    if kinds.startswith("str") and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    wanted = (bool,) if "bool" in kinds else (int, float) if "float" in kinds else (int,) if "int" in kinds else (str,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(f"--override: {name} is {value!r}, needs to be {kinds}")
    return value


def parse_ranks_per_node(text: str | None) -> int | tuple[int, ...]:
    """`2`: two ranks on each host; `1,3`: one on the first, three on the second; None: 0. Raises ConfigError."""
    if text is None:
        return 0
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigError(
            f"--ranks-per-node is {text!r}; write one number for all hosts (2), or one for each host (1,3)"
        )
    return counts[0] if len(counts) == 1 else counts


def started_by_torchrun() -> bool:
    """Is this process a rank? A stray RANK from some other tool is not enough."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def visible_gpus() -> int:
    """NVIDIA GPUs this process may use, without importing torch."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([part for part in chosen.split(",") if part.strip() not in ("", "-1")])
    if not shutil.which("nvidia-smi"):
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
