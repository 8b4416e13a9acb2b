"""What can travel how: the traffic shapes of this package, and vLLM's backends that they stand for. Data, no code.

A shape is one module of this folder. A backend is a value of `--all2all-backend`: a library's kernels in vLLM, here
the shape that moves the same rows between ranks of one node. Across nodes some libraries go another way; that is
`across_nodes`. What a backend does with quantised rows is in `moe_course.quant`: `when(name, fmt)`.

Source: vLLM `modular_kernel.py`, `prepare_finalize/*.py`, `all2all.py`, `all2all_utils.py`, `config/parallel.py`,
`envs.py`; DeepEP `deep_ep/buffer.py : Buffer.dispatch, combine` (on to `internode_*` with more than 8 ranks),
`internode.cu : combine` (the forwarder adds); MoRI `internode_v1.hpp`, which vLLM takes with several nodes.
Built in: notebook 10.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_course.errors import ConfigError

#: Hidden sizes that DeepEP's and NIXL's low-latency kernels are compiled for (`SUPPORTED_HIDDEN_SIZES`).
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
#: Names that vLLM replaces by another one, with a warning.
OLD_NAMES = {
    "naive": "allgather_reducescatter",
    "pplx": "allgather_reducescatter",
    "flashinfer_all2allv": "flashinfer_nvlink_two_sided",
}


@dataclass(frozen=True)
class Shape:
    """How one module moves rows.

    Attributes:
        layout: what the experts get: "rows" (one per token), "routes" (one per token and expert), "padded".
        weights_applied_by: "experts", "source" (the rank that sent the row) or "combine".
        output_is_reduced: is a row complete after combine, over the group that it travelled in?
        over_ep: rows go to owners, over the whole EP group; otherwise to the ranks that lack them.
        fixed: are the buffers of the same size whatever the router said? Needs a T_max.
        travels: which rows leave a rank; `formula`: how many, per token and direction, if every expert is as likely.
        home: what comes back, and who adds up; goes after "Over EP".
    """

    layout: str
    weights_applied_by: str
    output_is_reduced: bool
    over_ep: bool
    fixed: bool
    travels: str
    formula: str
    home: str


_ROUTES = "K * (1 - 1/R)"
_RANKS = "(R - 1) * (1 - C(E - E/R, K) / C(E, K))"
_PARTIALS = "each owner sends one partial sum per row home, and the source adds them in rank order"

#: Module of `moe_course.backends` -> its shape.
SHAPES = {
    "no_dp_ep": Shape("rows", "experts", False, False, False, "no row leaves its rank", "0", "nothing travels"),
    "allgather_reducescatter": Shape(
        "rows", "experts", True, False, False, "every row goes to every other rank of its group", "R - 1",
        "a reduce-scatter brings every rank its rows, summed",
    ),
    "all_to_all": Shape(
        "routes", "source", True, True, False, "a copy for each route whose expert is elsewhere", _ROUTES,
        "one raw output per route comes home; the source weights and adds them",
    ),
    "high_throughput": Shape(
        "rows", "experts", True, True, False, "one copy for each other rank that owns some of a row's experts", _RANKS,
        _PARTIALS,
    ),
    "low_latency": Shape(
        "padded", "combine", True, True, True,
        "a copy for each route, to a place kept for it, T_max for each expert and source, so nobody asks how many come",
        _ROUTES, "one raw output per route comes home; combine weights and adds them",
    ),
    "two_hop": Shape(
        "rows", "experts", True, True, False,
        "one copy for each other node that owns some of a row's experts, forwarded inside the node to each owner",
        "(N - 1) * (1 - C(E - E/N, K) / C(E, K))", _PARTIALS,
    ),
    "one_sided": Shape(
        "rows", "experts", True, True, True,
        "one copy, written into the memory of each other rank that owns some of a row's experts", _RANKS,
        "each owner writes one partial sum per row into the source's memory, which adds them in rank order",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class KnownBackend:
    """A value of `--all2all-backend`, as vLLM has it.

    Attributes:
        shape: module of this package that stands for it, as long as all ranks are on one node.
        package: Python package that vLLM hands the rows to; None when torch's collectives carry them.
        source: where it is upstream.
        format: activation format, "Standard" or "BatchedExperts" (`[E_local, T, H]`).
        receives: what a rank gets upstream.
        weights_applied_by, output_is_reduced: upstream; without reduction the TP ranks still owe an all-reduce.
        combine_dtype: the only dtype its combine takes upstream, None for any.
        hidden_sizes: the only ones its kernels know; empty for any. hidden_bytes: a row is a multiple of this.
        uneven_experts: does it work with E % R != 0 upstream? None: not known. Here all shapes do.
        sequence_parallel: may TP ranks take slices of the rows (`use_sequence_parallel_moe`)?
        round_robin: has it routing tables for round-robin placement?
        cuda_graph: may a captured graph hold it? None where vLLM does not say.
        default_max_num_batched_tokens: with EP and dp > 1 (`use_batched_dp_moe`); None keeps the engine's.
        fault_tolerance: can it mask a lost rank (`query_active_mask`)?
        across_nodes: how rows go upstream when ranks span nodes; empty where that is no other way, or not known.
        instead: for names of this package, who does it in vLLM, a sentence without its point.
    """

    shape: str
    package: str | None
    source: str
    receives: str
    format: str = "Standard"
    weights_applied_by: str = "experts"
    output_is_reduced: bool = True
    combine_dtype: str | None = None
    hidden_sizes: tuple[int, ...] = ()
    hidden_bytes: int = 1
    uneven_experts: bool | None = False
    sequence_parallel: bool = True
    round_robin: bool = False
    cuda_graph: bool | None = None
    default_max_num_batched_tokens: int | None = None
    fault_tolerance: bool = False
    across_nodes: str = ""
    instead: str = ""

    @property
    def in_vllm(self) -> bool:
        """Is it a value of vLLM's flag, too?"""
        return not self.instead


