"""Ranks as processes: `torch.distributed` on gloo (CPU) or NCCL (GPU).

Headers always travel on a gloo group, rows on the group of their device. On gloo a ragged all-gather is written
as point-to-point and a reduce-scatter as all-to-all plus an ordered sum: gloo's own are slower, refuse ragged
sizes, and add in another order from 4 ranks on. Built in: notebook 13.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_course.comm.base import Comm
from moe_course.errors import BackendUnavailable, ConfigError, ExchangeTimeout, MoECourseError, PlanMismatch, RankLost


class DistComm(Comm):
    """One rank of a process group.

    Args:
        headers: gloo group for headers; rows: group for rows, gloo or NCCL, with the same ranks.
        ranks: world ranks of the members, in group order.
        device: where the rows live.
    """

    def __init__(self, headers, rows, ranks: list[int], device: torch.device, timeout: float, shared=None):
        super().__init__(ranks.index(dist.get_rank()), ranks, shared)
        self._headers, self._rows, self._ranks = headers, rows, ranks
        self._device, self._timeout = device, timeout
        self._what = ""

    def _exchange(self, message: torch.Tensor, what: str) -> torch.Tensor:
        self._what = what
        messages = [torch.empty_like(message) for _ in self._ranks]
        messages[self.rank] = message
        self._transfer(messages, [message] * self.world_size, self._headers)
        return torch.stack(messages)

    def _all_gather(self, rows: torch.Tensor, receive_bytes: list[int]) -> torch.Tensor:
        # one flat buffer, received into in place: no concatenation afterwards
        out = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=rows.device)
        parts = list(out.split(receive_bytes))
        flat = rows.reshape(-1)
        parts[self.rank].copy_(flat)
        self._transfer(parts, [flat] * self.world_size, self._rows)
        return out.view(-1, rows.shape[1]) if rows.shape[1] else out.view(len(out), 0)

    def _all_to_all(self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(receive_counts), rows.shape[1])
        width = rows.shape[1]
        received, sent = [[n * width for n in counts] for counts in (receive_counts, send_counts)]
        with self._errors(None):
            dist.all_to_all_single(
                out.view(-1), rows.reshape(-1), output_split_sizes=received, input_split_sizes=sent, group=self._rows
            )
        return out

    def _transfer(self, receive: list[torch.Tensor], send: list[torch.Tensor], group) -> None:
        """Point-to-point with every peer; empty tensors are not sent, both sides know their sizes."""
        ops = []
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            if receive[peer].numel():
                ops.append(dist.P2POp(dist.irecv, receive[peer], self._ranks[peer], group))
            if send[peer].numel():
                ops.append(dist.P2POp(dist.isend, send[peer], self._ranks[peer], group))
        if not ops:
            return
        if dist.get_backend(group) == "nccl":  # coalesced into one
            with self._errors(None):
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            return
        works, failures = [], []
        for op in ops:  # a dead peer must not keep the others from getting what they wait for
            try:
                with self._errors(op.peer):
                    works.append((op, op.op(op.tensor, op.peer, group=op.group)))
            except MoECourseError as error:
                failures.append(error)
        for op, work in works:
            if self.shared.waiting is not None:
                self.shared.waiting.waiting_for = {op.peer}
            try:
                with self._errors(op.peer):
                    work.wait()
            except ExchangeTimeout as error:
                failures.append(error)
                break  # each of the others would take as long again
            except MoECourseError as error:
                failures.append(error)
        if failures:
            raise failures[0]  # the later ones follow from it

    def _errors(self, peer: int | None) -> _NamedErrors:
        return _NamedErrors(self._what, peer, self._ranks, dist.get_rank(), self._timeout, self.shared.watchdog)

    def _subgroup(self, groups: list[list[int]], mine: list[int]) -> DistComm:
        if self.world_size < dist.get_world_size():
            raise ConfigError(f"rank {self.world_rank}: split the group of all ranks, not one of its sub-groups")
        # new_group is collective over the world: every rank creates every group, in one order
        with self._errors(None):
            created = [_new_groups([self._ranks[r] for r in group], self._device, self._timeout) for group in groups]
        headers, rows = created[groups.index(mine)]
        members = [self._ranks[rank] for rank in mine]
        return DistComm(headers, rows, members, self._device, self._timeout, self.shared)

    def gather_objects(self, item: Any) -> list[Any] | None:
        """Everybody's picklable object on rank 0, None elsewhere. For reports after a run, not for rows."""
        items = [None] * self.world_size if self.rank == 0 else None
        self._what = "gathering the results"
        with self._errors(None):
            dist.gather_object(item, items, dst=self._ranks[0], group=self._headers)
        return items


