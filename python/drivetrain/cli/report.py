"""Prints the report of `drivetrain run` to stderr at exit: the swapped names and the objects built with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import current_process

from drivetrain import swap
from drivetrain.ddp import defaults
from drivetrain.optim import left_to_torch

_NOTHING_WRAPPED = (
    "no model was wrapped in this process (child processes print their own reports). It built no "
    "DistributedDataParallel, or it took torch's class from a place other than a module's global name. To check, "
    "print(type(model)): drivetrain's class prints as drivetrain.ddp.distributed.DistributedDataParallel"
)
_RAY_WORKERS = (
    "Ray's workers are processes that drivetrain run does not reach: they have torch's classes, unless the train "
    "function calls drivetrain.install() first"
)


def at_exit(with_optimizers: bool, process_id: int) -> None:
    """Prints the report of the process that ran the script, on rank 0 only.

    Args:
        with_optimizers: True if optimizers were swapped too.
        process_id: The id of the process that ran the script; its forked copies print nothing.
    """
    if os.getpid() != process_id or not _speaks_for_the_job():
        return
    names = [name for name in swap.names_bound_to_ours() if _is_worth_showing(name)]
    lines = [f"bound to drivetrain: {', '.join(names) or 'nothing (uninstall() was called)'}"]
    lines.append(f"wrapped: {'; '.join(defaults.constructed)}" if defaults.constructed else _NOTHING_WRAPPED)
    if with_optimizers or left_to_torch.constructed:
        lines.append(f"optimizers: {'; '.join(left_to_torch.constructed) or 'none was built'}")
    if "ray.train" in sys.modules:
        lines.append(_RAY_WORKERS)
    _say("drivetrain run", lines)


def of_child(models_before: int, optimizers_before: int) -> None:
    """Prints the objects that a child process constructed itself, if any.

    Args:
        models_before: Number of models that the parent had wrapped.
        optimizers_before: Number of optimizers that the parent had constructed.
    """
    models, optimizers = defaults.constructed[models_before:], left_to_torch.constructed[optimizers_before:]
    found = {"wrapped": models, "optimizers": optimizers}
    if _speaks_for_the_job():
        lines = [f"{what}: {'; '.join(built)}" for what, built in found.items() if built]
        _say(f"drivetrain run, {current_process().name}", lines)


def _is_worth_showing(name: str) -> bool:
    """Selects names outside torch and torch's public names; torch's internal names follow from these."""
    module_name = name.rpartition(".")[0]
    return module_name.partition(".")[0] != "torch" or module_name in ("torch.nn.parallel", "torch.optim")


def _speaks_for_the_job() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(who: str, lines: Sequence[str]) -> None:
    sys.stderr.write("".join(f"{who}: {line}\n" for line in lines))
