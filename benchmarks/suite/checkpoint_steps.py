"""Measures what saves cost a training: the steps after a save, against torch's own ways to save, and frequent saves."""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, Dataset

import drivetrain
from drivetrain.bench.measure import Row, median_interval
from drivetrain.bench.ranks import on_ranks
from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler

from .activation_models import GPT

LIMIT_S = 600.0
AFTER = 20  # steps after a save whose extra time counts
OFTEN = 10  # steps between frequent saves
TOKENS = (1, 128)  # per rank and step
VOCABULARY = 6000  # gives 25 M parameters
RANKS_LIMIT_S = 3600.0
EXTRA_OF_A_STEP, LOST = 0.10, 0.01  # targets
SAMPLES, OFFSET, POSITION_S = 10**10, 10**9, 2.0


def run(directory: Path, rounds: int) -> list[Row]:
    """Returns the rows: two ranks of one thread train a GPT of 25 M parameters.

    Args:
        directory: A folder on the disk to measure.
        rounds: Timed rounds of each way to save.
    """
    found = on_ranks(functools.partial(_measure, str(directory), rounds), timeout_s=RANKS_LIMIT_S)
    return [*_extra_rows(found), _frequent_row(found), _position()]


def _extra_rows(found: dict[str, Any]) -> list[Row]:
    plain = found["blocks"].pop("none")
    step_ms = statistics.median(plain) / AFTER * 1e3
    extra = {
        name: [(a - b) * 1e3 for a, b in zip(times, plain, strict=True)] for name, times in found["blocks"].items()
    }
    shares = [one / step_ms for one in extra["ours"]]
    share, low, high = median_interval(shares)
    ours = statistics.median(extra["ours"])
    rows = [
        Row(
            f"one save, extra time over the next {AFTER} steps: one step",
            "ms",
            step_ms,
            ours,
            share,
            low,
            high,
            f"<= {EXTRA_OF_A_STEP:g}",
            share <= EXTRA_OF_A_STEP,
        )
    ]
    for name, values in extra.items():
        if name != "ours":
            theirs = statistics.median(values)
            rows.append(
                Row(f"one save, extra time over the next {AFTER} steps: {name}", "ms", theirs, ours, ours / theirs)
            )
    return rows


def _frequent_row(found: dict[str, Any]) -> Row:
    lost = [1 - plain / ours for plain, ours in zip(found["plain"], found["often"], strict=True)]
    share, low, high = median_interval(lost)
    plain, ours = (statistics.median(found[name]) / found["steps"] * 1e3 for name in ("plain", "often"))
    what = f"a step with a save every {OFTEN} steps ({found['saves']} of {found['due']} due were made); share lost"
    return Row(what, "ms", plain, ours, share, low, high, f"<= {LOST:g}", share <= LOST)


def make_training() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Returns a wrapped GPT of 25 M parameters, its optimizer, and this rank's tokens of a step, int64 of TOKENS."""
    torch.manual_seed(0)
    model = drivetrain.DistributedDataParallel(GPT(depth=6, dim=512, heads=8, length=TOKENS[1], vocabulary=VOCABULARY))
    return model, drivetrain.optim.AdamW(model.parameters()), torch.randint(VOCABULARY, TOKENS)


def _measure(directory: str, rounds: int) -> dict[str, Any]:
    rank, folder = dist.get_rank(), Path(directory)
    model, optimizer, tokens = make_training()

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    ways: dict[str, Callable[[], Callable[[], object]]] = {
        "none": lambda: lambda: None,
        "DCP async_save": functools.partial(_dcp, folder / "async", model, optimizer, dist.new_group(backend="gloo")),
        "DCP save": functools.partial(_dcp, folder / "sync", model, optimizer, None),
        "torch.save on rank 0, as Lightning's and HF's Trainer do": functools.partial(
            _torch_save, folder / "torch.pt", model, optimizer
        ),
    }
    blocks: dict[str, list[float]] = {name: [] for name in ("none", "ours", *list(ways)[1:])}
    with Checkpointer(folder / "once", model=model, optimizer=optimizer, every=None, keep=1, signals=()) as ckpt:
        for index in range(rounds + 1):
            for name in blocks:
                dist.barrier()
                began = time.perf_counter()
                wait = ways[name]() if name in ways else _begin(ckpt)
                for _ in range(AFTER):
                    step()
                    if name == "ours":
                        ckpt.step()
                taken = time.perf_counter() - began
                wait()
                if index > 0:  # the first round maps memory
                    blocks[name].append(taken)
    often, plain, saves = [], [], 0
    steps = 4 * OFTEN
    for index in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        taken = time.perf_counter() - began
        if index > 0:
            plain.append(taken)
        path = folder / "often"
        with Checkpointer(path, model=model, optimizer=optimizer, every=OFTEN, keep=None, signals=()) as ckpt:
            _begin(ckpt)()  # the first save of a run maps memory
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                step()
                ckpt.step()
            taken = time.perf_counter() - began
        if index > 0:
            often.append(taken)
            saves += len(list(path.glob("step-*"))) - 1
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
        dist.barrier()
    return {
        "blocks": blocks,
        "plain": plain,
        "often": often,
        "steps": steps,
        "saves": saves,
        "due": rounds * steps // OFTEN,
    }


def _begin(ckpt: Checkpointer) -> Callable[[], object]:
    """Begins a save as `step()` does when one is due, and returns how to wait for its end."""
    saver = ckpt._open_saver()
    saver.begin(ckpt.steps, ckpt._header())

    def wait() -> None:
        saver.wait()
        if saver.error is not None:
            raise saver.error

    return wait


def _dcp(path: Path, model: nn.Module, optimizer: Any, group: Any) -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own calls
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        if group is None:
            state_dict_saver.save(state, checkpoint_id=path)
            return lambda: None
        future: Any = state_dict_saver.async_save(state, checkpoint_id=path, process_group=group)
        return lambda: future.result(LIMIT_S)


def _torch_save(path: Path, model: nn.Module, optimizer: Any) -> Callable[[], object]:
    if dist.get_rank() == 0:
        with path.open("wb") as stream:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
            stream.flush()
            os.fsync(stream.fileno())
    dist.barrier()
    return lambda: None


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def _position() -> Row:
    """Measures how long a loader takes to its first batch at an offset."""
    state = ResumableSampler(SAMPLES, num_replicas=1, rank=0).state_dict() | {"position": OFFSET}
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        sampler = ResumableSampler(SAMPLES, num_replicas=1, rank=0)
        sampler.load_state_dict(state)
        next(iter(DataLoader(_Numbers(), batch_size=32, sampler=sampler)))
        seconds.append(time.perf_counter() - began)
    found = statistics.median(seconds)
    what = f"first batch at sample {OFFSET:,} of {SAMPLES:,}; the limit"
    return Row(what, "s", POSITION_S, found, found / POSITION_S, target=f"< {POSITION_S:g} s", met=found < POSITION_S)