_FORWARDS = (
    "a row goes once to each other node (DeepEP takes 8 ranks for one), which hands it on, and one sum for each node "
    "comes home; here that is two_hop with --reduce-in-node"
)
#: The reader of the variable says 0, its annotation says True (vllm-project/vllm#54281).
_IF_HYBRID = (
    "rows go as in two_hop only with VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE=1; vLLM's default is 0, and then a row goes to "
    "each rank, as in high_throughput"
)

_DEEPEP = {"package": "deep_ep", "combine_dtype": "bfloat16"}
_BATCHED = {
    "shape": "low_latency",
    "format": "BatchedExperts",
    "weights_applied_by": "combine",
    "hidden_sizes": LOW_LATENCY_HIDDEN_SIZES,
    "round_robin": True,
    "cuda_graph": True,
    "default_max_num_batched_tokens": 256,
    "fault_tolerance": True,
}
_MORI = {
    "shape": "high_throughput",
    "package": "mori",
    "source": "all2all.py : MoriAll2AllManager",
    "receives": "the rows sent to it, and how many",
    "across_nodes": _FORWARDS,
}
_OURS = {"package": None, "uneven_experts": True}

#: Value of `--all2all-backend` -> what it is. Old names are in `OLD_NAMES`.
KNOWN_BACKENDS = {
    "allgather_reducescatter": KnownBackend(
        "allgather_reducescatter", None, "all2all.py : AgRsAll2AllManager", "all rows of the group, in rank order",
        output_is_reduced=False, uneven_experts=True, cuda_graph=True,
    ),
    "deepep_high_throughput": KnownBackend(
        "high_throughput", source="all2all.py : DeepEPHTAll2AllManager", receives="rows with an expert here",
        hidden_bytes=512, cuda_graph=False, across_nodes=_FORWARDS, **_DEEPEP,
    ),
    "deepep_low_latency": KnownBackend(
        source="all2all.py : DeepEPLLAll2AllManager", receives="[E_local, T_max * R, H] and a count per expert",
        **_BATCHED, **_DEEPEP,
    ),
    "deepep_v2": KnownBackend(
        "two_hop", source="all2all.py : DeepEPV2All2AllManager", receives="rows with an expert here, or one per route",
        hidden_bytes=512, sequence_parallel=False, cuda_graph=True,
        across_nodes=_IF_HYBRID, **_DEEPEP,
    ),
    "mori_high_throughput": KnownBackend(**_MORI),
    "mori_low_latency": KnownBackend(**_MORI),
    "nixl_ep": KnownBackend(
        package="nixl_ep", source="all2all.py : NixlEPAll2AllManager",
        receives="[E_local, T_max * largest R, H] and a count per expert", **_BATCHED,
    ),
    "flashinfer_nvlink_two_sided": KnownBackend(
        "high_throughput", "flashinfer", "all2all.py : FlashInferNVLinkTwoSidedManager", "rows from all ranks",
        sequence_parallel=False, uneven_experts=None,
    ),
    "flashinfer_nvlink_one_sided": KnownBackend(
        "one_sided", "flashinfer", "all2all.py : FlashInferNVLinkOneSidedManager",
        "[R * largest number of rows, H], unused rows with id -1", uneven_experts=None,
    ),
    "all_to_all": KnownBackend(
        "all_to_all", source="torch/distributed/distributed_c10d.py : all_to_all_single", receives="one row per route",
        weights_applied_by="source", instead="it is what plain all-to-all code does", **_OURS,
    ),
    "two_hop": KnownBackend(
        "two_hop", source="deep_ep/buffer.py : Buffer.internode_dispatch", receives="rows with an expert here",
        instead="with --reduce-in-node it is what deepep_high_throughput does across nodes", **_OURS,
    ),
}  # fmt: skip


