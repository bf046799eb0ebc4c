"""Shows the progress of a run: a live bar on a terminal, plain lines elsewhere, one updated cell in a notebook."""

import importlib
import importlib.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TextIO

from ..phases import LABELS
from .stream import Event

_LIVE_PERIOD_S, _LINE_PERIOD_S = 0.25, 10.0
_SMOOTHING = 0.1  # weight of the last step in the shown mean
_BAR_WIDTH = 12  # characters
_Write = Callable[[str], int]


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
        self._metrics: dict[str, float] = {}
        self._last: Event | None = None
        self._place = (0, 0)
        self._live: _LastLine | None = None
        self._cell: _WidgetCell | None = None

    def take(self, event: Event, place: tuple[int, int]) -> None:
        """Takes the event of a step, the number of its batch in the epoch, and the number of batches; 0: not known."""
        self._last, self._place = event, place
        for name, value in {"wall": event["wall_s"], "samples": event["samples"], **event["phases"]}.items():
            mean = self._means.get(name, value)
            self._means[name] = mean + _SMOOTHING * (value - mean)

    def take_metrics(self, values: dict[str, float]) -> None:
        """Takes values of the script; the line shows the last of each."""
        self._metrics |= values

    def text(self) -> str:
        """Returns the line."""
        if self._last is None:
            return "step 0"
        batch, batches = self._place
        done = f" (batch {batch}/{batches})" if batches else ""
        parts = [f"step {self._last['step']}{done}", f"{1e3 * self._means['wall']:.1f} ms"]
        if self._means["samples"] and self._means["wall"]:
            parts.append(f"{self._means['samples'] / self._means['wall']:,.0f} samples/s")
        parts += [f"{name} {value:.4g}" for name, value in self._metrics.items()]
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
            self._live = self._live or _LastLine(self._file)
            batch, batches = self._place
            done = min(_BAR_WIDTH * batch // batches, _BAR_WIDTH) if batches else 0
            bar = f"{'━' * done}{'┄' * (_BAR_WIDTH - done)} " if batches else ""
            self._live.show(bar + self.text())
        elif self.kind == "notebook":
            self._cell = self._cell or _WidgetCell()
            self._cell.show(self.text(), *self._place)
        else:
            print(self.text(), file=self._file, flush=True)

    def close(self) -> None:
        """Shows the last line and leaves the terminal as it was."""
        self.show(is_last=True)
        if self._live is not None:
            self._live.close()


class _LastLine:
    """Is the last line of a terminal, below everything that the script prints there.

    rich's Live would take the script's output over: it wraps long lines, and holds back other bars. This class leaves
    the text as it is. It only erases the line before a write to the terminal, and waits until the write ends its line.
    """

    _ERASE = "\r\x1b[2K"

    def __init__(self, file: TextIO) -> None:
        self._file, self._write = file, file.write
        self._lock = threading.RLock()  # the script and the collector's thread write
        self._is_shown, self._is_line_begun = False, False
        self._streams: dict[TextIO, tuple[_Write, _Write]] = {}  # the write of each, before and now
        for stream in dict.fromkeys((file, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
            if stream is not None and stream.isatty():
                # Handlers of logging hold the stream itself, so that another stream under sys.stderr would miss them.
                plain, above = stream.write, self._above(stream.write)
                stream.write = above  # type: ignore[method-assign]
                self._streams[stream] = plain, above
        _last_lines.add(self)

    def _above(self, write: _Write) -> _Write:
        def write_above(text: str) -> int:
            with self._lock:
                if self._is_shown:
                    self._write(self._ERASE)
                    self._file.flush()
                    self._is_shown = False
                if text:
                    self._is_line_begun = not text.endswith("\n")
                return write(text)

        return write_above

    def show(self, text: str) -> None:
        """Shows the text, cut to the width of the terminal, unless the script has begun a line there."""
        with self._lock:
            if self._is_line_begun:
                return
            for stream in self._streams:
                stream.flush()
            self._write(self._ERASE + text[: _columns(self._file) - 1])
            self._file.flush()
            self._is_shown = True

    def close(self) -> None:
        """Leaves the line where it is, and the streams as they were."""
        with self._lock:
            if self._is_shown:
                self._write("\n")
                self._file.flush()
            self.give_streams_back()

    def give_streams_back(self) -> None:
        """Lets the streams write as before. A forked process calls it without the lock, which a thread may hold."""
        for stream, (plain, above) in self._streams.items():
            if stream.write is above:  # otherwise another has replaced it since, whose calls go on to it
                stream.write = plain  # type: ignore[method-assign]
        self._streams.clear()


def _give_streams_back() -> None:
    for line in _last_lines:
        line.give_streams_back()


_last_lines: weakref.WeakSet[_LastLine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_give_streams_back)


def _columns(file: TextIO) -> int:
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):  # a stand-in for a terminal
        return 80


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
