"""A real run, started from a cell and followed live: a bar while it works, the text when it is done.

In JupyterLab the bar is a widget; in a shell, or without ipywidgets, the same steps come as lines. What a notebook
stores is the same after every run: one line for the bar, no state, no times. Built in: notebooks 00 and 13.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from moe_course.launch import RunResult, launch


def run_live(argv: Sequence[str], world_size: int, timeout: float = 600) -> RunResult:
    """Run `moe_course.run` with `argv` on `world_size` processes, show its progress, then print the texts.

    Args:
        argv: options of `moe-course run`, e.g. `["--prompt=def ", "--max-new-tokens=16", "--check"]`.
        world_size: number of processes.
        timeout: seconds until everything is ended.

    A run that fails prints its one error line and is returned like any other. Interrupting the cell ends all
    processes and raises KeyboardInterrupt.
    """
    progress = Progress(world_size)
    view = _bar(world_size) if _has_front_end() else _Lines()
    try:
        run = launch(argv, world_size, lambda event: view.show(*progress.after(event)), timeout)
    except BaseException:
        view.show(progress.percent, "stopped, all ranks were ended", "warning")
        raise
    if run.error:
        view.show(progress.percent, "failed", "danger")
        print("\n  ".join([run.error, *run.graph]))
    else:
        view.show(100, "done", "success")
    for number, prompt in enumerate(run.result["prompts"] if run.result else ()):
        print(continuation(number, prompt))
    return run


class Progress:
    """From the events of a launch to (percent, words). Percents never fall."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.percent, self.words = 0, f"starting {world_size} ranks"
        self.started = self.loaded = 0

    def after(self, event: dict) -> tuple[int, str]:
        """Take in one event; loading gets half of the bar, because it takes about that long."""
        kind, ranks, percent = event["event"], self.world_size, self.percent
        if kind == "start":
            self.started += 1
            percent, self.words = 10 * self.started // ranks, f"{self.started} of {ranks} ranks started"
        elif kind == "loaded":
            self.loaded += 1
            percent, self.words = 10 + 40 * self.loaded // ranks, f"{self.loaded} of {ranks} ranks loaded their experts"
        elif kind == "step":
            step, steps = event["step"] + 1, event["steps"]
            percent, self.words = 50 + 40 * step // steps, f"token {step} of {steps}"
        elif kind == "checking":
            percent, self.words = 95, "comparing with the untouched one-process model"
        self.percent = max(self.percent, percent)
        return self.percent, self.words


class _Lines:
    """Progress as lines of text, every new phase once; of the tokens only the last is told."""

    def __init__(self):
        self.last = ""

    def show(self, percent: int, words: str, style: str = "") -> None:
        first, _, rest = words.partition(" of ")
        unfinished = words.startswith("token ") and first.split()[1] != rest
        if words != self.last and not unfinished:
            print(f"{percent:3d} % {words}", flush=True)
            self.last = words


class _Bar:
    """Progress as two widgets in a row that change in place."""

    def __init__(self, bar, label):
        self.bar, self.label = bar, label

    def show(self, percent: int, words: str, style: str = "") -> None:
        self.bar.value, self.label.value = percent, words
        self.bar.bar_style = style


def _bar(world_size: int) -> _Bar:
    import ipywidgets
    from IPython.display import display

    bar = ipywidgets.IntProgress(value=0, min=0, max=100, description="run")
    label = ipywidgets.Label(value=f"starting {world_size} ranks")
    bundle = ipywidgets.HBox([bar, label])._repr_mimebundle_()
    # The widget's own text lists its state; a notebook stores this line instead, and readers without widgets see it.
    display(bundle | {"text/plain": f"[progress bar of a run on {world_size} ranks]"}, raw=True)
    return _Bar(bar, label)


def _has_front_end() -> bool:
    """Is this a notebook kernel with widgets? Others get lines of text."""
    if any(importlib.util.find_spec(name) is None for name in ("IPython", "ipywidgets")):
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def continuation(number: int, prompt: dict) -> str:
    """A prompt of a run's result and what the model wrote, the latter behind a bar at the left."""
    title = f"prompt {number} on rank {prompt['dp_rank']}: {prompt['prompt']!r} goes on with"
    return "\n".join([title, *(f"  │{line}".rstrip() for line in readable(prompt["text"]).split("\n"))])


def readable(text: str) -> str:
    """The text with control characters written out, so that no byte a model makes can upset a terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )
