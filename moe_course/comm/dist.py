"""Ranks as processes: `torch.distributed` on gloo (CPU) or NCCL (GPU).

Headers travel over plain sockets (`wire.py`), rows on the group of their device. On gloo and on NCCL alike a ragged
all-gather is written as point-to-point and a reduce-scatter as all-to-all plus a sum in rank order: one way to add, on
both. gloo's own are slower, refuse ragged sizes, and add in another order from 4 ranks on. vLLM calls NCCL's own: rows
and bytes are the same there, times are not. Built in: notebook 13.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_course.comm.base import Comm, Entry
from moe_course.comm.named_errors import NamedErrors
from moe_course.comm.packing import cut, join
from moe_course.comm.shared import Waiting
from moe_course.comm.wire import LostPeer, Wire
from moe_course.errors import BackendUnavailable, ConfigError, ExchangeTimeout, MoECourseError, PlanMismatch


class DistComm(Comm):
    """One rank of a process group.

    Args:
        wire: connections to the same ranks, for headers; rows: group for rows, gloo or NCCL.
        ranks: world ranks of the members, in group order.
        device: where the rows live.
        world: what all groups of this world share.
    """

    def __init__(self, wire: Wire, rows, ranks: list[int], device: torch.device, world: _World, shared=None):
        super().__init__(ranks.index(dist.get_rank()), ranks, shared)
        self._wire, self._rows, self._ranks = wire, rows, ranks
        self._device, self._world, self._timeout = device, world, world.timeout
        self.transport = "nccl" if device.type == "cuda" else "gloo"
        self._what = ""

    def _exchange(self, message: torch.Tensor, what: str) -> torch.Tensor:
        self._what = what
        messages = message.new_empty(self.world_size, message.numel())
        messages[self.rank] = message
        rows = memoryview(messages.numpy()).cast("B")
        size = message.numel() * message.element_size()
        places = [rows[peer * size : (peer + 1) * size] for peer in range(self.world_size)]
        try:
            self._wire.exchange(places[self.rank], places, self._now_waiting_for)
        except LostPeer as lost:
            raise self._named(lost.peer, lost) from lost
        return messages

    def _now_waiting_for(self, peer: int) -> None:
        if self.shared.waiting is not None:
            self.shared.waiting.waiting_for = {self._ranks[peer]}

    def _all_gather(self, parts: list[torch.Tensor], counts: list[int], borrow: bool) -> list[torch.Tensor]:
        # one flat buffer, received into in place: no concatenation afterwards
        rows = join(parts)
        width = rows.shape[1]
        receive_bytes = [n * width for n in counts]
        out = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=rows.device)
        received, flat = list(out.split(receive_bytes)), rows.reshape(-1)
        received[self.rank].copy_(flat)
        self._transfer(received, [flat] * self.world_size, self._rows)
        return cut(out.view(sum(counts), width), parts)

    def _all_to_all(self, parts: list[torch.Tensor], matrix: torch.Tensor, borrow: bool) -> list[torch.Tensor]:
        rows = join(parts)
        width = rows.shape[1]
        sent, received = matrix[self.rank] * width, matrix[:, self.rank] * width
        out = rows.new_empty(int(matrix[:, self.rank].sum()), width)
        with self._errors(None):
            dist.all_to_all_single(
                out.view(-1),
                rows.reshape(-1),
                output_split_sizes=received.tolist(),
                input_split_sizes=sent.tolist(),
                group=self._rows,
            )
        return cut(out, parts)

    def _segments(self, send: list[torch.Tensor], receive_bytes: list[int], what: str) -> list[torch.Tensor]:
        self._what = what
        if self.shared.compare and self.transport == "gloo":
            # gloo takes a shorter message for a whole one, and ends the process at a longer one: sizes go first
            mine = torch.tensor([segment.numel() for segment in send])
            receive_bytes = self._exchange(mine, what)[:, self.rank].tolist()
            for peer in set(range(self.world_size)) - {self.rank}:
                entry = Entry(metadata=mine.numel() * mine.element_size(), messages=1)
                self.ledger.add("all_to_all_padded", self.layer, self.world_rank, self._ranks[peer], entry)
        received = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in receive_bytes]
        received[self.rank] = send[self.rank]
        self._transfer(received, send, self._rows)
        return received

    def _transfer(self, receive: list[torch.Tensor], send: list[torch.Tensor], group) -> None:
        """Point-to-point with every peer; empty tensors are not sent, both sides know their sizes."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        if dist.get_backend(group) == "nccl":  # coalesced into one
            ops = [dist.P2POp(dist.irecv, receive[peer], self._ranks[peer], group) for peer in peers]
            ops += [dist.P2POp(dist.isend, send[peer], self._ranks[peer], group) for peer in peers]
            ops = [op for op in ops if op.tensor.numel()]
            with self._errors(None):
                for work in dist.batch_isend_irecv(ops) if ops else []:
                    work.wait()
            return
        # the group's own calls: torch.distributed's wrappers cost more than gloo does for a few rows
        works, failures = [], []
        for call, tensors in ((group.recv, receive), (group.send, send)):
            for peer in peers:
                if not tensors[peer].numel():
                    continue
                try:
                    works.append((peer, call([tensors[peer]], peer, 0)))
                except RuntimeError as error:  # a dead peer must not keep the others from what they wait for
                    failures.append(self._named(peer, error))
        for peer, work in works:
            self._now_waiting_for(peer)
            try:
                work.wait()
            except RuntimeError as error:
                failures.append(self._named(peer, error))
                if isinstance(failures[-1], ExchangeTimeout):
                    break  # each of the others would take as long again
        if failures:
            raise failures[0]  # the later ones follow from it

    def _named(self, peer: int, error: Exception) -> MoECourseError:
        """The error of an exchange with one peer, by its rank."""
        try:
            with self._errors(self._ranks[peer]):
                raise error
        except MoECourseError as named:
            return named

    def _errors(self, peer: int | None) -> NamedErrors:
        return NamedErrors(self._what, peer, self._ranks, dist.get_rank(), self._timeout, self.shared.watchdog)

    def _subgroup(self, groups: list[list[int]], mine: list[int]) -> DistComm:
        if self.world_size < dist.get_world_size():
            raise ConfigError(f"rank {self.world_rank}: split the group of all ranks, not one of its sub-groups")
        # new_group is collective over the world: every rank creates every group, in one order
        self._world.splits += 1
        self._what = f"making groups {groups}"
        with self._errors(None):
            created = [_new_group([self._ranks[r] for r in group], self._device, self._timeout) for group in groups]
            wire = self._world.wire([self._ranks[rank] for rank in mine])
        members = [self._ranks[rank] for rank in mine]
        return DistComm(wire, created[groups.index(mine)], members, self._device, self._world, self.shared)

    def gather_objects(self, item: Any) -> list[Any] | None:
        """Everybody's picklable object on rank 0, None elsewhere. For reports after a run, not for rows."""
        items = [None] * self.world_size if self.rank == 0 else None
        self._what = "gathering the results"
        others = set(self.members) - {self.world_rank}
        self.shared.waiting = Waiting(self._what, 0, -1, self.step, self.members, others)
        with self._errors(None):
            dist.gather_object(item, items, dst=self._ranks[0], group=self._world.objects)
        self._done()
        return items


@dataclass
class _World:
    """The store, the gloo group for objects, and the number of splits so far: names of wires must not repeat."""

    store: Any
    objects: Any
    timeout: float
    splits: int = 0

    def wire(self, ranks: list[int]) -> Wire:
        name = f"{self.splits}-{'-'.join(map(str, ranks))}"
        return Wire(self.store, name, ranks.index(dist.get_rank()), len(ranks), self.timeout)


def _new_group(ranks: list[int], device: torch.device, timeout: float):
    """A group for rows."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend=backend)


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
    with NamedErrors("joining the group of all ranks", None, ranks, rank, timeout, None):
        store = store or join_store(timeout)[0]
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size)
        world = _World(store, dist.new_group(ranks, timeout=limit, backend="gloo"), timeout)
        return DistComm(world.wire(ranks), _new_group(ranks, where, timeout), ranks, where, world)


def close() -> None:
    """Leave the world, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
