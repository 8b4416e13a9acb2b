"""Errors of an exchange by the rank they are about, and what the watchdog knows of it. Built in: notebook 12."""

from __future__ import annotations

from moe_course.comm.wire import LostPeer
from moe_course.errors import ExchangeTimeout, RankLost


class NamedErrors:
    """Turns gloo's and NCCL's RuntimeErrors, which name an address at best, into errors that name the rank."""

    def __init__(self, what: str, peer: int | None, ranks: list[int], me: int, timeout: float, watchdog):
        self.what, self.peer, self.ranks, self.me, self.timeout = what, peer, ranks, me, timeout
        self.watchdog = watchdog

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> bool:
        if not isinstance(error, RuntimeError | LostPeer):
            return False
        if self.peer is None and isinstance(error, LostPeer):
            self.peer = self.ranks[error.peer]
        who = (
            f"rank {self.peer}" if self.peer is not None else f"one of ranks {[r for r in self.ranks if r != self.me]}"
        )
        if "imed out" in str(error) or getattr(error, "late", False):
            cause, graph = self.watchdog.explain() if self.watchdog else ("", [])
            cause = cause or "every rank must make every call, also with zero rows"
            late = ExchangeTimeout(f"{self.what}: after {self.timeout:g} s still waiting for {who}; {cause}")
            for line in graph:
                late.add_note(line)
            raise late from error
        first_line = (str(error).splitlines() or ["no message"])[0]
        known = self.watchdog.gone(self.peer) if self.watchdog else ""
        raise RankLost(f"{self.what}: lost {who}: {known or first_line[:160]}") from error
