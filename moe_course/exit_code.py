"""How a launch ended: from what its ranks and torchrun said to an exit code and one line that names the rank.

Codes: 0, 2 usage, 3 verification, 4 mismatch, 5 lost or late. Does not import torch. Built in: notebook 13.
"""

from __future__ import annotations

import re
import signal

from moe_course.nodes import ONE_NODE, Nodes


def judge(
    returncode: int, late: bool, timeout: float, events: list[dict], output: list[str], nodes: Nodes = ONE_NODE
) -> tuple[int, str | None]:
    """Exit code and one line: a killed rank first (the others only lost it), then the first error reported."""
    if late and nodes.nnodes > 1 and not events:
        return 5, f"error: no rank has started after {timeout:g} s, this is node {nodes.alone()}"
    if late:
        told = [f"; the last that rank {e['rank']} said: {e['text']}" for e in events if e["event"] == "warn"]
        line = f"error: not finished after {timeout:g} s, all ranks were ended; --time-limit sets the limit"
        return 5, line + "".join(told[-1:])
    if returncode == 0:
        return 0, None
    first, killed = first_cause(events), killed_rank("".join(output))
    if killed is not None and (first is None or first["kind"] == "RankLost"):
        return 5, "error: rank {}: killed by {}, by somebody or for want of memory; all were ended".format(*killed)
    if first is not None:
        return first["exit_code"], f"error: rank {first['rank']}: {first['message']}"
    if nodes.nnodes > 1 and re.search("EADDRINUSE|ddress already in use", "".join(output)):
        return 5, (
            f"error: port {nodes.master_port} of this node is taken by another program, "
            "perhaps by another run; name a free one with --master-port, the same on every node"
        )
    lines = [line.strip() for line in output if line.strip()]
    return returncode or 1, f"error: torchrun ended with {returncode}: {lines[-1] if lines else 'no output'}"


def first_cause(events: list[dict]) -> dict | None:
    """The first error of a rank's own; who only lost a rank comes last."""
    errors = [event for event in events if event["event"] == "error"]
    return min(errors, key=lambda event: event["kind"] == "RankLost", default=None)


def killed_rank(text: str) -> tuple[int, str] | None:
    """(rank, signal) of the root cause in torchrun's report, if that was a signal nobody here sent."""
    report = text.rpartition("Root Cause")[2]
    rank, code = re.search(r"rank\s*:\s*(\d+)", report), re.search(r"exitcode\s*:\s*-(\d+)", report)
    if rank is None or code is None or int(code[1]) == signal.SIGTERM:  # that one comes from here, or from torchrun
        return None
    return int(rank[1]), signal.Signals(int(code[1])).name
