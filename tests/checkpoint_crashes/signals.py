"""Sends SIGTERM to trainings at random moments, and checks that each leaves with its last step saved."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from drivetrain.checkpointing import Checkpointer
from polling import wait_until
from resumed_training import Case, errors_of, newest, started, steps_of

WAIT_S = 120
CASES = [
    Case("alone", every=3, evaluates=True),
    Case("window", window=4, every=2),
    Case("workers", workers=2, every=None),
    Case("two ranks", wrapper="ours", every=2),
    Case("every step", every=1, optimizer="ours 8-bit", bfloat16=True),
]
MOMENTS = ["start-up", "evaluation", "within a window", "during a save", "any"]


class Step:
    """Passed as `on_step`, makes steps long enough for signals to arrive between them, and tells of active saves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, ckpt: Checkpointer) -> None:
        if ckpt._open_saver().is_busy:
            (self._folder / "saving").touch()
        time.sleep(0.002)


def signal_round(folder: Path, seed: int) -> list[str]:
    """Starts a training, signals it at the moment that the seed draws, and returns what is wrong."""
    rng = random.Random(seed)
    moment = MOMENTS[seed % len(MOMENTS)]
    by_moment = {"evaluation": CASES[:1], "within a window": CASES[1:2], "during a save": CASES[3:]}
    case = rng.choice(by_moment.get(moment, CASES))
    world_size = 2 if case.wrapper else 1
    lines = 0 if moment == "start-up" else rng.randrange(1, 30)
    if moment == "evaluation":
        lines = 7 * rng.randrange(1, 4)  # the training evaluates after every seventh step, for 20 ms
    name = f"{case.name}, {moment}, after {lines} steps"
    with started(case, folder, 10**6, world_size, on_step=Step(folder)) as processes:
        log = folder / "log-0"
        try:
            wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= lines, f"line {lines} of the log")
            if moment == "during a save":
                (folder / "saving").unlink(missing_ok=True)
                wait_until(lambda: (folder / "saving").exists(), "save in progress")
        except AssertionError as error:
            return [f"{name}: {error}\n{errors_of(folder)}"]
        time.sleep(rng.random() * 0.02)
        # Launchers signal all ranks. One signal must be enough.
        for process in processes if rng.random() < 0.5 else [rng.choice(processes)]:
            os.kill(process.pid, signal.SIGTERM)
        for process in processes:
            process.join(WAIT_S)
        codes = [process.exitcode for process in processes]
    if codes != [75] * world_size:
        return [f"{name}: exit codes {codes}\n{errors_of(folder)}"]
    latest = newest(folder / "checkpoints")
    saved = -1 if latest is None else latest.step
    problems = []
    for rank in range(world_size):
        steps = [line["step"] for line in steps_of(folder, rank)] if (folder / f"log-{rank}").exists() else []
        # The step that leaves raises before it is logged. A signal before the first step may leave without one.
        if saved not in ({-1, 1} if not steps else {steps[-1] + 1}):
            problems.append(f"{name}: rank {rank} made the steps to {steps[-1:]} and saved {saved}")
    if latest is not None and (faults := latest.verify()):
        problems.append(f"{name}: {faults[0]}")
    return problems
