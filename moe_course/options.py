"""What a run is asked to do, checked before anything starts. Does not import torch.

Built in: notebook 13.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moe_course.config import MoEConfig
from moe_course.errors import BackendUnavailable, ConfigError

#: The model that comes with the package.
TINY = Path(__file__).parent / "glm" / "tiny"
DEFAULT_PROMPTS = (
    "def add(a, b):\n    return ",
    "    try:\n        value = int(text)\n    except ",
    "def größe(länge):\n    return ",
    "class Stack:\n    def push(self, item):\n        ",
)
DEFAULT_RANKS = 4  # on a machine without GPUs


@dataclass(frozen=True)
class RunOptions:
    """The options of `moe-course run`. `world_size` and `data_parallel_size` of None are worked out."""

    model: Path = TINY
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    max_new_tokens: int = 32
    world_size: int | None = None
    data_parallel_size: int | None = None
    enable_expert_parallel: bool = True
    all2all_backend: str = "allgather_reducescatter"
    expert_placement_strategy: str = "linear"
    device: str = "auto"
    transport: str = "auto"
    dtype: str = "auto"
    temperature: float = 0.0
    seed: int = 0
    stop_at_eos: bool = False
    check: bool = False
    trace: Path | None = None
    trace_values: bool = False
    json_file: Path | None = None
    timeout: float = 600.0
    exchange_timeout: float = 60.0

    def resolved_world_size(self) -> int:
        """Ranks of the run: asked for, set by torchrun, one per GPU, or 4. Raises ConfigError on contradiction."""
        asked, dp = self.world_size, self.data_parallel_size
        for name, value in (("--world-size", asked), ("--data-parallel-size", dp)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, needs to be at least 1")
        if asked is not None and dp is not None and asked != dp:
            raise ConfigError(f"--world-size {asked} is not --data-parallel-size {dp}; give one of them")
        started = os.environ["WORLD_SIZE"] if started_by_torchrun() else None
        wanted = asked or dp
        if started is not None and wanted is not None and int(started) != wanted:
            raise ConfigError(f"torchrun started {started} ranks, the options ask for {wanted}")
        return int(started) if started else wanted or (self.device != "cpu" and visible_gpus()) or DEFAULT_RANKS

    def check_against(self, config: MoEConfig, prompt_lengths: list[int]) -> None:
        """Everything that can be wrong before a process starts. Raises ConfigError, BackendUnavailable."""
        world_size = self.resolved_world_size()
        if not self.enable_expert_parallel and world_size > 1:
            raise ConfigError(
                f"{world_size} ranks without --enable-expert-parallel would cut every expert's matrices, "
                "which this version does not run; use --world-size 1 or leave expert parallelism on"
            )
        if config.n_routed_experts < world_size:
            raise ConfigError(
                f"{config.n_routed_experts} experts cannot be spread over {world_size} EP ranks; "
                f"use at most --world-size {config.n_routed_experts}"
            )
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}, needs to be at least 1")
        if self.temperature < 0:
            raise ConfigError(f"--temperature is {self.temperature}, needs to be 0 (greedy) or more")
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
        if self.transport in ("threads", "shm", "vendor"):
            raise BackendUnavailable(f"--transport {self.transport} does not carry a run here; use auto, gloo or nccl")
        if self.trace_values and self.trace is None:
            raise ConfigError("--trace-values needs --trace DIR")
        for name, path in (("--json", self.json_file), ("--trace", self.trace)):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"{name} {path}: folder {path.parent} does not exist")
            if path is not None and not os.access(path if path.is_dir() else path.parent, os.W_OK):
                raise ConfigError(f"{name} {path}: cannot write there")


def started_by_torchrun() -> bool:
    """Is this process a rank? A stray RANK from some other tool is not enough."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt a line, or for `.jsonl` one JSON string (or object with "prompt") a line. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts-file {path} cannot be read: {error}") from None
    if path.suffix != ".jsonl":
        return tuple(lines)
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            prompts.append(value["prompt"] if isinstance(value, dict) else value)
        except (json.JSONDecodeError, KeyError) as error:
            raise ConfigError(f"--prompts-file {path}, line {number}: {error}") from None
        if not isinstance(prompts[-1], str):
            raise ConfigError(f"--prompts-file {path}, line {number}: expected a string, got {prompts[-1]!r}")
    return tuple(prompts)


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
