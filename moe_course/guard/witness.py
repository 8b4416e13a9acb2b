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
from moe_course.errors import MoECourseError, RankLost, StageFailed, VerificationFailed
from moe_course.expert_map import determine_expert_map
from moe_course.guard.differences import of_dispatched, of_outputs, of_routing, of_tensors
from moe_course.own_stages import OwnStages, line_in
from moe_course.router import route
from moe_course.stages import Stages

KNOWN_PASS, REAL_PASSES = -1, (0, 1)  # steps
CURE = "repair it, or move the file away to run the package's"


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
        return mine

    def _expert_map(self, ep_size, ep_rank, num_experts, strategy):
        own = self.own.stages.expert_map
        for rank in range(ep_size) if self.always else ():  # of all ranks, so that all find the same
            wanted = determine_expert_map(ep_size, rank, num_experts, strategy)
            found = of_tensors(
                "its result", wanted, self._guarded("expert_map", own, ep_size, rank, num_experts, strategy)
            )
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
        before = [tensor.clone() if isinstance(tensor, torch.Tensor) else None for tensor in given]
        mine = self._guarded(name, getattr(self.own.stages, name), *given, **keywords)
        if self._comparing():
            for argument, old, new in zip(inspect.signature(package).parameters, before, given, strict=False):
                if old is not None and of_tensors(argument, old, new):
                    return mine, f"it changes its input {argument} in place"
        return mine, None

    def _guarded(self, name: str, function: Callable, *given: Any, **keywords: Any) -> Any:
        path = self.own.files[name]
        try:
            return function(*given, **keywords)
        except MoECourseError as error:
            if line := line_in(error, path):
                error.add_note(f"in your {name} ({path}, line {line})")
            raise
        except Exception as error:
            line = line_in(error, path)
            where = f"{path}, line {line}" if line else str(path)
            says = f"{type(error).__name__}: {error}".strip()
            raise StageFailed(f"your {name} ({where}) raised {says}; {CURE}") from error

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
        with self._unbilled():
            gathered = self.comm.all_gather_rows(rows)
        parts = [part for part in gathered.rows.cpu().split(gathered.counts) if len(part)]
        if parts:
            rank, what = json.loads(bytes(parts[0].flatten().tolist()))
            step = self.comm.step
            where = "the known pass before generation" if step == KNOWN_PASS else f"step {step}"
            self._raise(name, f"differs from the package's in layer {self.comm.layer}, {where}: {what}", rank)

    def _raise(self, name: str, says: str, rank: int) -> None:
        says = f"your {name} ({self.own.files[name]}) {says} (backend {self.name}); {CURE}"
        if self.comm.rank == rank:
            raise VerificationFailed(says)
        raise RankLost(f"rank {rank} has ended the run: {says}")


def _kept(dispatched: Dispatched) -> Dispatched:
    """A copy: what a backend hands out may lie in memory that the next exchange writes to."""
    tensors = {name: value.clone() for name, value in vars(dispatched).items() if isinstance(value, torch.Tensor)}
    return replace(dispatched, **tensors)
