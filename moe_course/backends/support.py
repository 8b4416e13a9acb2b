"""Which transport carries which traffic shape, and which one a run takes. Built in: notebook 10."""

from __future__ import annotations

from moe_course.backends.capabilities import SHAPES
from moe_course.errors import BackendUnavailable

#: Who can carry rows: threads of one process, gloo, memory shared by the ranks of one host, NCCL.
TRANSPORTS = ("threads", "gloo", "shm", "nccl")

#: (shape, transport) -> True, or the sentence that refuses it.
SUPPORT: dict[tuple[str, str], bool | str] = {(shape, by): True for shape in SHAPES for by in TRANSPORTS} | {
    ("one_sided", "gloo"): (
        "one_sided writes into the memory of its peers, and gloo has none that ranks share; "
        "use --transport shm with all ranks on one host"
    ),
    ("one_sided", "nccl"): (
        "one_sided writes into the memory of its peers, and NCCL gives no access to it here; "
        "use --device cpu with --transport shm, or another backend"
    ),
}


def check_support(shape: str, transport: str) -> None:
    """Raise BackendUnavailable, with the sentence of the table, for a shape that a transport cannot carry."""
    cell = SUPPORT.get((shape, transport), True)
    if cell is not True:
        raise BackendUnavailable(cell)


def pick_transport(asked: str, shape: str, device_type: str, one_host: bool) -> tuple[str, str]:
    """The transport of a run, and why.

    Args:
        asked: value of `--transport`. "auto" is NCCL for GPU tensors and gloo for CPU tensors; shared memory where the
            shape needs it. "vendor" leaves everything but the rows to the same choice.
        shape: a module of `moe_course.backends`, `Selection.shape`.
        device_type: "cpu" or "cuda".
        one_host: are all ranks on one host?

    Raises:
        BackendUnavailable: it does not carry a run, these tensors, this shape, or these hosts.
    """
    fits = "nccl" if device_type == "cuda" else "gloo"
    if asked == "threads":
        raise BackendUnavailable(
            f"--transport threads carries ranks that are threads of one process, and a run starts processes; use auto "
            f"or {fits} (in Python: moe_course.comm.sim.run_threads)"
        )
    if asked not in ("auto", "vendor", *TRANSPORTS):
        raise BackendUnavailable(
            f"--transport {asked} is not known, choose from: auto, {', '.join(TRANSPORTS)}, vendor"
        )
    chosen, reason = fits, f"it carries {device_type} tensors"
    if asked in ("auto", "vendor"):
        if shape == "one_sided" and fits == "gloo" and one_host:
            chosen, reason = "shm", "one_sided writes into memory that ranks share, and all ranks are on one host"
    else:
        chosen, reason = asked, "as asked"
    if chosen not in (fits, "shm") or (chosen == "shm" and device_type != "cpu"):
        raise BackendUnavailable(f"--transport {chosen} does not carry {device_type} tensors here; use auto or {fits}")
    check_support(shape, chosen)
    if chosen == "shm" and not one_host:
        raise BackendUnavailable(
            f"--transport shm is memory of one host, and this run has several; use auto or {fits}"
            + (", and a backend other than one_sided" if shape == "one_sided" else "")
        )
    return chosen, reason
