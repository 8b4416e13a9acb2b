"""What a run shows on the terminal while it works. Built in: notebook 13."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


class RunDisplay:
    """Follows the events of a launch: a progress bar and, on a terminal, the texts as they grow."""

    def __init__(self, console: Console, prompts: tuple[str, ...], tokenizer, world_size: int, max_new_tokens: int):
        self.console, self.prompts, self.tokenizer = console, prompts, tokenizer
        self.world_size = world_size
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.loaded = 0
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.progress.add_task(f"starting {world_size} ranks", total=world_size + max_new_tokens)
        self.live = Live(self.progress, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> RunDisplay:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception) -> None:
        self.live.stop()

    def on_event(self, event: dict) -> None:
        kind = event["event"]
        if kind == "plan":
            if "text" in event:
                self.console.print(event["text"], markup=False, highlight=False)
            carried = f"runs       on {event['device']}, rows carried by {event['transport']}: {event['reason']}\n"
            self.console.print(carried, markup=False, highlight=False)
        elif kind == "loaded":
            self.loaded += 1
            self.progress.update(
                self.task, completed=self.loaded, description=f"{self.loaded}/{self.world_size} ranks loaded"
            )
        elif kind == "step":
            done, total = self.world_size + event["step"] + 1, self.world_size + event["steps"]
            self.progress.update(self.task, completed=done, total=total, description="generating")
        elif kind == "token":
            self.tokens[event["prompt"]].append(event["token"])
            self.live.update(Group(self.progress, *self._texts()))
        elif kind == "warn":
            self.console.print(f"[yellow]slow[/]  {escape(event['text'])}", highlight=False)
        elif kind == "checking":
            self.progress.update(self.task, description="waiting for the one-process reference")

    def _texts(self) -> list[Text]:
        return [
            Text(
                f"{i}: {(self.prompts[i] + self.tokenizer.decode(tokens))[-100:]!r}", overflow="ellipsis", no_wrap=True
            )
            for i, tokens in sorted(self.tokens.items())
        ]
