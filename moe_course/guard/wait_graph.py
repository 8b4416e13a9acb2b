"""Who waits for whom, from what every rank said: a line for each of them, and the one that holds everybody up.

Built in: notebook 12.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Status:
    """What a rank said about itself, or what can be seen from outside."""

    rank: int
    doing: str  # "waiting", "computing", "returned", "failed", "dead", "stopped", "silent"
    detail: str = ""
    waiting_for: list[int] = field(default_factory=list)
    seconds: float = 0.0
    stack: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"rank {self.rank} "
        if self.doing == "waiting":
            return text + f"waits in {self.detail} for {_ranks(self.waiting_for)} since {self.seconds:.1f} s"
        return text + {
            "computing": f"is still computing, {self.detail}",
            "returned": f"has returned early {self.detail}".rstrip(),
            "failed": f"has failed: {self.detail}",
            "dead": f"is dead, its process {self.detail} is gone",
            "stopped": f"is stopped (SIGSTOP), its process {self.detail} does not run",
            "silent": f"does not answer, process {self.detail}",
        }.get(self.doing, self.doing)


def culprit(statuses: list[Status], start: int) -> str:
    """Follow the waits from `start` to a rank that waits for nobody, or round in a circle."""
    by_rank = {status.rank: status for status in statuses}
    path, current = [], by_rank[start]
    while current.doing == "waiting" and current.rank not in path:
        path.append(current.rank)
        peers = [by_rank[rank] for rank in current.waiting_for if rank in by_rank and rank != current.rank]
        others = [peer for peer in peers if peer.doing != "waiting"]
        elsewhere = [peer for peer in peers if peer.detail != current.detail]
        following = (others or elsewhere or peers)[:1]
        if not following:
            return str(current)
        current = following[0]
    if current.doing != "waiting":
        return str(current)
    circle = [by_rank[rank] for rank in path[path.index(current.rank) :]]
    if len({status.detail for status in circle}) > 1:
        return "ranks wait for each other in different exchanges: " + "; ".join(map(str, circle))
    return "ranks wait for each other: " + "; ".join(map(str, circle))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks)) or 'none'}"
