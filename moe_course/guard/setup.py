"""The guard of one rank: handshake, watchdog, audit and canary in the order of a run, and what each of them cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moe_course.comm import dist as comm_dist
from moe_course.errors import MoECourseError
from moe_course.guard.handshake import ERROR, handshake
from moe_course.guard.standstill import Breaker
from moe_course.guard.watchdog import Watchdog
from moe_course.job import Job, prepare, statement
from moe_course.options import RunOptions


class Guard:
    """`on` of False leaves everything out, headers' comparison too: what a program without guard does."""

    def __init__(self, on: bool, rank: int):
        self.on, self.rank = on, rank
        self.store: Any = None
        self.seconds: dict[str, float] = {}
        self.audited: dict[str, int] = {}  # tensors and bytes compared with the file
        self._statements: list[dict] = []
        self._watchdog: Watchdog | None = None

    def handshake(self, options: RunOptions, overrides: dict[str, Any]) -> Job:
        """This rank's job, once all ranks have said the same. Raises what `guard.handshake` raises.

        Args:
            overrides: fields of the statement to be falsified, for drills.
        """
        job, error = None, None
        try:
            job = prepare(options)
        except MoECourseError as refused:
            error = refused
        if not self.on:
            if error is not None:
                raise error
            return job
        with self._timed("handshake_s"):
            said = self._statement(options, job, error)
            unknown = sorted(overrides.keys() - said.keys()) if job is not None else []
            if unknown:
                said[ERROR] = ["ConfigError", f"--override: there is no field {unknown[0]}; fields: {', '.join(said)}"]
                overrides = {}
            self.store, rank, world_size = comm_dist.join_store(options.timeout)
            self._statements = handshake(self.store, rank, world_size, said | overrides, options.timeout)
        return job

    def watch(self, comm, options: RunOptions, report: Callable[..., None]) -> None:
        """Start the watchdog on this rank's exchanges."""
        comm.shared.compare = self.on
        if self.on:
            self._watchdog = Watchdog(
                self.store.clone(),
                self.rank,
                comm.shared,
                self._statements,
                options.warn_after,
                lambda text: report("warn", text=text),
                **({"timeout": options.timeout, "on_standstill": Breaker()} if options.stages else {}),
            )
            comm.shared.watchdog = self._watchdog
            self._watchdog.start()

    def check_model(self, model, job: Job, comm) -> None:
        """Audit what was loaded, and send the canary through every sparse layer."""
        if not self.on:
            return
        from moe_course.guard.audit import audit
        from moe_course.guard.canary import canary

        with self._timed("audit_s"):
            found = audit(model, job.options.model, job.plan, comm)
        self.audited = {"tensors": found["tensors"], "bytes": found["bytes"]}
        with self._timed("canary_s"):
            layers = [block.layer for block in model.blocks]
            for turn, layer in enumerate(layers * 2 if len(layers) == 1 else layers):
                canary(layer, plan=job.plan, turn=turn)

    def leave(self, how: str, detail: str = "") -> None:
        """Say goodbye to those who may still wait for this rank."""
        if self._watchdog is not None:
            self._watchdog.stop(how, detail)

    def _statement(self, options: RunOptions, job: Job | None, error: MoECourseError | None) -> dict[str, Any]:
        try:
            return statement(options, job, error)
        except MoECourseError as unreadable:  # a checkpoint whose headers cannot be read
            return statement(options, None, unreadable)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 4)
