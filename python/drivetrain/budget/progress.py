"""Reports the progress of planning on rank 0, once it takes long: on the terminal, or in the log if there is none."""

import contextlib
import logging
import threading
from collections.abc import Iterator

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LONG_SECONDS = 2.0
_logger = logging.getLogger("drivetrain")
_of_thread = threading.local()


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """Shows what `tell` reports in this context."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    line = _of_thread.line = _Line()
    try:
        yield
    finally:
        _of_thread.line = None
        line.close()


def tell(text: str) -> None:
    """Reports the task that begins now, such as "runs a step"."""
    line: _Line | None = getattr(_of_thread, "line", None)
    if line is not None:
        line.tell(text)


class _Line:
    """One line of text that appears after _LONG_SECONDS, and changes from then on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text = ""
        self._is_shown = self._is_closed = False
        self._bar: Progress | None = None
        self._timer = threading.Timer(_LONG_SECONDS, self._show)
        self._timer.daemon = True
        self._timer.start()

    def tell(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._is_shown:
                self._write()

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_closed = True
            if self._bar is not None:
                self._bar.stop()

    def _show(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_shown = True
            console = Console(stderr=True)
            if console.is_terminal:
                self._bar = Progress(
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    TimeElapsedColumn(),
                    console=console,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._bar.add_task("")
                self._bar.start()
            self._write()

    def _write(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"activation_budget: {self._text}")
        else:
            _logger.info("activation_budget: %s", self._text)
