"""From vLLM's `--all2all-backend` value to the module that moves the rows, and the reason in words.

Source: vLLM `all2all_utils.py : maybe_make_prepare_finalize` and `config/parallel.py`. Built in: notebook 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec

from moe_course.backends.capabilities import (
    KNOWN_BACKENDS,
    OLD_NAMES,
    SHAPES,
    current_name,
    names_of,
    shape_of,
    upstream_hidden_size,
)
from moe_course.errors import BackendUnavailable, ConfigError

#: Values of `--all2all-backend`.
AVAILABLE = (*KNOWN_BACKENDS, *OLD_NAMES)
#: Values that vLLM hands to a library: name -> Python package.
VENDOR_PACKAGES = {name: known.package for name, known in KNOWN_BACKENDS.items() if known.package}
#: Backends for which each TP rank dispatches a slice of the rows (vLLM `use_sequence_parallel_moe`).
SEQUENCE_PARALLEL_BACKENDS = frozenset(name for name, known in KNOWN_BACKENDS.items() if known.sequence_parallel)


@dataclass(frozen=True)
class Selection:
    """The backend that runs, and why.

    Attributes:
        name: key of `moe_course.backends.BACKENDS`; the name asked for where that is refused.
        requested: value of `--all2all-backend`.
        reason: why this one, a sentence without its point.
        warning: what vLLM warns of, or None.
    """

    name: str
    requested: str
    reason: str
    warning: str | None = None

    @property
    def shape(self) -> str:
        """The module that moves rows this way, also where the name is a library's."""
        return shape_of(self.name)

    @property
    def backend(self) -> str:
        """`requested`, in vLLM's present names."""
        return current_name(self.requested)


def select(
    requested: str = "allgather_reducescatter",
    *,
    use_all2all: bool,
    dp: int = 1,
    pcp: int = 1,
    sequence_parallel: bool = False,
    transport: str = "auto",
    num_experts: int = 0,
    ep_size: int = 1,
    hidden_size: int = 0,
) -> Selection:
    """Choose the backend, in upstream's order: is it used at all, is expert parallelism off, which one is it?

    Args:
        requested: value of `--all2all-backend`.
        use_all2all: True when rows must travel to whole experts (vLLM `use_all2all_kernels`).
        dp, pcp: sizes; with expert parallelism off, rows of their ranks still have to meet all slices.
        sequence_parallel: does each TP rank bring a slice of its rows?
        transport: value of `--transport`; "vendor" asks for the library itself.
        num_experts, ep_size, hidden_size: E, R and H, for what only libraries refuse; 0 where they are not known.

    Raises:
        BackendUnavailable: a name that is not known, or a library that cannot be used.
    """
    name = current_name(requested)
    if name not in KNOWN_BACKENDS:
        raise BackendUnavailable(_unknown(requested))
    if transport == "vendor":
        raise BackendUnavailable(_no_library(requested, num_experts, ep_size, hidden_size))
    warning = f"{requested} is an old name, {name} runs instead" if name != requested else None
    if use_all2all:
        shape = shape_of(name)
        slices = ", from each TP rank its slice" if sequence_parallel else ""
        if SHAPES[shape].over_ep:
            reason = f"rows travel over the EP group to the ranks that own their experts{slices}"
        else:
            reason = f"rows travel between {_axis(dp)} ranks{slices}"
        return Selection(shape, requested, reason, warning)
    if dp > 1 or pcp > 1:
        fallback = "" if dp == 1 else "; vLLM says: Falling back to AllGather+ReduceScatter dispatch/combine"
        reason = (
            "expert parallelism is off: every rank holds a slice of each expert, so the rows of all "
            f"{_axis(dp)} ranks have to meet all slices{fallback}"
        )
        return Selection("allgather_reducescatter", requested, reason, warning)
    return Selection("no_dp_ep", requested, f"no rows travel (dp = pcp = 1), so {name} is not used", warning)


def _axis(dp: int) -> str:
    return "data-parallel" if dp > 1 else "prefill-context-parallel"


def _unknown(requested: str) -> str:
    if requested != "no_dp_ep" and requested in SHAPES:
        return f"all2all backend {requested!r} is a shape; its names are {', '.join(names_of(requested))}"
    text = f"all2all backend {requested!r} is not known, choose from: {', '.join(AVAILABLE)}"
    if requested == "no_dp_ep":
        return f"{text}; no_dp_ep runs by itself where no row has to travel"
    meant = get_close_matches(requested, AVAILABLE, n=1)
    return text + "".join(f"; did you mean {name}?" for name in meant)


def _same_way(name: str) -> str:
    return "the same way" + (" between ranks of one node" if KNOWN_BACKENDS[name].across_nodes else "")


def _no_library(requested: str, num_experts: int, ep_size: int, hidden_size: int) -> str:
    """Why `--transport vendor` cannot be: the first thing that is missing, in the order in which a start meets it."""
    name = current_name(requested)
    known = KNOWN_BACKENDS[name]
    if known.package is None:
        same = [other for other in names_of(known.shape) if other in VENDOR_PACKAGES]
        return (
            f"--transport vendor asks for a library, and {name} is not the name of one; use --transport auto, or "
            + (f"{same[0]}, whose rows go {_same_way(same[0])}" if same else f"one of {', '.join(VENDOR_PACKAGES)}")
        )
    ours = f"without --transport vendor, {known.shape} moves the rows {_same_way(name)}"
    if find_spec(known.package) is None:
        version = ", version 2 or newer" if name == "deepep_v2" else ""
        return (
            f"all2all backend {requested!r} needs the package {known.package}{version}, which is not installed here; "
            f"install it on every node; {ours}"
        )
    if known.uneven_experts is False and num_experts % ep_size:
        return (
            f"all2all backend {requested!r} of {known.package} needs E % R = 0, and there are {num_experts} experts on "
            f"{ep_size} ranks; {ours}"
        )
    try:
        upstream_hidden_size(name, hidden_size)
    except ConfigError as error:
        return f"{error}; {ours}"
    return (
        f"all2all backend {requested!r}: the package {known.package} is installed, and this version has no code that "
        f"calls it; {ours}"
    )
