"""The ledger against the kernel: bytes counted for messages are those that pass the network, within 2 %."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("loopback_bytes.py")
SIZES = [64 << 10, 1 << 20]


@pytest.fixture(scope="module")
def measured():
    """Size of a message -> figures, from a network in which nobody else sends."""
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"  # where ip is, not on everybody's path
    missing = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if missing or os.geteuid():
        pytest.skip(f"a network of its own needs {' and '.join(missing) or 'root, to make a network namespace'}")
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try_it = subprocess.run([*inside, "true"], capture_output=True, text=True)
    if try_it.returncode:
        pytest.skip(f"no network namespaces here: {try_it.stderr.strip()}")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [*inside, sys.executable, str(PROGRAM), *map(str, SIZES)]
    program = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert program.returncode == 0, program.stderr
    return {one["nbytes"]: one for one in map(json.loads, program.stdout.splitlines())}


@pytest.mark.parametrize("nbytes", SIZES)
def test_counted_bytes_are_those_on_the_wire(measured, nbytes):
    """Payload and metadata of both ranks; the kernel also counts the heads of packets and their receipts."""
    found = measured[nbytes]
    assert found["payload"] == 2 * 20 * nbytes
    ours = found["payload"] + found["metadata"]
    assert 1.0 <= found["counted"] / ours < 1.02, found
