"""Damages random files of random tiers, and checks that a run continues from its newest intact step or raises."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import resumed_training
from checkpoint_crashes.contents import Round
from drivetrain.checkpointing import Checkpointer, CheckpointError, Remote

STEPS = 3
FILES = ("rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "manifest.json")
NOTES = ("run.json", "tiers.json", "audit.jsonl")  # next to the checkpoints of the directory


def flip(path: Path) -> None:
    """Flips a bit of a file."""
    data = bytearray(path.read_bytes())
    data[-100 % len(data)] ^= 1
    path.write_bytes(data)


def _fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "cut off by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeros": _fill_with_zeros,
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
}


def trained(directory: Path, steps: int, url: Path | None = None, keep: int = 3) -> Checkpointer:
    """Makes some steps of a run with a remote, each with a save."""
    tiers = [] if url is None else [Remote(f"file://{url}", keep=None)]
    return resumed_training.trained(directory, steps, keep=keep, tiers=tiers, run="tested")


def damage_rounds(folder: Path, seeds: range) -> Iterator[Round]:
    """Yields (seed, True, problems) for each seed."""
    warnings.filterwarnings("ignore", "the training continues with step")
    original = folder / "undamaged"
    for _ in range(STEPS):  # one run each, as a run leaves out an upload that a newer save overtakes
        trained(original / "runs", 1, original / "remote")
    for seed in seeds:
        place = folder / f"damage-{seed}"
        shutil.copytree(original, place)
        problems = damage_round(place, seed)
        shutil.rmtree(place, ignore_errors=True)  # a thread may still try to upload what is damaged
        yield seed, True, problems


class _Enough(Exception):
    """Leaves the block without a save or an upload."""


def _restored_step(folder: Path) -> int:
    model = nn.Linear(8, 8)
    tiers = [Remote(f"file://{folder / 'remote'}", keep=None)]
    steps = 0
    with (
        contextlib.suppress(_Enough),
        Checkpointer(folder / "runs", model=model, every=None, tiers=tiers, run="tested") as ckpt,
    ):
        steps = ckpt.steps
        torch.testing.assert_close(model.weight.detach(), torch.full((8, 8), float(steps)), rtol=0, atol=0)
        raise _Enough
    return steps


def damage_round(folder: Path, seed: int) -> list[str]:
    """Damages one to six files, restarts the run, and returns what is wrong."""
    rng = random.Random(seed)
    places = [
        *itertools.product(("runs", "remote"), range(1, STEPS + 1), FILES),
        *(("runs", 0, name) for name in NOTES),
    ]
    chosen = rng.sample(places, rng.randrange(1, 7))
    done = []
    for tier, step, name in chosen:
        kind = rng.choice(list(DAMAGES))
        path = folder / tier / (f"step-{step:010d}" if step else "") / name
        if path.exists() and path.stat().st_size:
            DAMAGES[kind](path)
            done.append(f"{kind}: {tier}, {step}, {name}")
    copies = itertools.product(("runs", "remote"), range(1, STEPS + 1))
    intact = [step for tier, step in copies if not any(one[:2] == (tier, step) for one in chosen)]
    try:
        found = _restored_step(folder)
    except CheckpointError:
        # The identity of the run may be damaged, and a directory whose run is unknown is refused.
        return [] if not intact or any(name == "run.json" for _, _, name in chosen) else [f"it was refused: {done}"]
    if found == (expected := max(intact, default=None)):
        return []
    return [f"it continued at step {found}, expected {expected}: {done}"]
