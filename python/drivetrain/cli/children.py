"""Applies `drivetrain run` to child processes: their reports, and further runs of the same script.

The swap itself follows into processes of multiprocessing, see `spawned`. If the script starts itself again for the
other ranks, as Lightning does, `drivetrain run` is inserted into that command.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from drivetrain import spawned
from drivetrain.cli import report
from drivetrain.ddp import defaults
from drivetrain.optim import left_to_torch


def follow() -> None:
    """Makes child processes, and their children, report the objects that they construct. The swap follows by itself."""
    spawned.follow("drivetrain.cli.children:follow_in_child")
    util.register_after_fork(report, _report_when_child_ends)  # the key must stay alive, as a module does


def follow_in_child() -> None:
    """Reports what this process constructs, one that multiprocessing has started with a new interpreter."""
    follow()
    # Spawned children skip the after-fork calls. Other start methods discard this finalizer and make those calls later.
    _report_when_child_ends(None)


def follow_reruns(main: Sequence[str], optim: bool, ddp_defaults: dict[str, object]) -> None:
    """Makes subprocesses that run the same script with the same interpreter run it under `drivetrain run`.

    Args:
        main: The words that follow `python` to run the script: its path, or "-m" and the module.
        optim: The value of `--optim`.
        ddp_defaults: The values of `--ddp` by name.
    """
    options = ["--optim"] if optim else []
    options += [word for name, value in ddp_defaults.items() for word in ("--ddp", f"{name}={value!r}")]
    plain_init = subprocess.Popen.__init__

    @functools.wraps(plain_init)
    def init(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        if isinstance(args, (list, tuple)) and _is_rerun(args, main):
            args = [sys.executable, "-m", "drivetrain", "run", *options, *args[1:]]
        plain_init(self, args, *rest, **kwargs)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]


def _is_rerun(command: Sequence[Any], main: Sequence[str]) -> bool:
    words = [os.fspath(word) for word in command[: 1 + len(main)] if isinstance(word, (str, os.PathLike))]
    if len(main) == 1 and len(words) == 2:
        words[1] = str(Path(words[1]).absolute())
    return words == [sys.executable, *main]


def _report_when_child_ends(_: object) -> None:
    """Registers the report at the start of a child process. Forked children skip atexit, so it uses Finalize."""
    util.Finalize(
        None, report.of_child, args=(len(defaults.constructed), len(left_to_torch.constructed)), exitpriority=0
    )
