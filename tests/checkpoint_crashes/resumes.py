"""Kills loops at random moments, resumes them, and compares each of their steps with an uninterrupted run."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.store.reading import complete_checkpoints
from frameworks import resumed_trainers as trainers
from polling import wait_until
from resumed_training import checksum_of
from warm_python import warm_context

STEPS = 28  # five epochs of most loops
LIMIT_S = 300.0
_SAVED_BY = 12  # each run waits at this step for a complete checkpoint
_LONGEST_DELAY_S = 0.03  # from the drawn step to the kill
_STEPS_OF_DELAY = 2  # which are made meanwhile at most, so that each run begins before the last step


class Run:
    """One process of a training, from its start or from a checkpoint to its end or its death.

    Args:
        folder: Has the checkpoints, and a line for each step of all processes.
        seed: Draws how often the run saves, and when it dies.
        death: The step after which it dies; None for a run that ends.

    Attributes:
        loss: The loss of the current step, if the loop puts it here.
    """

    loss: Tensor

    def __init__(self, folder: Path, seed: int, death: int | None) -> None:
        self._folder, self._death = folder, death
        self._rng = random.Random(seed)
        self._every = self._rng.choice([1, 1, 2, 5])
        self._ckpt: Checkpointer | None = None
        self._is_dying = False

    def checkpointer(self, **objects: Any) -> Checkpointer:
        """Returns a Checkpointer of these objects."""
        options: dict[str, Any] = {"every": self._every, "signals": (), "timeout": LIMIT_S}
        self._ckpt = Checkpointer(self._folder / "checkpoints", **options, **objects)
        return self._ckpt

    def ends(self, model: nn.Module, loss: Tensor) -> bool:
        """Notes the loss and the weights of a step, and returns whether it is the last one."""
        step, bits = self._ckpt.steps, checksum_of(model.state_dict().values())
        with (self._folder / "log").open("a") as log:
            log.write(json.dumps({"step": step, "loss": loss.item().hex(), "bits": bits}) + "\n")
        if step == _SAVED_BY:
            # A slow disk ends a save that began steps ago, so that a later death can lose no more than steps.
            wait_until(lambda: bool(complete_checkpoints(self._folder / "checkpoints")), "complete checkpoint", LIMIT_S)
        if self._death is not None:
            if not self._is_dying and step >= self._death:  # a run can begin behind the drawn step
                self._is_dying, self._death = True, step
                delay = self._rng.random() * _LONGEST_DELAY_S
                threading.Thread(target=die_after, args=(delay,), daemon=True).start()
            if step == self._death + _STEPS_OF_DELAY:
                time.sleep(LIMIT_S)  # dies meanwhile
        return step == STEPS


def die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def resume_round(folder: Path, seed: int) -> list[str]:
    """Returns what is wrong with one loop. Seeds that follow each other take one loop after the other."""
    names = [*_loops(), *trainers.TRAINERS]
    name = names[seed % len(names)]
    make = trainer_round if name in trainers.TRAINERS else loop_round
    return [f"{name}: {problem}" for problem in make(name, folder, seed)]


def loop_round(name: str, folder: Path, seed: int) -> list[str]:
    """Runs a loop to its end, and again with two deaths at drawn steps. Returns what is wrong."""
    rng = random.Random(seed)
    first = rng.randrange(1, STEPS - 5)
    second = rng.randrange(first + 1, STEPS - 3)
    deaths: list[int | None] = [first, second, None]
    for place in ("whole", "killed"):
        (folder / place).mkdir(parents=True)
    codes = [_in_process(name, folder / "whole", seed, None)]
    codes += [_in_process(name, folder / "killed", seed + at, death) for at, death in enumerate(deaths)]
    if codes != [0, -signal.SIGKILL, -signal.SIGKILL, 0]:
        errors = [file.read_text() for file in folder.glob("*/errors")]
        return [f"its processes ended with {codes}: {''.join(errors)}"]
    expected = {line["step"]: line for line in _lines(folder / "whole")}
    found = _lines(folder / "killed")
    wrong = sorted({line["step"] for line in found if line != expected.get(line["step"])})
    problems = [f"steps {wrong} differ from the uninterrupted run, deaths after {deaths[:2]}"] if wrong else []
    if {line["step"] for line in found} != set(expected):
        problems.append(f"it made the steps {[line['step'] for line in found]}")
    if second > _SAVED_BY and [line["step"] for line in found].count(1) > 2:
        problems.append("the last process began again")
    return problems


def trainer_round(name: str, folder: Path, seed: int) -> list[str]:
    """Does the same to a framework's Trainer, whose runs die at drawn batches."""
    train, package, total = trainers.TRAINERS[name]
    whole, killed = folder / "whole", folder / "killed"
    folder.mkdir()
    first, second = sorted(random.Random(seed).sample(range(3, 26), 2))
    runs = [(whole, total, None), (killed, total, first), (killed, total, second), (killed, total, None)]
    codes = trainers.run(train, package, runs, every=1)
    if codes != [[0], [-signal.SIGKILL], [-signal.SIGKILL], [0]]:
        return [f"its processes ended with {codes}: {trainers.errors_of(killed)}{trainers.errors_of(whole)}"]
    is_same = set(trainers.lines_of(killed)) == set(trainers.lines_of(whole))
    return [] if is_same else [f"it differs from the uninterrupted run, deaths at {first} and {second}"]


def _loops() -> dict[str, Any]:
    return importlib.import_module("checkpoint_crashes.loops").LOOPS


def _in_process(name: str, folder: Path, seed: int, death: int | None) -> int | None:
    process = warm_context().Process(target=_train, args=(name, folder, seed, death))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join(LIMIT_S)
    return process.exitcode


def _train(name: str, folder: Path, seed: int, death: int | None) -> None:
    torch.set_num_threads(1)
    errors = (folder / "errors").open("a", buffering=1)
    os.dup2(errors.fileno(), 2)  # workers of a killed process complain
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(11)
    try:
        _loops()[name](Run(folder, seed, death))
    except BaseException:
        errors.write(traceback.format_exc())
        raise


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
