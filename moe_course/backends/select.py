"""From vLLM's `--all2all-backend` value to the module that moves the rows, and the reason in words.

Source: vLLM `all2all_utils.py : maybe_make_prepare_finalize` and `config/parallel.py`. Built in: notebook 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from moe_course.errors import BackendUnavailable

#: Names that vLLM replaces by the default, with a warning.
OLD_NAMES = {"naive": "allgather_reducescatter", "pplx": "allgather_reducescatter"}
#: Values of `--all2all-backend` that run here.
AVAILABLE = ("allgather_reducescatter", *OLD_NAMES)
#: Values that vLLM hands to a library: name -> Python package.
VENDOR_PACKAGES = {
    "deepep_high_throughput": "deep_ep",
    "deepep_low_latency": "deep_ep",
    "deepep_v2": "deep_ep",
    "mori_high_throughput": "mori",
    "mori_low_latency": "mori",
    "nixl_ep": "nixl_ep",
    "flashinfer_nvlink_two_sided": "flashinfer",
    "flashinfer_nvlink_one_sided": "flashinfer",
}
#: Backends for which vLLM lets each TP rank dispatch a slice of the rows (`use_sequence_parallel_moe`).
SEQUENCE_PARALLEL_BACKENDS = frozenset(
    {
        "allgather_reducescatter",
        "deepep_high_throughput",
        "deepep_low_latency",
        "flashinfer_nvlink_one_sided",
        "mori_high_throughput",
        "mori_low_latency",
        "nixl_ep",
    }
)


@dataclass(frozen=True)
class Selection:
    """The backend that runs, and why."""

    name: str
    reason: str
    warning: str | None = None


def select(
    requested: str = "allgather_reducescatter",
    *,
    use_all2all: bool,
    dp: int = 1,
    pcp: int = 1,
    sequence_parallel: bool = False,
) -> Selection:
    """Choose the backend.

    Args:
        requested: value of `--all2all-backend`.
        use_all2all: True when rows must travel to whole experts (vLLM `use_all2all_kernels`).
        dp, pcp: sizes; with expert parallelism off, rows of their ranks still have to meet all slices.

    Raises:
        BackendUnavailable: a name that does not run here.
    """
    if requested in VENDOR_PACKAGES:
        package = VENDOR_PACKAGES[requested]
        state = "this version does not call" if find_spec(package) else "is not installed here"
        raise BackendUnavailable(
            f"all2all backend {requested!r} needs the package {package}, which {state}; "
            f"choose from: {', '.join(AVAILABLE)}"
        )
    if requested not in AVAILABLE:
        raise BackendUnavailable(
            f"all2all backend {requested!r} does not run here, choose from: {', '.join(AVAILABLE)} "
            f"(vLLM also knows {', '.join(VENDOR_PACKAGES)})"
        )
    name = OLD_NAMES.get(requested, requested)
    warning = f"{requested} is an old name, {name} runs instead" if name != requested else None
    if use_all2all:
        who = "data-parallel" if dp > 1 else "prefill-context-parallel"
        slices = ", from each TP rank its slice" if sequence_parallel else ""
        return Selection(name, f"rows travel between {who} ranks{slices}", warning)
    if dp > 1 or pcp > 1:
        return Selection(
            "allgather_reducescatter",
            "expert parallelism is off: every rank holds a slice of each expert, so the rows of all "
            f"{'data-parallel' if dp > 1 else 'prefill-context-parallel'} ranks have to meet all slices",
            warning,
        )
    return Selection("no_dp_ep", f"no rows travel (dp = pcp = 1), so {name} is not used", warning)
