"""Progress in the terminal: a live bar per run, or a line per event where there is no terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.watch import GiB, Run

DOING = {"build": "building", "train": "training", "close": "closing", "end": "done"}


class Display:
    """Where the demo shows what it does."""

    def __init__(self) -> None:
        self._console = Console()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Something short without steps."""
        if self._console.is_terminal:
            with self._console.status(text):
                yield
        else:
            self.say(text)
            yield

    @contextlib.contextmanager
    def run(self, name: str, num_steps: int) -> Iterator[Callable[[Run], None]]:
        """A run's progress; the block gets the function to call when the run has changed."""
        if not self._console.is_terminal:
            yield _Lines(self._console)
            return
        progress = Progress(
            TextColumn("[bold]{task.fields[name]:<5}[/] {task.fields[doing]:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        with progress:
            task = progress.add_task("", total=num_steps, name=name, doing="importing", text="")

            def changed(run: Run) -> None:
                done = len(run.losses)
                progress.update(task, completed=done, doing=_doing(run), text=_text(run))

            yield changed


class _Lines:
    """A line for each phase and step."""

    def __init__(self, console: Console):
        self._console = console
        self._shown = (0, 0)
        self._lock = threading.Lock()  # the reader's and the sampler's thread both call

    def __call__(self, run: Run) -> None:
        with self._lock:
            now = len(run.losses), len(run.phases)
            if now == self._shown:
                return
            self._shown = now
            step = f"{now[0]}/{run.num_steps}"
            line = f"{run.name:<5} {_doing(run):<9} {step:>5}  {_text(run)}"
            self._console.print(line, highlight=False, soft_wrap=True)


def _doing(run: Run) -> str:
    return DOING[run.phases[-1][0]] if run.phases else "importing"


def _text(run: Run) -> str:
    parts = []
    if run.losses:
        parts.append(f"loss {float.fromhex(run.losses[-1]):.4f}")
        parts.append(f"{run.step_seconds[-1]:5.2f} s/step")
    if run.samples:
        now, peak = run.samples[-1][1] / GiB, run.peak_bytes / GiB
        parts.append(f"resident {now:.2f} GiB, peak {peak:.2f}")
    return "  ".join(parts)
