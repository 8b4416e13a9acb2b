"""Which parts of the course work on this machine, and how to get the rest.

`moe-course doctor` prints one row per part. It opens no network but the loopback and changes nothing.
"""

from __future__ import annotations

import importlib.metadata as metadata
import operator
import os
import platform
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

#: Packages without which `moe-course run` cannot start; the others serve notebooks and pictures.
RUN_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "typer", "rich")
TINY_CHECKPOINT = Path(__file__).parent / "glm" / "tiny" / "model.safetensors"
_STYLE = {"ok": "green", "missing": "red", "note": "yellow"}


@dataclass(frozen=True)
class Row:
    """One line of the table. `needed` parts decide the exit code."""

    part: str
    found: str
    verdict: str  # "ok", "missing" or "note"
    cure: str = ""
    needed: bool = False


def doctor(console=None) -> int:
    """Print the table of checks on `console` (a `rich.console.Console`, by default a new one on stdout).

    Returns:
        0 if everything `moe-course run` needs is here, otherwise 2.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console()
    rows = [*_packages(), *_torch(), _checkpoint(), _loopback(), _shared_memory(), _machine()]
    table = Table("part", "found", "verdict", "what to do")
    for row in rows:
        table.add_row(row.part, escape(row.found), f"[{_STYLE[row.verdict]}]{row.verdict}[/]", escape(row.cure))
    console.print(table)
    lacking = [row.part for row in rows if row.needed and row.verdict == "missing"]
    console.print(f"moe-course run needs: {', '.join(lacking)}" if lacking else "moe-course run has all it needs here")
    return 2 if lacking else 0


def _packages() -> list[Row]:
    """Python and every package, against the ranges of the installed project (that is, of pyproject.toml)."""
    python, ranges, rows = "", {}, []
    try:
        project = metadata.distribution("moe-course")
        python = project.metadata["Requires-Python"] or ""
        wanted = [line for line in project.requires or [] if "extra ==" not in line]
        ranges = {name: line.removeprefix(name) for line in wanted for name in re.findall(r"^[\w-]+", line)}
    except metadata.PackageNotFoundError:
        rows.append(Row("moe-course", "not installed, so no version ranges", "note", "make setup"))
    rows.append(_row("python", platform.python_version(), python, True, f"make setup PYTHON=… with Python {python}"))
    for name in dict.fromkeys((*RUN_PACKAGES, *ranges)):
        bounds = ranges.get(name, "")
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = ""
        rows.append(_row(name, found, bounds, name in RUN_PACKAGES, f"make setup, or pip install '{name}{bounds}'"))
    return rows


def _row(name: str, version: str, bounds: str, needed: bool, cure: str) -> Row:
    if version and inside(version, bounds):
        return Row(name, version, "ok", needed=needed)
    return Row(name, f"{version}, wanted {bounds}" if version else "not installed", "missing", cure, needed)


def inside(version: str, bounds: str) -> bool:
    """Is `version` within `bounds` such as ">=5.24,<5.40"? Only >= and < are known, as in pyproject.toml."""
    compare = {">=": operator.ge, "<": operator.lt}
    pairs = re.findall(r"(>=|<)([\d.]+)", bounds)
    return all(compare[sign](_numbers(version), _numbers(bound)) for sign, bound in pairs)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _torch() -> list[Row]:
    """Threads, gloo (tried, with a group of one) and the GPUs, as torch sees them."""
    try:
        import torch
        import torch.distributed as dist

        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    except ImportError as error:
        return [Row("gloo", f"torch does not load: {error}", "missing", "make setup", needed=True)]
    except (AttributeError, OSError, RuntimeError) as error:
        cure = "a torch with gloo; if it finds no interface: export GLOO_SOCKET_IFNAME=lo (macOS: lo0)"
        return [Row("gloo", str(error), "missing", cure, needed=True)]
    gloo = Row("gloo", f"works, torch uses {torch.get_num_threads()} threads", "ok", needed=True)
    if not torch.cuda.is_available():
        return [gloo, Row("cuda", "no GPU that torch can use", "note", "none needed: the CPU does it all")]
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    if not dist.is_nccl_available():
        return [gloo, Row("cuda", f"{names}, without NCCL", "note", "a CUDA build of torch; --device cpu works")]
    return [gloo, Row("cuda", f"{names}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}", "ok")]


def _checkpoint() -> Row:
    if TINY_CHECKPOINT.is_file():
        return Row("tiny model", f"{TINY_CHECKPOINT.stat().st_size / 2**20:.1f} MiB", "ok", needed=True)
    return Row("tiny model", f"no {TINY_CHECKPOINT}", "missing", "git checkout, or reinstall the package", needed=True)


def _loopback() -> Row:
    """Ranks meet on the loopback: open a port there and connect to it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return Row("loopback", "a port on 127.0.0.1 opens", "ok", needed=True)
    except OSError as error:
        return Row("loopback", str(error), "missing", "allow connections on 127.0.0.1 (firewall, sandbox)", needed=True)


def _shared_memory() -> Row:
    """What `--transport shm` needs: anonymous memory that processes share. A run also tests that every byte arrives."""
    if not hasattr(os, "memfd_create"):
        return Row("shared memory", "no memfd here", "note", "--transport gloo carries all shapes but one_sided")
    try:
        os.close(os.memfd_create("moe-course-doctor"))
    except OSError as error:
        return Row("shared memory", str(error), "note", "--transport gloo carries all shapes but one_sided")
    return Row("shared memory", "memfd works: --transport shm", "ok")


def _machine() -> Row:
    """System, cores and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{platform.system()} {platform.machine()}, {cores} cores"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found += f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    advice = {"Linux": "", "Darwin": "threads and gloo work; there is no shared-memory transport"}
    cure = advice.get(platform.system(), "only Linux and macOS are supported; on Windows use WSL2")
    return Row("machine", found, "note" if cure else "ok", cure)
