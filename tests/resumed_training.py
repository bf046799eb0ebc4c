"""Trains small models under Checkpointer in real processes that are killed, and records the bits of every step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

import drivetrain
from drivetrain.checkpointing import Checkpoint, Checkpointer
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.data import ResumableSampler
from warm_python import warm_context

SAMPLES = 61  # leaves an odd batch at the end of each epoch
BATCH_SIZE = 4
SAVE_TIMEOUT_S = 400.0  # one fsync may take minutes while the disk writes what other processes left in its cache
END_TIMEOUT_S = 1000
GROUP_TIMEOUT_S = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    optimizer: str = "ours"  # "ours", "ours 8-bit", "torch", "torch sgd"
    wrapper: str = ""  # "ours" or "torch" DistributedDataParallel
    window: int = 0  # micro-batches per step of drivetrain.accumulate
    no_sync: int = 0  # micro-batches per step of a script that accumulates by itself
    sampler: str = "resumable"  # "resumable", "random", "random with generator", "distributed", "stateful"
    workers: int = 0
    persistent: bool = False
    scaler: bool = False
    bfloat16: bool = False
    evaluates: bool = False  # every seventh step, for longer than a step
    every: int | None = 1
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of Checkpointer


@dataclasses.dataclass(frozen=True)
class Death:
    """Where a process kills itself: a step, counted from 1, and a point in it."""

    step: int
    point: str  # "forward", "backward" or "step"


class Rows(Dataset[Tensor]):
    """Random rows. In the main process each read adds noise from the default generators, as augmentations do."""

    def __init__(self, is_noisy: bool) -> None:
        self._rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self._is_noisy = is_noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        row = self._rows[index]
        return row + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand() if self._is_noisy else row


class Model(nn.Module):
    """Has dropout, which draws random numbers, and batch normalization, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Linear(300, 2)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(self.first(rows)) if len(rows) > 1 else self.first(rows)
        return self.last(nn.functional.dropout(hidden.relu(), 0.2, self.training))


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if case.optimizer == "torch sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    eight_bit = {"state_bits": 8, "min_8bit_size": 256, "master_bits": 24} if case.optimizer == "ours 8-bit" else {}
    return drivetrain.optim.AdamW(model.parameters(), lr=1e-2, **eight_bit)


def loader_of(case: Case, rank: int, world_size: int) -> DataLoader[Tensor]:
    dataset = Rows(is_noisy=case.workers == 0)
    generator = torch.Generator().manual_seed(3) if case.sampler == "random with generator" else None
    sampler: Any
    if case.sampler == "resumable":
        sampler = ResumableSampler(dataset, num_replicas=world_size, rank=rank, seed=5)
    elif case.sampler == "distributed":
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=5)
    elif case.sampler == "stateful" and world_size > 1:
        sampler = ResumableSampler(dataset, num_replicas=world_size, rank=rank, seed=5)
    else:
        sampler = RandomSampler(dataset, generator=generator)
    kind: Any = DataLoader
    if case.sampler == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as kind

        if world_size == 1:
            sampler = None
    options = {"sampler": sampler} if sampler is not None else {"shuffle": True}
    return kind(
        dataset,
        batch_size=BATCH_SIZE,
        num_workers=case.workers,
        persistent_workers=case.persistent,
        multiprocessing_context="fork" if case.workers else None,  # forkserver, the default here, imports torch again
        generator=generator,
        **options,
    )


def train(
    case: Case,
    folder: Path,
    total: int,
    rank: int = 0,
    world_size: int = 1,
    death: Death | None = None,
    every: int | None = 0,
    on_step: Callable[[Checkpointer], None] | None = None,
) -> None:
    """Trains up to step `total` of all restarts together, and appends a line per step to a file of this rank."""
    torch.manual_seed(7)
    model = Model().bfloat16() if case.bfloat16 else Model()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    noise = torch.Generator().manual_seed(9 + rank)
    wrapped: nn.Module = model
    if case.wrapper:
        classes = {"ours": drivetrain.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}
        wrapped = classes[case.wrapper](model)
    optimizer = optimizer_of(case, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5) if case.scaler else None
    loader = loader_of(case, rank, world_size)
    window = None
    if case.window:
        window = drivetrain.accumulate(wrapped, optimizer, case.window, scaler=scaler, scheduler=scheduler)

    def die(point: str) -> None:
        if death is not None and death == Death(ckpt.steps + (point != "step"), point):
            os.kill(os.getpid(), signal.SIGKILL)

    def make_step(rows: Tensor) -> float:
        rows = rows + 0.1 * torch.randn(rows.shape, generator=noise)
        loss = wrapped(rows.bfloat16() if case.bfloat16 else rows).float().square().mean()
        die("forward")
        if window is not None:
            window.backward(loss, weight=len(rows))
            die("backward")
            return loss.item()
        is_last = not case.no_sync or (ckpt.steps + 1) % case.no_sync == 0
        with nullcontext() if is_last or not case.wrapper else wrapped.no_sync():
            (scaler.scale(loss) if scaler else loss).backward()
        die("backward")
        if is_last:
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()

    options = {
        "every": case.every if every == 0 else every,
        "signals": (signal.SIGTERM,),
        "timeout": SAVE_TIMEOUT_S,
    } | case.extra
    ckpt = Checkpointer(
        folder / "checkpoints",
        model=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        data=loader,
        window=window,
        generators=[noise],
        config={"case": case.name},
        **options,
    )
    with (folder / f"log-{rank}").open("a", buffering=1) as log, ckpt, window or nullcontext():
        for epoch in itertools.count(ckpt.epoch):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for rows in loader:
                if ckpt.steps >= total:
                    return
                loss = make_step(rows)
                ckpt.step()
                log.write(
                    json.dumps({"step": ckpt.steps, "loss": loss.hex(), "bits": bits_of(model, optimizer)}) + "\n"
                )
                die("step")
                if case.evaluates and ckpt.steps % 7 == 0:
                    evaluate(model, rows)
                if on_step is not None:
                    on_step(ckpt)


