"""Prints the progress of a run: a live bar on a terminal, ten lines in a log, and a table at the end."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table

console = Console(highlight=False)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class TrainingProgress:
    """Shows loss, tokens/s and time left; silent on every rank but the first."""

    def __init__(self, num_steps: int, tokens_per_step: int, *, visible: bool) -> None:
        self._num_steps = num_steps
        self._tokens_per_step = tokens_per_step
        self._visible = visible
        self._start = time.perf_counter()
        self._next_line = 0.1
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(*columns, console=console, disable=not (visible and console.is_terminal))
        self._task = self._bar.add_task("", total=num_steps, status="")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, step: int, num_steps: int, loss: float) -> None:
        """Show that `step` of `num_steps` steps are done; `num_steps` may change during the run."""
        elapsed = time.perf_counter() - self._start
        status = f"loss {loss:.3f}  {step * self._tokens_per_step / elapsed:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, total=num_steps, status=status)
        if self._visible and not console.is_terminal and step >= self._next_line * num_steps:
            self._next_line = (10 * step // num_steps + 1) / 10
            left = _clock(elapsed / step * (num_steps - step))
            console.print(f"step {step:>5}/{num_steps}  {status}  {left} left")

    def note(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        if self._visible:
            console.print(line)


def print_sample(prompt: bytes, sample: bytes) -> None:
    """Show generated code, with unprintable characters replaced."""
    text = sample.decode(errors="replace")
    clean = "".join(char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}" for char in text)
    title = f"sample, from the prompt {prompt.decode()!r}"
    console.print(Panel(Syntax(clean, "python", theme="ansi_dark", word_wrap=True), title=title))


def mebibytes(sizes: list[int]) -> str:
    """Format bytes per rank in MiB, such as `312 312`."""
    return " ".join(f"{size / 2**20:.0f}" for size in sizes)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print the numbers of a run, one per row."""
    table = Table(title=title, show_header=False, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
