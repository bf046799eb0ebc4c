"""Measures how soon the ranks that are left make their next step in place after another rank was killed."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain.bench.measure import Row
from drivetrain.bench.ranks import on_ranks
from drivetrain.checkpointing import Checkpointer, continue_in_place

from .checkpoint_steps import make_training

RANKS, KILLED, KILLED_IN_STEP = 3, 1, 4
LIMIT_S = 10.0  # the target
RANKS_LIMIT_S = 300.0


def run(directory: Path, rounds: int) -> Row:
    """Returns the row: three ranks train a GPT of 25 M parameters, and one is killed with SIGKILL.

    Args:
        directory: A folder on the disk to measure.
        rounds: Runs, each with ranks of its own.
    """
    seconds = []
    for index in range(rounds):
        folder = directory / f"survivors-{index}"
        folder.mkdir()
        seconds.append(
            on_ranks(functools.partial(_measure, str(folder)), RANKS, timeout_s=RANKS_LIMIT_S, killed=KILLED)
        )
        shutil.rmtree(folder)
    most = max(seconds)
    what = f"from the kill of 1 of {RANKS} ranks to the others' next step, in place: the limit, longest of {rounds}"
    return Row(what, "s", LIMIT_S, most, most / LIMIT_S, target=f"<= {LIMIT_S:g} s", met=most <= LIMIT_S)


def _measure(directory: str) -> float:
    logging.getLogger("drivetrain").setLevel(logging.ERROR)  # the loss of a rank is wanted here
    warnings.filterwarnings("ignore", message=".*was saved on")
    folder, first_rank = Path(directory), dist.get_rank()
    killed_at = folder / "killed-at"

    def train() -> float | None:
        model, optimizer, tokens = make_training()
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        with Checkpointer(folder / "runs", **objects, every=1, signals=()) as ckpt:
            while True:
                loss = model(tokens, tokens)
                if first_rank == KILLED and ckpt.steps + 1 == KILLED_IN_STEP:
                    # The clock of CLOCK_MONOTONIC is the machine's, so that other ranks can subtract from it.
                    killed_at.write_text(repr(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_world_size() < RANKS:
                    return time.monotonic() - float(killed_at.read_text())
                ckpt.step()
        return None  # a Checkpointer may end its block, as on preemption

    seconds = continue_in_place(train, folder)
    assert seconds is not None
    return seconds
