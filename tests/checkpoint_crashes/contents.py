"""Draws the tensors of a save from its number, and checks a directory of checkpoints against what was saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from drivetrain.checkpointing import Encryption, Store
from drivetrain.checkpointing.store.directory import leftovers
from drivetrain.checkpointing.store.reading import complete_checkpoints

KEEP = 2
KEYS = Encryption(key=lambda key_id: ("crashes", bytes(range(32))))
Round = tuple[int, bool, list[str]]  # seed, whether a process crashed, problems


def rounds_of(one_round: Callable[[Path, int], list[str]], folder: Path, seeds: range) -> Iterator[Round]:
    """Yields (seed, True, problems) for each seed. Folders of rounds with problems are left."""
    for seed in seeds:
        place = folder / f"{one_round.__name__}-{seed}"
        if not (problems := one_round(place, seed)):
            shutil.rmtree(place)
        yield seed, True, problems


def tensors_of(count: int, rank: int = 0) -> dict[str, Tensor]:
    """Returns the tensors of save number `count`. Every fourth save has more than one chunk of 4 MiB."""
    draw = torch.Generator().manual_seed(1000 * count + rank)
    large = (5 << 20) if count % 4 == 0 else 3001
    return {
        "weight": torch.randn(33, 17, generator=draw),
        "moments": torch.randint(0, 256, (large,), generator=draw, dtype=torch.uint8),
        "half": torch.randn(101, generator=draw).to(torch.bfloat16),
        "transposed": torch.randn(8, 5, generator=draw).t(),
        "empty": torch.empty(0, 3),
        "count": torch.tensor(count),
    }


def step_of(count: int) -> int:
    """Returns the step of save number `count`. Every fifth save repeats the step before, and replaces it."""
    return 10 * (count - (count % 5 == 0))


def problems_of(
    directory: Path, acknowledged: int, world_size: int = 1, encryption: Encryption | None = None
) -> list[str]:
    """Returns what is wrong with a directory after a crash: unloadable, changed or lost checkpoints.

    Args:
        directory: The directory.
        acknowledged: Number of the last save whose `result()` had returned; 0: none.
        world_size: Number of ranks of each save.
        encryption: KEYS if the checkpoints are encrypted.
    """
    problems, newest = [], 0
    complete = complete_checkpoints(directory, encryption)
    for checkpoint in complete:
        faults = checkpoint.verify()
        if faults:
            problems.append(f"{checkpoint} is listed and damaged: {faults}")
            continue
        for rank in range(world_size):
            count = checkpoint.state(rank)["count"]
            expected, found = tensors_of(count, rank), checkpoint.load(rank=rank)
            if found.keys() != expected.keys() or any(not torch.equal(found[k], expected[k]) for k in found):
                problems.append(f"{checkpoint} of save {count} has other tensors than were saved")
            if checkpoint.step != step_of(count):
                problems.append(f"{checkpoint} of save {count} has step {checkpoint.step}")
            newest = count
    if newest < acknowledged:
        problems.append(f"the newest save is {newest}, but {acknowledged} was complete before the crash")
    return problems


def problems_after_restart(directory: Path, acknowledged: int, encryption: Encryption | None = None) -> list[str]:
    """Returns what is wrong, then starts a store there, saves, and looks again."""
    problems = problems_of(directory, acknowledged, encryption=encryption)
    before = {checkpoint.step for checkpoint in complete_checkpoints(directory)}
    with Store(directory, keep=None, timeout=60, encryption=encryption) as store:
        if {checkpoint.step for checkpoint in store.checkpoints()} != before:
            problems.append("the start removed a complete checkpoint")
        if left := leftovers(directory):
            problems.append(f"the start left {[entry.name for entry in left]}")
        count = acknowledged + 11
        store.save(step_of(count), tensors_of(count), {"count": count}).result(60)
    return problems + problems_of(directory, count, encryption=encryption)
