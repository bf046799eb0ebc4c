"""Reports what `drivetrain run` has swapped, and applies it to child processes and further runs of the same script.

The swap itself follows into processes of multiprocessing, see `spawned`. If the script starts itself again for the
other ranks, as Lightning does, `drivetrain run` is inserted into that command.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing import current_process, util
from pathlib import Path
from typing import Any

from drivetrain import spawned
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


def follow() -> None:
    """Makes child processes, and their children, report the objects that they construct. The swap follows by itself."""
    spawned.follow("drivetrain.cli.children:follow_in_child")
    util.register_after_fork(_report_when_child_ends, _report_when_child_ends)  # the key must stay alive


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
    util.Finalize(None, of_child, args=(len(defaults.constructed), len(left_to_torch.constructed)), exitpriority=0)


# ---- Reports to stderr.


def at_exit(with_optimizers: bool, process_id: int) -> None:
    """Prints the report of the process that ran the script, on rank 0 only.

    Args:
        with_optimizers: True if optimizers were swapped too.
        process_id: The id of the process that ran the script; its forked copies print nothing.
    """
    if os.getpid() != process_id or not speaks_for_the_job():
        return
    lines = [f"wrapped: {_listed(defaults.constructed)}"] if defaults.constructed else []
    if not lines and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        lines.append(_NOTHING_WRAPPED)
    if with_optimizers or left_to_torch.constructed:
        lines.append(f"optimizers: {_listed(left_to_torch.constructed) or 'none was built'}")
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
        lines = [f"{what}: {_listed(built)}" for what, built in found.items() if built]
        _say(f"drivetrain run, {current_process().name}", lines)


def _listed(built: Sequence[str]) -> str:
    return "; ".join(text if times == 1 else f"{times} x {text}" for text, times in Counter(built).items())


def speaks_for_the_job() -> bool:
    """Returns True on rank 0. Lightning's own launcher sets LOCAL_RANK alone."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def _say(who: str, lines: Sequence[str]) -> None:
    sys.stderr.write("".join(f"{who}: {line}\n" for line in lines))
