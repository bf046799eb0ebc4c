"""Carries `drivetrain run` into processes that the script starts with multiprocessing, or as another run of itself.

A forked child inherits the swap. One from torch.multiprocessing.spawn starts with a bare interpreter and
imports the script again, so the swap must happen there first: it rides in the data that it unpickles first.
A script that starts itself again as the other ranks (Lightning does) gets `drivetrain run` into that command.
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
from drivetrain.ddp import distributed as ddp
from drivetrain.optim import base


class _Swap:
    """What `run` was asked for. Unpickling it in a child installs the same there."""

    def __init__(self, optim: bool, ddp_defaults: dict[str, object]) -> None:
        self.optim = optim
        self.ddp_defaults = ddp_defaults

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_and_follow, (self.optim, self.ddp_defaults)


def follow(optim: bool, ddp_defaults: dict[str, object]) -> None:
    """Makes children of this process, and theirs, run with the same swap and report what they build."""
    plain_preparation_data = spawn.get_preparation_data

    def preparation_data(name: str) -> dict[str, Any]:
        return {"drivetrain": _Swap(optim, ddp_defaults), **plain_preparation_data(name)}

    spawn.get_preparation_data = preparation_data
    util.register_after_fork(report, _report_when_child_ends)  # keyed by an object that lives: the module


def follow_reruns(main: Sequence[str], optim: bool, ddp_defaults: dict[str, object]) -> None:
    """Makes subprocesses that run the same script with the same Python run it as this process does.

    Args:
        main: what comes after `python` to run the script: its path, or "-m" and the module.
        optim: as given to `run`.
        ddp_defaults: as given to `run`.
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
    _report_when_child_ends(None)  # spawned children skip after-fork calls; other starts drop this, then run them


def _report_when_child_ends(_: object) -> None:
    """Runs at the start of a child. atexit is no use: forked children skip it."""
    util.Finalize(None, report.of_child, args=(len(ddp.constructed), len(base.constructed)), exitpriority=0)
