"""Your own stages in a run, each next to the package's: one that fails or differs is named, with its file.

In the known pass before generation (`guard/canary.py`), and with `--check` in the first two passes over real rows, the
package's function gets the same inputs, on the same ranks and with real exchanges. What that costs is in no ledger,
only in the times of those passes. Ranks agree on the finding: the first one that saw something raises it, the others
say that they lost it.

Built in: notebook 13.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe_course.backends.configure import Backend
from moe_course.comm.base import Comm, Ledger
from moe_course.dispatch import Dispatched
from moe_course.errors import (
    ExchangeMismatch,
    ExchangeTimeout,
    MoECourseError,
    RankLost,
    StageFailed,
    VerificationFailed,
)
from moe_course.expert_map import determine_expert_map
from moe_course.guard.blame import EXCHANGING, again
from moe_course.guard.differences import of_dispatched, of_outputs, of_routing, of_routing_form, of_tensors
from moe_course.guard.standstill import Standstill
from moe_course.own_stages import OwnStages, line_in, said
from moe_course.router import route
from moe_course.stages import Stages

KNOWN_PASS, REAL_PASSES = -1, (0, 1)  # steps
CURE = "repair it, or move the file away to run the package's"
DISAGREE = (ExchangeMismatch, ExchangeTimeout, RankLost)  # what one rank meets when another makes other calls
HOME = "allgather_reducescatter"
NO_MAP = ". expert_map is None here: every expert is on this rank, and its number is its row; a stage must accept that"


class Witness:
    """The own stages of one rank.

    Args:
        comm: all ranks of the run.
        name, backend: whose dispatch and combine yours are compared with.
        base: the stages of the run without yours.
        known_pass, real_passes: where to compare.
    """

    def __init__(
        self,
        own: OwnStages,
        comm: Comm,
        name: str,
        backend: Backend,
        base: Stages,
        device: torch.device,
        *,
        known_pass: bool,
        real_passes: bool,
    ):
        self.own, self.comm, self.name, self.device = own, comm, name, device
        self.backend, self.base = backend, base
        self.steps = ((KNOWN_PASS,) if known_pass else ()) + (REAL_PASSES if real_passes else ())
        self.always = bool(self.steps)
        self._theirs: Dispatched | None = None

    def stages(self) -> Stages:
        """What the layers call: yours, watched, and those of `base`."""
        watched = {
            "route": self._route,
            "expert_map": self._expert_map,
            "dispatch": self._dispatch,
            "experts": self._experts,
            "combine": self._combine,
        }
        return replace(self.base, **{name: watched[name] for name in self.own.files})

    # -- the five, with their signatures ------------------------------------------------------------------------

    def _route(self, hidden_states, gate_weight, bias, config):
        given = (hidden_states, gate_weight, bias, config)
        mine, found = self._call("route", route, given, {})
        if self._comparing():
            found = found or of_routing(route(*given), mine)
            self._settle("route", found)
        elif found := of_routing_form(hidden_states, mine):
            self._raise("route", f"gave what cannot be dispatched, in layer {self.comm.layer}: {found}", self.comm.rank)
        return mine

    def _expert_map(self, ep_size, ep_rank, num_experts, strategy):
        own = self.own.stages.expert_map
        for rank in range(ep_size) if self.always else ():  # of all ranks, so that all find the same
            wanted = determine_expert_map(ep_size, rank, num_experts, strategy)
            mine = self._guarded("expert_map", own, ep_size, rank, num_experts, strategy)
            if wanted[1] is None and isinstance(mine, tuple | list) and len(mine) == 2 and mine[1] is not None:
                wanted = wanted[0], torch.arange(num_experts, dtype=torch.int32)  # None written out
            found = of_tensors("its result", wanted, mine)
            if found:
                self._raise("expert_map", f"differs from the package's for EP rank {rank} of {ep_size}: {found}", 0)
        return self._guarded("expert_map", own, ep_size, ep_rank, num_experts, strategy)

    def _dispatch(self, hidden_states, topk_weights, topk_ids, *, comm, placement):
        given, groups = (hidden_states, topk_weights, topk_ids), {"comm": comm, "placement": placement}
        backend, theirs = self.backend, None
        if self._comparing():
            with self._unbilled():
                theirs = _kept(backend.dispatch(*given, **groups))
        mine, found = self._call("dispatch", backend.dispatch, given, groups)
        if theirs is not None:
            found = found or of_dispatched(theirs, mine, handle="combine" not in self.own.files)
            self._settle("dispatch", found)
        self._theirs = theirs
        return mine

    def _experts(self, dispatched, w13, w2, expert_map):
        given = (dispatched, w13, w2, expert_map)
        theirs = self.base.experts(*given) if self._comparing() else None
        mine, found = self._call("experts", self.base.experts, given, {})
        if theirs is not None:
            self._settle("experts", found or of_outputs(theirs, mine, w13.dtype, dispatched))
        return mine

    def _combine(self, expert_output, dispatched, *, comm):
        backend, theirs = self.backend, None
        if self._comparing():
            with self._unbilled():  # your dispatch may have a handle of its own, which only your combine knows
                theirs = backend.combine(expert_output, self._theirs or dispatched, comm=comm).clone()
        mine, found = self._call("combine", backend.combine, (expert_output, dispatched), {"comm": comm})
        if theirs is not None:
            self._settle("combine", found or of_outputs(theirs, mine, expert_output.dtype))
        return mine

    # -- how -----------------------------------------------------------------------------------------------------

    def _comparing(self) -> bool:
        return self.comm.step in self.steps

    def _call(self, name: str, package: Callable, given: tuple, keywords: dict) -> tuple[Any, str | None]:
        """Your result, and a finding if it changed what it was given."""
        if not self._comparing():
            return self._guarded(name, getattr(self.own.stages, name), *given, **keywords), None
        arguments = dict(zip(inspect.signature(package).parameters, given, strict=False))
        before = {place: tensor.clone() for place, tensor in _tensors(arguments, name == "experts")}
        mine = self._guarded(name, getattr(self.own.stages, name), *given, **keywords)
        for place, tensor in _tensors(arguments, name == "experts"):
            if of_tensors(place, before[place], tensor):
                return mine, f"it changes its input {place} in place"
        return mine, None

    def _guarded(self, name: str, function: Callable, *given: Any, **keywords: Any) -> Any:
        path = self.own.files[name]
        try:
            return function(*given, **keywords)
        except MoECourseError as error:
            line = line_in(error, path)
            if isinstance(error, DISAGREE):
                raise self._named(error, name, f", line {line}" if line else "") from error
            if line:
                error.add_note(f"in your {name} ({path}, line {line})")
            raise
        except Standstill as error:
            at = f"{path}, line {line_in(error, path)}"
            raise StageFailed(f"your {name} ({at}) {error}: does a loop never end? {self._cure(name)}") from None
        except BaseException as error:  # also one that ends the program; Ctrl-C comes from outside, and ends all ranks
            line = line_in(error, path)
            where = f"{path}, line {line}" if line else str(path)
            also = NO_MAP if name == "experts" and given[3] is None else ""
            raise StageFailed(f"your {name} ({where}) raised {said(error)}{also}; {self._cure(name)}") from error

    def _named(self, error: MoECourseError, name: str, line: str = "") -> MoECourseError:
        """The error with the stage in front. Only a mismatch says that it is the stage's fault."""
        stage = f"your {name} ({self.own.files[name]}{line})"
        if isinstance(error, ExchangeMismatch):
            return again(error, f"{stage} does not make the same exchanges on all ranks: {error}; {self._cure(name)}")
        return again(error, f"in {stage}: {error}")

    def _cure(self, name: str) -> str:
        if name not in EXCHANGING or self.name in (HOME, "no_dp_ep"):
            return CURE
        return f"{CURE}; if it was written for {HOME}, as in the lessons, leave out --all2all-backend"

    @contextmanager
    def _unbilled(self) -> Iterator[None]:
        shared = self.comm.shared
        ledger, waited = shared.ledger, shared.waited_s
        shared.ledger = Ledger()
        try:
            yield
        finally:
            shared.ledger, shared.waited_s = ledger, waited

    def _settle(self, name: str, found: str | None) -> None:
        """Every rank calls it; raises on all of them if one found something."""
        text = json.dumps([self.comm.rank, found]).encode() if found else b""
        rows = torch.tensor(list(text), dtype=torch.uint8, device=self.device).view(-1, 1)  # [bytes, 1]
        try:
            with self._unbilled():
                gathered = self.comm.all_gather_rows(rows)
        except DISAGREE as error:  # a rank is still in its own stage, or has left an exchange out there
            if name not in EXCHANGING:
                raise
            raise self._named(error, name) from error
        parts = [part for part in gathered.rows.cpu().split(gathered.counts) if len(part)]
        if parts:
            rank, what = json.loads(bytes(parts[0].flatten().tolist()))
            step = self.comm.step
            where = "the known pass before generation" if step == KNOWN_PASS else f"step {step}"
            self._raise(name, f"differs from the package's in layer {self.comm.layer}, {where}: {what}", rank)

    def _raise(self, name: str, says: str, rank: int) -> None:
        says = f"your {name} ({self.own.files[name]}) {says} (backend {self.name}); {self._cure(name)}"
        if self.comm.rank == rank:
            raise VerificationFailed(says)
        raise RankLost(f"rank {rank} has ended the run: {says}")


def _tensors(arguments: dict[str, Any], inside: bool) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a stage is given, with their names; `inside`: those of a `Dispatched`, too.

    Not for combine: a backend may put rows on their way home where they lay before, in one window.
    """
    found = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif inside and isinstance(value, Dispatched):
            found += [(f"{name}.{part}", t) for part, t in vars(value).items() if isinstance(t, torch.Tensor)]
    return found


def _kept(dispatched: Dispatched) -> Dispatched:
    """A copy: what a backend hands out may lie in memory that the next exchange writes to."""
    tensors = {name: value.clone() for name, value in vars(dispatched).items() if isinstance(value, torch.Tensor)}
    return replace(dispatched, **tensors)
