"""Settings of all tests: one torch thread, repeatable random examples, and one line on bit equality at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
STARTS_PROCESSES = {("tests", "run"), ("tests", "dist"), "test_launch.py", "test_watchdog.py", "test_verify.py"}
# Helpers that several folders share are plain modules; the worker processes get the same path.
sys.path[:0] = [str(REPOSITORY), *(str(TESTS / folder) for folder in ("unit", "comm", "dist"))]
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background of a shell ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)  # many small products in many Python threads: more would only wait for each other
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("repeatable")


@pytest.fixture
def golden():
    """`golden(name)` reads `tests/golden/<name>.json`."""
    return lambda name: json.loads((TESTS / "golden" / f"{name}.json").read_text())


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def torch_threads(request):
    """Run the test with 1 and with 2 torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several workers: tests that start processes share one, so that they do not disturb each other's clocks.

    Of the others each file stays whole, a notebook above all, and the browser serves all of its tests. (Groups by
    mark, xdist's own way, come apart without a word when pytest is newer than xdist.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            place = Path(nodeid.split("::")[0])
            if place.parts[:2] in STARTS_PROCESSES or place.name in STARTS_PROCESSES:
                return "processes"
            return "browser" if place.parts[:2] == ("tests", "browser") else str(place)

    return ByPlace(config, log)


def pytest_sessionfinish(session):
    """A worker hands in what its layers promised."""
    if hasattr(session.config, "workeroutput"):
        from layer_cases import VERDICTS

        session.config.workeroutput["verdicts"] = [astuple(verdict) for verdict in VERDICTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    from layer_cases import VERDICTS, RowInvariance

    VERDICTS.update(RowInvariance(*fields) for fields in getattr(node, "workeroutput", {}).get("verdicts", ()))


def pytest_terminal_summary(terminalreporter):
    from layer_cases import VERDICTS

    if not VERDICTS:
        return
    failed = sorted({verdict.reason for verdict in VERDICTS if not verdict.exact})
    if failed:
        line = f"NOT promised on this machine, fp32 compared to 1e-5 and bf16 to 2e-2 instead ({'; '.join(failed)})"
    else:
        widest = max(VERDICTS, key=lambda verdict: verdict.multiple)
        line = f"promised on this machine (at most: {widest.reason})"
    terminalreporter.write_line(f"bit equality: {line}")
