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

CHROMIUM = Path("/usr/bin/chromium")
CHROME_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_NO_NEWS = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
_IDLE = """() => { const w = window.jupyterapp?.shell.currentWidget, s = w?.sessionContext;
    return w?.context?.isReady && s?.isReady && s.session?.kernel?.status === 'idle' }"""
_COMMAND = "async (name) => { await window.jupyterapp.commands.execute(name) }"


@dataclass(frozen=True)
class Lab:
    """A running server: where it is, its token, its folder, and the settings it runs with."""

    base: str
    token: str
    root: Path
    environment: dict[str, str]

    def url(self, notebook: str) -> str:
        return f"{self.base}/lab/tree/{notebook}?token={self.token}&reset"


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
    )
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "page_config.json").write_text(json.dumps(_NO_NEWS))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    command += [f"--LabApp.workspaces_dir={home / 'workspaces'}", f"--LabApp.user_settings_dir={home / 'settings'}"]
    command += ["--LabApp.expose_app_in_browser=True"]
    with (home / "lab.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            base = f"http://127.0.0.1:{port}"
            _wait_for(process, f"{base}/api/status?token={token}", home / "lab.log")
            yield Lab(base, token, root, environment)
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


def open_notebook(page: Page, lab: Lab, notebook: str) -> None:
    """Open a notebook of the server's folder and wait until its kernel is idle."""
    page.goto(lab.url(notebook))
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(_IDLE, timeout=60_000)


def command(page: Page, name: str) -> None:
    """A command of JupyterLab, e.g. `notebook:run-all-cells`."""
    page.evaluate(_COMMAND, name)


def run_all(page: Page) -> None:
    """Run all cells; returns when the last one is done, also if a cell failed."""
    command(page, "notebook:run-all-cells")
    page.wait_for_function(_IDLE, timeout=120_000)


def close_notebook(page: Page) -> None:
    """Shut the kernel down, so that the next test starts with a fresh one."""
    page.evaluate("async () => { await window.jupyterapp?.shell.currentWidget?.sessionContext?.shutdown() }")
