"""What `drivetrain run` says on stderr at exit: the names that were swapped, and what was built by them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import current_process

from drivetrain import swap
from drivetrain.ddp import distributed as ddp
from drivetrain.optim import base

_NOTHING_WRAPPED = (
    "no model was wrapped in this process (those it started report for themselves): it built no "
    "DistributedDataParallel, or took torch's class from where no module global holds it. To check, "
    "print(type(model)): it says drivetrain.ddp.DistributedDataParallel when it is ours"
)


def at_exit(with_optimizers: bool, process_id: int) -> None:
    """Reports for the process that ran the script, on rank 0 only; forked copies of it are silent."""
    if os.getpid() != process_id or not _speaks_for_the_job():
        return
    names = [name for name in swap.names_bound_to_ours() if _is_worth_showing(name)]
    lines = [f"bound to drivetrain: {', '.join(names) or 'nothing (uninstall() was called)'}"]
    lines.append(f"wrapped: {'; '.join(ddp.constructed)}" if ddp.constructed else _NOTHING_WRAPPED)
    if with_optimizers or base.constructed:
        lines.append(f"optimizers: {'; '.join(base.constructed) or 'none was built'}")
    _say("drivetrain run", lines)


def of_child(models_before: int, optimizers_before: int) -> None:
    """Reports what a child process built itself, if anything."""
    models, optimizers = ddp.constructed[models_before:], base.constructed[optimizers_before:]
    lines = [f"wrapped: {'; '.join(models)}"] if models else []
    if optimizers:
        lines.append(f"optimizers: {'; '.join(optimizers)}")
    if _speaks_for_the_job():
        _say(f"drivetrain run, {current_process().name}", lines)


def _is_worth_showing(name: str) -> bool:
    """The user's own names, and torch's public ones; those inside torch follow from these."""
    module_name = name.rpartition(".")[0]
    return module_name.partition(".")[0] != "torch" or module_name in ("torch.nn.parallel", "torch.optim")


def _speaks_for_the_job() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(who: str, lines: Sequence[str]) -> None:
    sys.stderr.write("".join(f"{who}: {line}\n" for line in lines))