def evaluate(model: nn.Module, rows: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(10):
            model(rows)
            time.sleep(0.002)
    model.train()


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns a checksum of all parameters, buffers and optimizer states."""
    states = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return checksum_of([*model.state_dict().values(), *states])


def checksum_of(tensors: Iterable[Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def run(case: Case, folder: Path, total: int, world_size: int = 1, death: Death | None = None, **options: Any) -> None:
    """Trains in one new process per rank.

    Raises AssertionError if a process fails, or if nothing kills rank 0 although `death` was asked for. After rank 0
    has died the other ranks are killed too, as with their host.
    """
    with started(case, folder, total, world_size, death, **options) as processes:
        processes[0].join(END_TIMEOUT_S)
        if death is not None:
            assert processes[0].exitcode == -signal.SIGKILL, f"{processes[0].exitcode}\n{errors_of(folder)}"
            return
        for process in processes:
            process.join(END_TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0] * world_size, errors_of(folder)


@contextmanager
def started(
    case: Case, folder: Path, total: int, world_size: int = 1, death: Death | None = None, **options: Any
) -> Iterator[list[Any]]:
    """Starts the ranks, and kills those that are left at the end of the block."""
    folder.mkdir(exist_ok=True)
    store = folder / f"store-{time.monotonic_ns()}"
    context = warm_context()
    processes = [
        context.Process(
            target=_serve, args=(case, folder, total, rank, world_size, store, death if rank == 0 else None, options)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(END_TIMEOUT_S)


def _serve(
    case: Case, folder: Path, total: int, rank: int, world_size: int, store: Path, death: Death | None, options: Any
) -> None:
    torch.set_num_threads(1)
    errors = (folder / f"errors-{rank}").open("a", buffering=1)
    os.dup2(errors.fileno(), 2)
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
            )
            dist.barrier()
        train(case, folder, total, rank, world_size, death, **options)
        if world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except Exception:
        errors.write(traceback.format_exc())
        sys.exit(1)


def trained(directory: Path, steps: int, every: int | None = 1, size: int = 8, **options: Any) -> Checkpointer:
    """Makes some steps, each of which adds 1 to the weights, and checks that they continue from the last one."""
    model = nn.Linear(size, size)
    nn.init.zeros_(model.weight)
    with Checkpointer(directory, model=model, every=every, **options) as ckpt:
        torch.testing.assert_close(
            model.weight.detach(), torch.full_like(model.weight, float(ckpt.steps)), rtol=0, atol=0
        )
        for _ in range(steps):
            with torch.no_grad():
                model.weight.add_(1)
            ckpt.step()
            ckpt._open_saver().wait()
    return ckpt


def newest(directory: Path) -> Checkpoint | None:
    """Returns the newest complete checkpoint, without the lock that a Store takes."""
    return next(reversed(complete_checkpoints(directory)), None) if directory.exists() else None


def errors_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("errors-*")))


def steps_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Returns the lines of a rank, in order. The last may be torn by a kill."""
    lines = (folder / f"log-{rank}").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def assert_same_bits(folder: Path, reference: Path, total: int, world_size: int = 1) -> None:
    """Asserts that every step of all restarts has the loss and the bits of the uninterrupted run."""
    for rank in range(world_size):
        expected = {line["step"]: line for line in steps_of(reference, rank)}
        found = steps_of(folder, rank)
        assert sorted(expected) == list(range(1, total + 1))
        assert {line["step"] for line in found} == set(expected)
        wrong = [line["step"] for line in found if line != expected[line["step"]]]
        assert wrong == [], f"rank {rank}: {[line['step'] for line in found]}"
