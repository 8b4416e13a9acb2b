"""From vLLM's `--all2all-backend` value to the module that moves the rows, and the reason in words.

Source: vLLM `all2all_utils.py : maybe_make_prepare_finalize` and `config/parallel.py`. Built in: notebook 10.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_course.errors import BackendUnavailable

#: Names that vLLM replaces by the default, with a warning.
OLD_NAMES = {"naive": "allgather_reducescatter", "pplx": "allgather_reducescatter"}
#: Values of `--all2all-backend` that run here.
AVAILABLE = ("allgather_reducescatter", *OLD_NAMES)


@dataclass(frozen=True)
class Selection:
    """The backend that runs, and why."""

    name: str
    reason: str
    warning: str | None = None


def select(requested: str = "allgather_reducescatter", *, use_all2all: bool) -> Selection:
    """Choose the backend.

    Args:
        requested: value of `--all2all-backend`.
        use_all2all: True when rows must travel (vLLM `use_all2all_kernels`).

    Raises:
        BackendUnavailable: a name that does not run here.
    """
    if requested not in AVAILABLE:
        raise BackendUnavailable(
            f"all2all backend {requested!r} does not run here, choose from: {', '.join(AVAILABLE)}"
        )
    name = OLD_NAMES.get(requested, requested)
    warning = f"{requested} is an old name, {name} runs instead" if name != requested else None
    if not use_all2all:
        return Selection("no_dp_ep", f"no rows travel (dp = pcp = 1), so {name} is not used", warning)
    return Selection(name, "rows travel between data-parallel ranks", warning)
