"""Two hosts in one machine: network namespaces with addresses of their own and a thin cable between them.

What a run between them sends has to pass the cable, where the kernel counts it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"  # where tc is, not on everybody's path
CABLE = "veth"  # in both namespaces
LIMIT = ["tbf", "rate", "10mbit", "burst", "16kb", "latency", "200ms"]
SHORT = ["--device", "cpu", "--prompt", "def add(a, b):", "--prompt", "class Stack:", "--max-new-tokens", "4"]
LONG = ["--device", "cpu", "--prompt", "x", "--prompt", "y", "--max-new-tokens", "480"]

# what a node does: its share of the run, every event on a line, the end on the last one
NODE = """
import json, sys
from moe_course.launch import launch
from moe_course.nodes import Nodes
node_rank, *argv = sys.argv[1:]
show = lambda item: print(json.dumps(item), flush=True)
ended = launch(argv, 2, show, 120, nodes=Nodes(2, int(node_rank), "10.77.0.1"))
show(vars(ended))
"""


class Host:
    """A network namespace; its name holds the process id of this test."""

    def __init__(self, number: int):
        self.number, self.address = number, f"10.77.0.{number + 1}"
        self.name = f"moe{os.getpid()}n{number}"

    def start(self, *arguments: str, **env: str) -> subprocess.Popen:
        inherited = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, *arguments],
            env=inherited | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[int]:
        return [int(pid) for pid in tool("ip", "netns", "pids", self.name).split()]

    def sent(self) -> int:
        """Bytes that went into the cable here, as the kernel counts them."""
        return int(tool("ip", "netns", "exec", self.name, "cat", f"/sys/class/net/{CABLE}/statistics/tx_bytes"))

    def remove(self) -> None:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def hosts():
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing:
        pytest.skip(f"two hosts in one machine need {' and '.join(missing)} (Debian, Ubuntu: apt install iproute2)")
    if os.geteuid():
        pytest.skip("two hosts in one machine need root, to make network namespaces")
    pair = [Host(0), Host(1)]
    try:
        try:
            connect(*pair)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield pair
    finally:
        for host in pair:
            host.remove()  # the cable goes with them


def connect(one: Host, other: Host) -> None:
    for host in (one, other):
        tool("ip", "netns", "add", host.name)
        tool("ip", "-n", host.name, "link", "set", "lo", "up")
    tool("ip", "-n", one.name, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", other.name)
    for host in (one, other):
        tool("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
        tool("ip", "-n", host.name, "link", "set", CABLE, "up")
        tool("tc", "-n", host.name, "qdisc", "add", "dev", CABLE, "root", *LIMIT)
        host.sent()


def ended(process: subprocess.Popen, seconds: float) -> dict:
    """The last line a node wrote, its RunResult."""
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def assert_equal_over_the_cable(hosts, before, result, world_size):
    assert result["verdict"] == "equal" and result["world_size"] == world_size
    assert all(prompt["matches_reference"] for prompt in result["prompts"])
    for host, sent_before in zip(hosts, before, strict=True):
        mine = [rank for rank in range(world_size) if rank // (world_size // 2) == host.number]
        crossing = sum(e["payload"] for e in result["ledger"] if e["src"] in mine and e["dst"] not in mine)
        assert crossing > 0
        assert host.sent() - sent_before >= crossing, f"rows from {mine} took another way than the cable"
        assert not left_over(host)


def left_over(host: Host, seconds: float = 5) -> list[int]:
    deadline = time.monotonic() + seconds
    while host.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return host.processes()


def run_on_both(hosts, folder, *command: str, **env: str) -> tuple[dict, list[str]]:
    """The result that node 0 wrote, and what the two nodes printed."""
    nodes = [
        host.start(
            *(str(host.number) if part == "RANK" else part for part in command), "--check", *SHORT,
            "--json", str(folder / f"{host.number}.json"), **env,
        )
        for host in reversed(hosts)  # node 1 has to wait for node 0
    ]  # fmt: skip
    printed = []
    for node in nodes:
        stdout, stderr = node.communicate(timeout=120)
        assert node.returncode == 0, stderr
        printed.insert(0, stdout)
    assert not (folder / "1.json").exists()
    return json.loads((folder / "0.json").read_text()), printed


MEET = ["--nnodes", "2", "--node-rank", "RANK", "--master-addr", "10.77.0.1"]


def test_torchrun_on_two_hosts(hosts, tmp_path):
    """The command of the README, typed on each."""
    before = [host.sent() for host in hosts]
    command = ["-m", "torch.distributed.run", *MEET, "--master-port", "29500", "--nproc-per-node", "1"]
    result, printed = run_on_both(
        hosts, tmp_path, *command, "-m", "moe_course.run", GLOO_SOCKET_IFNAME=CABLE, OMP_NUM_THREADS="1"
    )
    assert "verdict  equal" in printed[0] and not printed[1]
    assert_equal_over_the_cable(hosts, before, result, 2)


def test_two_ranks_on_each_of_two_hosts(hosts, tmp_path):
    """The other command, which finds the interface by itself."""
    before = [host.sent() for host in hosts]
    result, printed = run_on_both(hosts, tmp_path, "-m", "moe_course", "run", *MEET, "--world-size", "4")
    assert "verdict  equal" in printed[0] and printed[1].strip().endswith("on node 0")
    assert_equal_over_the_cable(hosts, before, result, 4)


def test_a_rank_killed_on_the_other_host_ends_both(hosts):
    nodes = [host.start("-c", NODE, str(host.number), *LONG) for host in hosts]
    started = said = json.loads(nodes[1].stdout.readline())
    while said.get("event") != "token":  # in the middle of it
        said = json.loads(nodes[1].stdout.readline())
        assert "event" in said, f"ended too early: {said['error']}"
    os.kill(started["pid"], signal.SIGKILL)
    killed = time.monotonic()
    first, second = (ended(node, 20) for node in nodes)
    assert time.monotonic() - killed < 10
    assert second["returncode"] == 5 and second["error"].startswith("error: rank 1: killed by SIGKILL")
    assert first["returncode"] == 5 and first["result"] is None
    assert first["error"].startswith("error: rank 0: ") and "lost rank 1" in first["error"]
    assert not [left_over(host) for host in hosts if left_over(host)]
