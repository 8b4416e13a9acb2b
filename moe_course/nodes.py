"""Several machines: which node this is, where all of them meet, and the torchrun command for it.

Every node starts the same command and counts itself with `node_rank`. Node 0 opens `master_port`, the others come to
it. Does not import torch. Source: torch's `distributed/run.py` and `elastic/rendezvous`. Built in: notebook 13.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_course.comm.wire import interface_address
from moe_course.errors import ConfigError


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, seen from one of them.

    Attributes:
        nnodes: number of machines.
        node_rank: this machine, 0 to nnodes - 1. Node 0 holds rank 0, so it has the verdict and the JSON.
        master_addr: name or address of node 0, as the others reach it; not needed for one machine.
        master_port: a free TCP port of node 0; the same number on every node.

    Raises ConfigError for values that cannot be.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"--nnodes is {self.nnodes}, needs to be at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank is {self.node_rank} and --nnodes is {self.nnodes}; "
                f"nodes are counted from 0, so the last one is {self.nnodes - 1}"
            )
        if not 1 <= self.master_port <= 65535:
            raise ConfigError(f"--master-port is {self.master_port}, needs to be from 1 to 65535")
        if self.nnodes > 1 and not self.master_addr:
            raise ConfigError(
                f"--nnodes is {self.nnodes} and --master-addr is missing; give the name or address of node 0"
            )
        if self.master_addr is not None and self.master_addr.count(":") == 1:  # more of them are an IPv6 address
            raise ConfigError(f"--master-addr {self.master_addr} holds a port; give that one with --master-port")

    def processes_here(self, world_size: int) -> int:
        """Ranks of this node, out of `world_size` on all of them. Raises ConfigError if it does not divide."""
        if world_size % self.nnodes:
            below = world_size - world_size % self.nnodes
            raise ConfigError(
                f"--world-size {world_size} ranks cannot be shared equally by --nnodes {self.nnodes}; "
                f"use --world-size {below or self.nnodes}"
            )
        return world_size // self.nnodes

    def alone(self) -> str:
        """What to look at when the nodes do not find each other, for an error message."""
        where = f"{self.master_addr}:{self.master_port}"
        return (
            f"{self.node_rank} of {self.nnodes} and not all of them came to {where}; start the same command on every "
            f"node, each with a --node-rank of its own, and let them reach {where}"
        )


ONE_NODE = Nodes()


def torchrun_command(
    argv: Sequence[str], nproc_per_node: int, nodes: Nodes = ONE_NODE, module: str = "moe_course.run"
) -> list[str]:
    """The command that starts the ranks of this node: `python -m torch.distributed.run … -m module argv`.

    Several nodes meet by static rendezvous: node 0 listens on `master_addr:master_port`, for torchrun and for the
    ranks. torchrun's other way, c10d, numbers the nodes by their own host names and ports and ignores the node rank,
    so rank 0, the verdict and the JSON would end up on any of them; it also has to find out by name whether it is
    the host, and sends that name to the others. What c10d adds, nodes that come and go, a run without restarts
    has no use for.
    """
    where = ["--standalone", "--local-addr=127.0.0.1"]
    if nodes.nnodes > 1:
        where = [f"--nnodes={nodes.nnodes}", f"--node-rank={nodes.node_rank}"]
        where += [f"--master-addr={nodes.master_addr}", f"--master-port={nodes.master_port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where]
    return [*torchrun, f"--nproc-per-node={nproc_per_node}", "--max-restarts=0", "-m", module, *argv]


def gloo_environment(nodes: Nodes) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME: the interface of this node that leads to node 0. Empty where that cannot be told.

    By itself gloo takes the address that belongs to the name of this host. On Debian and Ubuntu that is often
    127.0.1.1, and there no other host finds it. Raises ConfigError if this host does not know the name of node 0.
    """
    if nodes.nnodes == 1:
        return {}
    try:
        found = socket.getaddrinfo(nodes.master_addr, nodes.master_port, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"--master-addr {nodes.master_addr}: this host does not know that name ({error}); "
            "give the address of node 0"
        ) from None
    targets = [address for family, *_, address in found if family == socket.AF_INET]
    if not targets or sys.platform != "linux":
        return {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(targets[0])  # nothing is sent: the kernel looks up the way
        except OSError:  # there is none yet; torchrun tries again for a while
            return {}
        own = probe.getsockname()[0]
    names = [name for _, name in socket.if_nameindex() if interface_address(name) == own]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names and not own.startswith("127.") else {}


def slurm_nodes(environ: Mapping[str, str] = os.environ) -> Nodes:
    """The nodes of a Slurm job step with one task per node: `srun --ntasks-per-node=1 moe-course run --slurm`.

    Reads SLURM_NNODES and SLURM_NODEID, and lets scontrol write out the step's hosts, SLURM_STEP_NODELIST; the first
    one is node 0. The job's own list will not do: a step may have fewer nodes, and a batch script, which runs on the
    first node only and would wait there for the others, has it too. The port is the default; where two jobs share a
    node, one of them needs another.

    Raises:
        ConfigError: a variable is missing or no number, more than one task on this node, or scontrol is missing or
            fails.
    """
    nnodes, node_rank = _number(environ, "SLURM_NNODES"), _number(environ, "SLURM_NODEID")
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise ConfigError(
            f"SLURM_LOCALID is {environ['SLURM_LOCALID']}, needs to be 0: torchrun starts the ranks of a node by "
            "itself; start one task per node with srun --ntasks-per-node=1"
        )
    if nnodes == 1:
        return Nodes()
    hosts = _hosts(_value(environ, "SLURM_STEP_NODELIST"), environ.get("PATH"))
    if len(hosts) != nnodes:
        raise ConfigError(
            f"SLURM_STEP_NODELIST names {len(hosts)} hosts and SLURM_NNODES is {nnodes}; "
            "give --nnodes, --node-rank and --master-addr instead of --slurm"
        )
    return Nodes(nnodes, node_rank, hosts[0])


def _value(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise ConfigError(
            f"--slurm needs {name}, which is not set here; start it in a Slurm job with srun --ntasks-per-node=1, "
            "also inside a batch script, or give --nnodes, --node-rank and --master-addr"
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _value(environ, name)
    if not value.isdecimal():
        raise ConfigError(
            f"{name} is {value!r}, needs to be a number; give --nnodes and --node-rank instead of --slurm"
        )
    return int(value)


def _hosts(nodelist: str, path: str | None) -> list[str]:
    """`gpu[01-02]` written out. Raises ConfigError."""
    cure = "give --nnodes, --node-rank and --master-addr instead of --slurm"
    scontrol = shutil.which("scontrol", path=path)
    if scontrol is None:
        raise ConfigError(
            f"--slurm needs scontrol to read SLURM_STEP_NODELIST {nodelist}, and it is not on PATH; {cure}"
        )
    command = [scontrol, "show", "hostnames", nodelist]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = ((getattr(error, "stderr", None) or "").strip() or str(error)).splitlines()[-1]
        raise ConfigError(f"scontrol cannot read SLURM_STEP_NODELIST {nodelist}: {said}; {cure}") from None
    return done.stdout.split()
