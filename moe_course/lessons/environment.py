"""The first line of every notebook: is everything here that a lesson needs? Built in: notebook 00."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys

from moe_course.errors import ConfigError
from moe_course.lessons.short_errors import shorten_errors
from moe_course.options import TINY

READY = "ready: torch, transformers, the tiny model, 2 or more processes"
#: Without these a lesson cannot go on.
PACKAGES = ("torch", "transformers", "safetensors", "numpy")
MODEL_FILES = ("config.json", "model.safetensors")
SETUP = "run `make setup` in the course folder, then restart the kernel"
_WAIT_S = 20
_HELLO = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).sendall(b'.')"


class NotReady(ConfigError):
    """Something a lesson needs is missing. A notebook shows the message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return str(self).splitlines()


def start() -> None:
    """Print one line when this environment can run the course; from here on its errors are shown short.

    Raises:
        NotReady: one line for each missing part, with its cure.
    """
    shorten_errors()
    problems = [*missing_packages(), *missing_model_files(), *missing_processes()]
    if problems:
        raise NotReady("\n".join(f"not ready: {problem}" for problem in problems))
    print(READY)
    if importlib.util.find_spec("ipywidgets") is None:
        print(f"note: ipywidgets is missing, so progress comes as lines of text; cure: {SETUP}")


def missing_packages() -> list[str]:
    """Packages that are not installed, and torch if it does not load, each with a cure."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    found = [f"{', '.join(absent)} not installed; cure: {SETUP}"] if absent else []
    if "torch" not in absent:
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:  # a library of it is missing or built for another machine
            found.append(f"torch does not load ({error}); cure: {SETUP}")
    return found


def missing_model_files() -> list[str]:
    """Files of the tiny model that are not there, with a cure."""
    absent = [name for name in MODEL_FILES if not (TINY / name).is_file()]
    if not absent:
        return []
    return [f"the tiny model lacks {', '.join(absent)}; cure: `git checkout moe_course/glm/tiny`, or install again"]


def missing_processes(count: int = 2) -> list[str]:
    """Start `count` processes that call back on the loopback, as the ranks of a run do; what fails, with a cure."""
    children: list[subprocess.Popen] = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_WAIT_S)
            command = [sys.executable, "-S", "-c", _HELLO, str(server.getsockname()[1])]
            for _ in range(count):
                quiet = subprocess.DEVNULL
                children.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
            for _ in children:
                server.accept()[0].close()
    except OSError as error:
        return [
            f"{count} processes cannot meet on this machine ({error}); "
            "cure: allow new processes and connections on 127.0.0.1 (sandbox, firewall, process limit)"
        ]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return []
