"""vLLM's parallel flags, and one rule for what they leave open. Does not import torch.

Built in: notebook 04.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moe_course.errors import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """vLLM's parallel flags, by its names. Sizes are numbers of ranks.

    One default is another: `enable_expert_parallel` is True here and False in vLLM, since expert parallelism is what
    this package is about. So `ParallelConfig(tensor_parallel_size=2)` spreads whole experts, where vLLM and this
    package's command line (`-tp 2`) cut each expert in two; give False to say what they mean. `parallel_config` follows
    the command line's rule.

    `sequence_parallel_moe` of None means: as vLLM derives it (it has no such flag); False turns it off.
    `ranks_per_node` says which EP ranks share a host: one number for all hosts (the last has the remainder), a number
    for each host, or 0 for one host.
    `external_data_parallel_size` counts copies of the whole deployment that share nothing but the rank numbers.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = True  # vLLM: False
    all2all_backend: str = "allgather_reducescatter"
    expert_placement_strategy: str = "linear"
    external_data_parallel_size: int = 1
    sequence_parallel_moe: bool | None = None
    ranks_per_node: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "prefill_context", "pipeline", "external_data"):
            size = getattr(self, f"{name}_parallel_size")
            if size < 1:
                raise ConfigError(f"{name}_parallel_size is {size}, needs to be at least 1")

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sizes of `AXES`, in that order."""
        return (
            self.external_data_parallel_size,
            self.data_parallel_size,
            self.pipeline_parallel_size,
            self.prefill_context_parallel_size,
            self.tensor_parallel_size,
        )

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def use_sequence_parallel_moe(self) -> bool:
        """Does each TP rank take a slice of the rows around a sparse layer? (vLLM's property of this name.)"""
        from moe_course.backends.capabilities import current_name  # its package imports torch
        from moe_course.backends.select import SEQUENCE_PARALLEL_BACKENDS

        backend = current_name(self.all2all_backend)
        derived = (
            self.enable_expert_parallel
            and self.tensor_parallel_size > 1
            and self.data_parallel_size > 1
            and backend in SEQUENCE_PARALLEL_BACKENDS
        )
        if self.sequence_parallel_moe and not derived:
            raise ConfigError(
                "sequence-parallel MoE needs expert parallelism, tensor_parallel_size > 1, data_parallel_size > 1 and "
                f"a backend that takes it; here expert parallelism is {'on' if self.enable_expert_parallel else 'off'},"
                f" the sizes are {self.tensor_parallel_size} and {self.data_parallel_size}, the backend is {backend}"
            )
        return derived and self.sequence_parallel_moe is not False

    @property
    def use_all2all(self) -> bool:
        """Does the EP group get an all-to-all manager? (vLLM's property; not the predicate of the MoE layers.)"""
        return (
            self.data_parallel_size > 1
            or self.use_sequence_parallel_moe
            or (self.enable_expert_parallel and self.prefill_context_parallel_size > 1)
        )


def parallel_config(
    *,
    world_size: int | None = None,
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    prefill_context_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    external_data_parallel_size: int = 1,
    enable_expert_parallel: bool | None = None,
    all2all_backend: str = "allgather_reducescatter",
    expert_placement_strategy: str = "linear",
    sequence_parallel_moe: bool | None = None,
    ranks_per_node: int | tuple[int, ...] = 0,
    default_world_size: int | None = None,
) -> ParallelConfig:
    """Fill in what the flags leave open. None is a flag that was not given.

    * `--world-size N` alone is N data-parallel ranks with expert parallelism, the course's usual case.
    * With a size flag it is vLLM: sizes not given are 1, expert parallelism is off unless asked for.
    * With both, N is the product of all sizes, and a data-parallel size that was not given follows from it.
    * Without any of them, `default_world_size` counts as `--world-size`.

    External copies do not decide about expert parallelism: N ranks in two copies are DP N / 2 with EP.

    Raises ConfigError for a size below 1 and for sizes that do not multiply to the world.
    """
    sizes = {
        "--tensor-parallel-size": tensor_parallel_size,
        "--data-parallel-size": data_parallel_size,
        "--prefill-context-parallel-size": prefill_context_parallel_size,
        "--pipeline-parallel-size": pipeline_parallel_size,
    }
    copies = {"--external-data-parallel-size": external_data_parallel_size}
    for name, value in {"--world-size": world_size, **sizes, **copies}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, needs to be at least 1")
    if external_data_parallel_size == 1:
        copies = {}
    given = {name: value for name, value in sizes.items() if value is not None}
    ranks = f"--world-size {world_size}"
    if world_size is None and not given and default_world_size is not None:
        world_size, ranks = default_world_size, f"the default of {default_world_size} ranks"
    if world_size is not None:
        given["--data-parallel-size"] = _data_parallel_size(world_size, ranks, given | copies)
    if enable_expert_parallel is None:
        enable_expert_parallel = all(value is None for value in sizes.values())

    return ParallelConfig(
        tensor_parallel_size=tensor_parallel_size or 1,
        data_parallel_size=given.get("--data-parallel-size", 1),
        prefill_context_parallel_size=prefill_context_parallel_size or 1,
        pipeline_parallel_size=pipeline_parallel_size or 1,
        enable_expert_parallel=enable_expert_parallel,
        all2all_backend=all2all_backend,
        expert_placement_strategy=expert_placement_strategy,
        external_data_parallel_size=external_data_parallel_size,
        sequence_parallel_moe=sequence_parallel_moe,
        ranks_per_node=ranks_per_node,
    )


def _data_parallel_size(world_size: int, ranks: str, given: dict[str, int]) -> int:
    """The data-parallel size that makes all sizes multiply to the world. Raises ConfigError when there is none."""
    product = prod(given.values())
    listed = " * ".join(f"{name} {value}" for name, value in given.items())
    if "--data-parallel-size" in given:
        if product != world_size:
            equals = listed if len(given) == 1 else f"{listed} = {product}"
            others = product // given["--data-parallel-size"]
            cure = f"use --world-size {product}, or leave it out"
            if world_size % others == 0:
                cure = f"use --world-size {product} or --data-parallel-size {world_size // others}"
            raise ConfigError(f"{ranks} is not {equals}; {cure}")
        return given["--data-parallel-size"]
    if world_size % product:
        equals = listed if len(given) == 1 else f"{listed} = {product}"
        below = world_size // product * product
        cure = f"{below} or {below + product}" if below else f"{product}"
        raise ConfigError(f"{ranks} is not a multiple of {equals}; use --world-size {cure}, or other sizes")
    return world_size // product
