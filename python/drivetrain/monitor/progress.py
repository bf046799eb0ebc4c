"""Shows the progress of a run: a live bar on a terminal, plain lines elsewhere, one updated cell in a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from ..phases import LABELS
from .stream import Event

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

_LIVE_PERIOD_S, _LINE_PERIOD_S = 0.25, 10.0
_SMOOTHING = 0.1  # weight of the last step in the shown mean
_BAR_WIDTH = 12  # characters


class Progress:
    """Shows one line: a bar where the loader has a length, the step, its time, the rate and the largest phases.

    `kind` is "live", "lines" or "notebook"; None finds out where the output goes.
    """

    def __init__(self, kind: str | None = None, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self.kind = kind or _kind_of(self._file)
        self._period_s = _LINE_PERIOD_S if self.kind == "lines" else _LIVE_PERIOD_S
        self._shown_at = 0.0 if self.kind != "lines" else time.monotonic()
        self._means: dict[str, float] = {}
        self._last: Event | None = None
        self._place = (0, 0)
        self._live: Live | None = None
        self._cell: _WidgetCell | None = None

    def take(self, event: Event, place: tuple[int, int]) -> None:
        """Takes the event of a step, the number of its batch in the epoch, and the number of batches; 0: not known."""
        self._last, self._place = event, place
        for name, value in {"wall": event["wall_s"], "samples": event["samples"], **event["phases"]}.items():
            mean = self._means.get(name, value)
            self._means[name] = mean + _SMOOTHING * (value - mean)

    def text(self) -> str:
        """Returns the line."""
        if self._last is None:
            return "step 0"
        batch, batches = self._place
        done = f" (batch {batch}/{batches})" if batches else ""
        parts = [f"step {self._last['step']}{done}", f"{1e3 * self._means['wall']:.1f} ms"]
        if self._means["samples"] and self._means["wall"]:
            parts.append(f"{self._means['samples'] / self._means['wall']:,.0f} samples/s")
        shares = {phase: self._means[phase] / (self._means["wall"] or 1.0) for phase in LABELS}
        largest = sorted(shares, key=lambda phase: -shares[phase])[:3]
        parts.append(", ".join(f"{LABELS[phase]} {shares[phase]:.0%}" for phase in largest))
        return " · ".join(parts)

    def show(self, is_last: bool = False) -> None:
        """Shows the line, if it is time."""
        if self._last is None or (not is_last and time.monotonic() - self._shown_at < self._period_s):
            return
        self._shown_at = time.monotonic()
        if self.kind == "live":
            self._live_line().update(self._bar_and_text(), refresh=True)
        elif self.kind == "notebook":
            self._cell = self._cell or _WidgetCell()
            self._cell.show(self.text(), *self._place)
        else:
            print(self.text(), file=self._file, flush=True)

    def close(self) -> None:
        """Shows the last line and leaves the terminal as it was."""
        self.show(is_last=True)
        if self._live is not None:
            self._live.stop()

    def _live_line(self) -> Live:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            # No refresh thread, and nothing redirected: the script's own output stays its own.
            self._live = Live(
                console=Console(file=self._file), auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        return self._live

    def _bar_and_text(self) -> Text:
        from rich.text import Text

        batch, batches = self._place
        done = min(_BAR_WIDTH * batch // batches, _BAR_WIDTH) if batches else 0
        bar = f"{'━' * done}{'┄' * (_BAR_WIDTH - done)} " if batches else ""
        return Text(bar + self.text())


class _WidgetCell:
    """Is the output of a notebook's cell: a bar, and the text."""

    def __init__(self) -> None:
        widgets: Any = importlib.import_module("ipywidgets")
        self.bar, self.text = widgets.IntProgress(), widgets.Label()
        importlib.import_module("IPython.display").display(widgets.HBox([self.bar, self.text]))

    def show(self, text: str, batch: int, batches: int) -> None:
        self.bar.layout.display = None if batches else "none"
        self.bar.max, self.bar.value = max(batches, 1), batch
        self.text.value = text


def _kind_of(file: TextIO) -> str:
    shell = sys.modules.get("IPython")
    if shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell":
        return "notebook" if importlib.util.find_spec("ipywidgets") is not None else "lines"
    return "live" if file.isatty() else "lines"
