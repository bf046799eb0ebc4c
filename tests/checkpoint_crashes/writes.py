"""Writes parameters and states at random moments between steps, and compares checkpoints with hashes of their steps."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from checkpoint_crashes.contents import Round
from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.state.training_state import state_dicts
from drivetrain.optim import AdamW
from resumed_training import checksum_of

_SIZE = 1 << 20  # elements of each of two matrices: 25 MB with their optimizer states
_STEPS = 25  # rounds of one training
_LONGEST_PAUSE_S = 0.01  # several times a copy's


def write_rounds(folder: Path, seeds: range) -> Iterator[Round]:
    """Yields (seed, True, problems) for each seed. Trainings differ in their optimizer."""
    for first in seeds[::_STEPS]:
        some = range(first, min(first + _STEPS, seeds.stop))
        rng = random.Random(first)
        yield from _training(folder / f"writes-{first}", some, rng.choice([AdamW, torch.optim.AdamW]))


def _training(folder: Path, seeds: range, kind: type[torch.optim.Optimizer]) -> Iterator[Round]:
    model = nn.Sequential(nn.Linear(1024, _SIZE // 1024), nn.Tanh(), nn.Linear(_SIZE // 1024, 1024))
    averaged = [param.detach().clone().normal_() for param in model.parameters()]
    optimizer = kind(model.parameters(), lr=1e-3)
    with Checkpointer(folder, model=model, optimizer=optimizer, every=1, keep=2) as ckpt:
        for seed in seeds:
            rng = random.Random(seed)
            model(torch.randn(4, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected = _hash(model, optimizer)
            ckpt.step()
            time.sleep(rng.random() * _LONGEST_PAUSE_S)
            _write(model, optimizer, averaged, rng)
            saver = ckpt._open_saver()
            saver.wait()
            checkpoint = saver.store.latest()
            problems = []
            if checkpoint is None or checkpoint.step != ckpt.steps:
                problems.append(f"step {ckpt.steps} was not saved: {saver.error}")
            elif _hash_of(checkpoint, model) != expected:
                problems.append(f"the checkpoint of step {ckpt.steps} has other values than the step ended with")
            yield seed, True, problems


def _write(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: list[Tensor], rng: random.Random) -> None:
    """Does what scripts do between two steps: validates averaged weights, clips, decays, edits states."""
    params = list(model.parameters())
    kind = rng.choice(["swap by data", "swap by copies", "clip", "decay by another library", "states"])
    if kind == "swap by data":
        kept = [param.data.clone() for param in params]
        for param, value in zip(params, averaged, strict=True):
            param.data.copy_(value)
        time.sleep(rng.random() * _LONGEST_PAUSE_S)
        for param, value in zip(params, kept, strict=True):
            param.data.copy_(value)
    elif kind == "swap by copies":
        kept = [param.detach().clone() for param in params]
        with torch.no_grad():
            torch._foreach_copy_(params, averaged)
            time.sleep(rng.random() * _LONGEST_PAUSE_S)
            torch._foreach_copy_(params, kept)
    elif kind == "clip":
        with torch.no_grad():
            params[0].clamp_(-1e-3, 1e-3)
    elif kind == "decay by another library":
        params[0].detach().numpy()[:] *= 0.5  # torch counts no such write
    else:
        for values in optimizer.state.values():
            values["exp_avg"].zero_()


def _hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return _checksum([model.state_dict(), optimizer.state_dict()["state"]])


def _hash_of(checkpoint: object, model: nn.Module) -> int:
    saved = state_dicts(checkpoint)  # type: ignore[arg-type]
    return _checksum([{name: saved["model"][name] for name in model.state_dict()}, saved["optimizer"][0]["state"]])


def _checksum(value: object) -> int:
    return checksum_of(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
