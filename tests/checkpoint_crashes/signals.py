"""Sends signals to trainings at random moments, and to whole jobs whose loaders have workers, as schedulers do.

Each must leave with its last step saved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.data import ResumableSampler
from polling import wait_until
from resumed_training import Case, errors_of, newest, started, steps_of

WAIT_S, START_S = 120, 120
METHODS = ["fork", "spawn", "forkserver"]
SIGNALS = [signal.SIGTERM, signal.SIGUSR1]
ROUTES = ["group", "torchrun", "pid"]
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


class SlowRows(Dataset[Tensor]):
    """Rows whose loading takes about as long as a step, so that the training waits for workers."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.004)
        return torch.full((4,), float(index))


def train(folder: Path, method: str, is_persistent: bool) -> None:
    """Trains until a signal comes, and appends each step to a file of this rank once `step()` has returned."""
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["torch", "drivetrain"])  # otherwise each worker imports them
    rank = int(os.environ.get("RANK", "0"))
    (folder / f"group-{rank}").write_text(str(os.getpgrp()))
    model: torch.nn.Module = torch.nn.Linear(4, 4)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    rows = SlowRows()
    loader = DataLoader(
        rows,
        batch_size=2,
        num_workers=2,
        sampler=ResumableSampler(rows),
        multiprocessing_context=method,
        persistent_workers=is_persistent,
    )
    ckpt = Checkpointer(
        folder / "checkpoints", model=model, optimizer=optimizer, data=loader, every=None, signals=SIGNALS
    )
    with (folder / f"steps-{rank}").open("a", buffering=1) as steps, ckpt:
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
            steps.write(f"{ckpt.steps}\n")


def group_round(folder: Path, seed: int) -> list[str]:
    """Returns what is wrong after a signal. Seeds take all start methods, signals and routes in turn."""
    method, number, route = METHODS[seed % 3], SIGNALS[seed // 3 % 2], ROUTES[seed // 6 % 3]
    rng = random.Random(seed)
    return signaled(folder, method, number, route, rng.random() < 0.5, rng.randrange(1, 20), rng.random() * 0.02)


def signaled(
    folder: Path,
    method: str,
    number: signal.Signals,
    route: str,
    is_persistent: bool = False,
    steps: int = 4,
    later_s: float = 0.0,
    python: str = sys.executable,
) -> list[str]:
    """Starts a training, signals it after some steps, and returns what is wrong.

    Args:
        folder: A new folder.
        method: How workers start.
        number: The signal.
        route: "group" signals the rank and its workers, "pid" the rank alone, and "torchrun" the launcher of two ranks,
            which signals the ranks' groups.
        is_persistent: Keeps the workers over epochs.
        steps: Steps before the signal.
        later_s: Seconds after the last of them.
        python: Runs the training.
    """
    folder.mkdir()
    command = [__file__, str(folder), method, str(int(is_persistent))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    if route == "torchrun":
        options = ["--standalone", "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR1"]
        command = ["-m", "torch.distributed.run", *options, *command]
    name = f"{method}{', persistent' * is_persistent}, {number.name} to {route} after {steps} steps"
    with (folder / "errors").open("w") as errors:
        job = subprocess.Popen([python, *command], env=environment, stderr=errors, start_new_session=True)
        try:
            wait_until(lambda: len(_steps(folder, 0)) >= steps or job.poll() is not None, f"step {steps}", START_S)
            time.sleep(later_s)
            os.killpg(job.pid, number) if route == "group" else os.kill(job.pid, number)
            code = job.wait(WAIT_S)
        except (AssertionError, subprocess.TimeoutExpired, ProcessLookupError) as error:
            return [f"{name}: {error!r}\n{(folder / 'errors').read_text()}"]
        finally:
            for group in {job.pid, *(int(path.read_text()) for path in folder.glob("group-*"))}:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            job.wait(WAIT_S)
    found = complete_checkpoints(folder / "checkpoints")
    saved = found[-1].step if found else None
    done = [_steps(folder, rank)[-1:] for rank in range(2 if route == "torchrun" else 1)]
    problems = []
    if route != "torchrun" and code != 75:
        problems.append(f"exit code {code}")
    # The step that leaves raises before it is written down.
    if saved is None or any(steps != [saved - 1] for steps in done):
        problems.append(f"ranks made the steps up to {done} and one more, and {saved} is saved")
    return [f"{name}: {problem}\n{(folder / 'errors').read_text()}" for problem in problems]


def _steps(folder: Path, rank: int) -> Sequence[int]:
    path = folder / f"steps-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")
