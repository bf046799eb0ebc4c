"""Applies `drivetrain run` to child processes: processes of multiprocessing, and further runs of the same script.

A forked child inherits the swap. A child of torch.multiprocessing.spawn starts a new interpreter and imports the script
again. The swap must come before that import, so it is part of the data that the child unpickles first. If the script
starts itself again for the other ranks, as Lightning does, `drivetrain run` is inserted into that command.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

from drivetrain import swap
from drivetrain.cli import report
from drivetrain.ddp import defaults
from drivetrain.optim import left_to_torch


class _Swap:
    """Holds the options of `run`. Unpickling it in a child process installs the swap with these options there."""

    def __init__(self, optim: bool, ddp_defaults: dict[str, object]) -> None:
        self.optim = optim
        self.ddp_defaults = ddp_defaults

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_and_follow, (self.optim, self.ddp_defaults)


def follow(optim: bool, ddp_defaults: dict[str, object]) -> None:
    """Makes child processes, and their children, run with the same swap and report the objects that they construct.

    Args:
        optim: The value of `--optim`.
        ddp_defaults: The values of `--ddp` by name.
    """
    plain_preparation_data = spawn.get_preparation_data

    def preparation_data(name: str) -> dict[str, Any]:
        return {"drivetrain": _Swap(optim, ddp_defaults), **plain_preparation_data(name)}

    spawn.get_preparation_data = preparation_data
    util.register_after_fork(report, _report_when_child_ends)  # the key must stay alive, as a module does


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


def _install_and_follow(optim: bool, ddp_defaults: dict[str, object]) -> None:
    swap.install(optim=optim, **ddp_defaults)
    follow(optim, ddp_defaults)
    # Spawned children skip the after-fork calls. Other start methods discard this finalizer and make those calls later.
    _report_when_child_ends(None)


def _report_when_child_ends(_: object) -> None:
    """Registers the report at the start of a child process. Forked children skip atexit, so it uses Finalize."""
    util.Finalize(
        None, report.of_child, args=(len(defaults.constructed), len(left_to_torch.constructed)), exitpriority=0
    )
