"""A real JupyterLab for the tests, with settings of its own, and what a user does in it: open, run, look, restart."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Page

from moe_course.launch import die_with_parent

CHROMIUM = Path("/usr/bin/chromium")
CHROME_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # whatever a page asks for, nothing leaves this machine
]
MARK = "MOE_COURSE_TEST_LAB"  # in the environment of the server and of all that it starts
_NO_NEWS = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
_IDLE = """() => { const w = window.jupyterapp?.shell.currentWidget, s = w?.sessionContext;
    return w?.context?.isReady && s?.isReady && s.session?.kernel?.status === 'idle' }"""
_COMMAND = "async ([name, more]) => { await window.jupyterapp.commands.execute(name, more) }"


@dataclass(frozen=True)
class Lab:
    """A running server: where it is, its token and process, and the folder it shows."""

    base: str
    token: str
    root: Path
    pid: int

    def url(self, notebook: str) -> str:
        return f"{self.base}/lab/tree/{notebook}?token={self.token}&reset"

    def processes(self) -> dict[int, tuple[int, str]]:
        """Living processes of the server, itself included: pid -> (parent, command line)."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has gone meanwhile, or is not ours
                if f"{MARK}={self.token}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        command = (entry / "cmdline").read_text().replace("\0", " ")
                        found[int(entry.name)] = (int(parent), command)
        return found

    def started_by_kernels(self) -> dict[int, str]:
        """What kernels started, and what they left behind when they ended: pid -> command line."""
        everybody = self.processes().items()
        return {pid: text for pid, (parent, text) in everybody if pid != self.pid and parent != self.pid}

    def wait_until_gone(self, seconds: float = 10, kernels: bool = False) -> dict[int, str]:
        """Processes that kernels started, or all but the server's own, that are still there after `seconds`."""
        deadline = time.monotonic() + seconds
        while found := self._all_but_the_server() if kernels else self.started_by_kernels():
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return found

    def _all_but_the_server(self) -> dict[int, str]:
        return {pid: command for pid, (_, command) in self.processes().items() if pid != self.pid}


@contextlib.contextmanager
def jupyter_lab(root: Path, home: Path) -> Iterator[Lab]:
    """Start a server on `root`; `home` takes its settings, so that nothing of this machine's user counts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    environment = dict(
        os.environ,
        JUPYTER_CONFIG_DIR=str(home / "config"),
        JUPYTER_DATA_DIR=str(home / "data"),
        JUPYTER_RUNTIME_DIR=str(home / "runtime"),
        IPYTHONDIR=str(home / "ipython"),
        MOE_COURSE_MY_MOE=str(home / "my_moe"),
        **{MARK: token},
    )
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "page_config.json").write_text(json.dumps(_NO_NEWS))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    command += [f"--LabApp.workspaces_dir={home / 'workspaces'}", f"--LabApp.user_settings_dir={home / 'settings'}"]
    command += ["--LabApp.expose_app_in_browser=True"]
    with (home / "lab.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
        )
        try:
            base = f"http://127.0.0.1:{port}"
            _wait_for(process, f"{base}/api/status?token={token}", home / "lab.log")
            yield Lab(base, token, root, process.pid)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_for(process: subprocess.Popen, url: str, log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"jupyter lab ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"jupyter lab did not answer: {log.read_text()[-2000:]}")


def open_notebook(page: Page, lab: Lab, notebook: str, kernel: bool = True) -> None:
    """Open a notebook of the server's folder; wait until its cells are there, and its kernel is idle."""
    page.goto(lab.url(notebook))
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell", timeout=120_000)
    if kernel:
        wait_until_idle(page)


def wait_until_idle(page: Page, seconds: float = 120) -> None:
    page.wait_for_function(_IDLE, timeout=seconds * 1000)


def command(page: Page, name: str, **arguments: object) -> None:
    """A command of JupyterLab, e.g. `notebook:run-all-cells`; returns when it is done."""
    page.evaluate(_COMMAND, [name, arguments])


def shut_down(page: Page) -> None:
    """End the kernel of the notebook that is shown."""
    page.evaluate("async () => { await window.jupyterapp?.shell.currentWidget?.sessionContext?.shutdown() }")
