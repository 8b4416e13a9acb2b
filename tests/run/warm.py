"""Programs that start warm: forked from this process, whose imports are done, instead of from nothing.

A rank spends about six seconds of computing time on importing torch and transformers, and a fraction of one on what
a test looks at. While `warm_starts` is on, `python -m module …` is a fork that goes on with that module; so are the
processes it starts in turn: the command line, torchrun and every rank, each a child of the one that started it, with
its own pipes, session, environment and signals. The reference of `--check` is always started from nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from contextlib import contextmanager, suppress

import torch

MARK = "MOE_COURSE_TEST_MARK"  # in the environment of a started process; in the name of a forked one
_PR_SET_NAME = 15
_FROM_NOTHING = subprocess.Popen


def process_name(environment: dict[str, str]) -> str:
    """What a forked process is called: mark and rank. A fork keeps the environment /proc shows of its parent."""
    return f"{environment.get(MARK, '')[:10]}/{environment.get('RANK', '')}"


@contextmanager
def warm_starts():
    """Within it `subprocess.Popen` forks. On Linux without a GPU only: CUDA does not survive a fork."""
    if sys.platform != "linux" or torch.cuda.is_available():
        yield
        return
    import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa  # noqa: F401
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.launcher import api  # noqa: F401

    users = (subprocess, subprocess_handler)
    for user in users:
        user.Popen = WarmPopen
    try:
        yield
    finally:
        for user in users:
            user.Popen = _FROM_NOTHING


class WarmPopen(_FROM_NOTHING):
    def __init__(self, args, *, env=None, preexec_fn=None, **more):
        arguments = list(args) if not isinstance(args, str) else [args]
        if arguments[0] == sys.executable:
            arguments = [argument for i, argument in enumerate(arguments) if (i, argument) != (1, "-u")]
            if arguments[1] == "-m":
                environment, follow = dict(os.environ if env is None else env), preexec_fn

                def preexec_fn():  # runs in the fork, with pipes, folder and session in place; nothing is executed
                    _become(arguments[2:], environment, follow)

        super().__init__(args, env=env, preexec_fn=preexec_fn, **more)


def _become(arguments: list[str], environment: dict[str, str], follow) -> None:
    """Be `python -m …` from here on; never returns."""
    code = 1
    try:
        if follow is not None:
            follow()
        _forget(environment)
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _forget(environment: dict[str, str]) -> None:
    """Leave behind what belongs to the parent: files, streams, handlers, signals, environment, its name."""
    faulthandler.disable()  # writes to a file of the parent's
    # Files are closed, as an exec does it (the parent waits for that), but their numbers stay taken: objects of the
    # parent's that are collected later close them once more.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != nothing:
            with suppress(OSError):  # the one that listed the folder
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, errors=errors, closefd=False)  # noqa: SIM115
        for number, mode, errors in ((0, "r", None), (1, "w", None), (2, "w", "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.excepthook = sys.__excepthook__
    atexit._clear()
    logging.getLogger().handlers.clear()
    warnings.simplefilter("ignore")
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):  # a module that Python runs at its start, if there is one on the path
        import sitecustomize  # noqa: F401
    ctypes.CDLL(None).prctl(_PR_SET_NAME, process_name(environment).encode())