def current_name(requested: str) -> str:
    """The name that vLLM works with: an old one is replaced before anything is derived from it."""
    return OLD_NAMES.get(requested, requested)


def shape_of(name: str) -> str:
    """The module that stands for a backend; a name that is not known stays as it is."""
    known = KNOWN_BACKENDS.get(current_name(name))
    return known.shape if known else name


def names_of(shape: str) -> list[str]:
    """All values of `--all2all-backend` that a module stands for."""
    return [name for name, known in KNOWN_BACKENDS.items() if known.shape == shape]


def across_nodes(names: Iterable[str] = tuple(KNOWN_BACKENDS)) -> list[str]:
    """What these backends do otherwise in vLLM when ranks span nodes: one sentence for all that do the same."""
    ways: dict[str, list[str]] = {}
    for name in names:
        if KNOWN_BACKENDS[name].across_nodes:
            ways.setdefault(KNOWN_BACKENDS[name].across_nodes, []).append(name)
    return [f"across nodes, vLLM's {', '.join(alike)}: {way}" for way, alike in ways.items()]


def upstream_hidden_size(name: str, hidden_size: int, itemsize: int = 2) -> int:
    """What vLLM rounds H up to for a backend, with zeros. Source: `maybe_roundup_layer_hidden_size`.

    Raises ConfigError when its kernels know no size that large (a ValueError upstream).
    """
    known = KNOWN_BACKENDS[current_name(name)]
    if known.hidden_sizes:
        fitting = [size for size in known.hidden_sizes if size >= hidden_size]
        if not fitting:
            raise ConfigError(
                f"hidden_size {hidden_size} is too large for {name} upstream, its largest is {known.hidden_sizes[-1]}; "
                "choose another backend"
            )
        return fitting[0]
    return -(-hidden_size * itemsize // known.hidden_bytes) * known.hidden_bytes // itemsize
