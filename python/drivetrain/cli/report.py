"""Prints the report of `drivetrain run` to stderr at exit: the models and optimizers that drivetrain has."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import current_process

from drivetrain.ddp import defaults
from drivetrain.optim import left_to_torch

_NOTHING_WRAPPED = (
    "no model was wrapped. To check, print(type(model)): drivetrain's class prints as "
    "drivetrain.ddp.distributed.DistributedDataParallel. A class that no module has as a global keeps torch's"
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
    if os.getpid() != process_id or not speaks_for_the_job():
        return
    lines = [f"wrapped: {'; '.join(defaults.constructed)}"] if defaults.constructed else []
    if not lines and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        lines.append(_NOTHING_WRAPPED)
    if with_optimizers or left_to_torch.constructed:
        lines.append(f"optimizers: {'; '.join(left_to_torch.constructed) or 'none was built'}")
    if not lines:
        lines.append("one process, which built no DistributedDataParallel. --optim replaces its optimizers")
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
    if speaks_for_the_job():
        lines = [f"{what}: {'; '.join(built)}" for what, built in found.items() if built]
        _say(f"drivetrain run, {current_process().name}", lines)


def speaks_for_the_job() -> bool:
    """Returns True on rank 0. Lightning's own launcher sets LOCAL_RANK alone."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def _say(who: str, lines: Sequence[str]) -> None:
    sys.stderr.write("".join(f"{who}: {line}\n" for line in lines))