class _NamedErrors:
    """Turns gloo's and NCCL's RuntimeErrors, which name an address at best, into errors that name the rank."""

    def __init__(self, what: str, peer: int | None, ranks: list[int], me: int, timeout: float, watchdog):
        self.what, self.peer, self.ranks, self.me, self.timeout = what, peer, ranks, me, timeout
        self.watchdog = watchdog

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> bool:
        if not isinstance(error, RuntimeError):
            return False
        who = (
            f"rank {self.peer}" if self.peer is not None else f"one of ranks {[r for r in self.ranks if r != self.me]}"
        )
        if "imed out" in str(error):
            cause, graph = self.watchdog.explain() if self.watchdog else ("", [])
            cause = cause or "every rank must make every call, also with zero rows"
            late = ExchangeTimeout(f"{self.what}: after {self.timeout:g} s still waiting for {who}; {cause}")
            for line in graph:
                late.add_note(line)
            raise late from error
        first_line = (str(error).splitlines() or ["no message"])[0]
        known = self.watchdog.gone(self.peer) if self.watchdog else ""
        raise RankLost(f"{self.what}: lost {who}: {known or first_line[:160]}") from error


def _new_groups(ranks: list[int], device: torch.device, timeout: float):
    """(group for headers, group for rows) of the same ranks."""
    limit = timedelta(seconds=timeout)
    headers = dist.new_group(ranks, timeout=limit, backend="gloo")
    return headers, dist.new_group(ranks, timeout=limit, backend="nccl" if device.type == "cuda" else "gloo")


def pick_device(device: str = "auto") -> torch.device:
    """`auto` is this process's GPU where there is one, otherwise the CPU. Raises BackendUnavailable."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BackendUnavailable("device 'cuda' was asked for and torch sees no GPU here; use --device cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise BackendUnavailable(f"local rank {local} has no GPU: {torch.cuda.device_count()} are visible")
    return torch.device("cuda", local)


def join_store(timeout: float = 60):
    """(store, rank, world_size) of the world that torchrun described in the environment; nothing else is set up yet.

    Raises BackendUnavailable when torchrun did not start this process.
    """
    if "RANK" not in os.environ:
        raise BackendUnavailable("RANK is not set; start this with torchrun, or use moe-course run")
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))


def init(plan, device: str = "auto", timeout: float = 60, store=None) -> DistComm:
    """Join the world that torchrun described in the environment and return the group of all its ranks.

    Args:
        plan: a `Plan`; its `world_size` must be torchrun's.
        device: "auto", "cpu" or "cuda".
        timeout: seconds to wait for a peer in one exchange.
        store: what `join_store` returned, if it was called before.

    Raises:
        BackendUnavailable: not started by torchrun, or no such device here.
        PlanMismatch: torchrun started another number of processes than the plan has ranks.
    """
    if "RANK" not in os.environ:
        raise BackendUnavailable("RANK is not set; start this with torchrun, or use moe-course run")
    where = pick_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != plan.world_size:
        raise PlanMismatch(f"torchrun started {world_size} ranks, the plan has {plan.world_size}")
    backend, limit = ("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"), timedelta(seconds=timeout)
    ranks = list(range(world_size))
    with _NamedErrors("joining the group of all ranks", None, ranks, rank, timeout, None):
        if store is None:
            dist.init_process_group(backend, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size)
        groups = _new_groups(ranks, where, timeout)
    return DistComm(*groups, ranks, where, timeout)


def close() -> None:
    """Leave the world, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
