"""Carries `drivetrain run` into processes that the script starts with multiprocessing.

A forked child inherits the swap. One from torch.multiprocessing.spawn starts with a bare interpreter and
imports the script again, so the swap must happen there first: it rides in the data that it unpickles first.
"""

from __future__ import annotations

from multiprocessing import spawn, util
from typing import Any

from drivetrain import ddp, optim, swap
from drivetrain.cli import report


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


def _install_and_follow(optim: bool, ddp_defaults: dict[str, object]) -> None:
    swap.install(optim=optim, **ddp_defaults)
    follow(optim, ddp_defaults)
    _report_when_child_ends(None)  # spawned children skip after-fork calls; other starts drop this, then run them


def _report_when_child_ends(_: object) -> None:
    """Runs at the start of a child. atexit is no use: forked children skip it."""
    util.Finalize(None, report.of_child, args=(len(ddp.constructed), len(optim.constructed)), exitpriority=0)
