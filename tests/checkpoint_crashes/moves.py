"""Kills runs with logical ranks at random moments, continues on drawn numbers of ranks, and compares every step."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import DistributedDataParallel
from drivetrain.checkpointing import Checkpointer, continue_in_place
from drivetrain.data import ResumableSampler
from warm_python import warm_context

PARTS, STEPS, BATCH = 8, 2, 2
WINDOWS = 12
SIZES = (1, 2, 4, 8)
LIMIT_S = 120.0
MODELS = ("gpt", "resnet")


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 13, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.block(self.tokens(x), src_mask=mask, is_causal=True)).flatten(0, 1)


class TinyResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.residual = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.residual(x)).relu().mean((2, 3)))


def make(name: str) -> tuple[nn.Module, TensorDataset]:
    """Returns a model and its data."""
    torch.manual_seed(1)
    rng = torch.Generator().manual_seed(2)
    if name == "gpt":
        tokens = torch.randint(13, (100, 7), generator=rng)
        return TinyGPT(), TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return TinyResNet(), TensorDataset(torch.randn(100, 3, 6, 6, generator=rng), torch.arange(100) % 10)


def train(
    name: str,
    folder: Path,
    life: int,
    rank: int,
    size: int,
    death: tuple[int, float] | None,
    in_place: bool,
    shard: str | None,
) -> None:
    """Trains as one rank. in_place: ranks continue in this process once others have died."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)  # ranks of a dead one say a lot
    limit = LIMIT_S / 6 if in_place else LIMIT_S  # some of gloo's collectives notice a death by their timeout only
    store = dist.FileStore(str(folder / f"store-{life}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit))
    if in_place:
        continue_in_place(lambda: train_in_group(name, folder, death, shard), folder / "checkpoints", timeout=LIMIT_S)
    else:
        train_in_group(name, folder, death, shard)
    dist.destroy_process_group()


def train_in_group(name: str, folder: Path, death: tuple[int, float] | None, shard: str | None) -> None:
    """Trains from the newest checkpoint on, and notes the bits of every step.

    death: the step at which this rank begins to die, and the seconds until it does.
    """
    rank = dist.get_rank()
    model, dataset = make(name)
    torch.manual_seed(3 + rank)
    wrapped = DistributedDataParallel(model, logical_ranks=PARTS, shard=shard)
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.01)
    sampler = ResumableSampler(dataset, logical_ranks=PARTS, part=STEPS * BATCH)
    loader = DataLoader(dataset, BATCH, sampler=sampler, generator=torch.Generator())
    window = drivetrain.accumulate(wrapped, optimizer, STEPS, max_grad_norm=1.0)
    parts: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "data": loader, "window": window}
    with Checkpointer(folder / "checkpoints", **parts, every=1, signals=(), timeout=LIMIT_S) as ckpt, window:
        for epoch in range(ckpt.epoch, WINDOWS):
            if ckpt.steps == WINDOWS:
                break
            sampler.set_epoch(epoch)
            for x, targets in loader:
                loss = F.cross_entropy(wrapped(x), targets.flatten())
                if not window.backward(loss, weight=targets.numel()):
                    continue
                note(folder / f"log-{rank}", ckpt.steps, model, optimizer)
                if death is not None and ckpt.steps >= death[0]:
                    threading.Thread(target=_die_after, args=(death[1],), daemon=True).start()
                    death = None
                ckpt.step()
                if ckpt.steps == WINDOWS:
                    break


def note(log: Path, step: int, model: nn.Module, optimizer: Any) -> None:
    bits = 0
    for value in [*model.parameters(), torch.tensor(optimizer.grad_norm)]:
        bits = zlib.crc32(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), bits)
    with log.open("a") as lines:
        lines.write(json.dumps([step, bits]) + "\n")


def _die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def live(
    name: str,
    folder: Path,
    life: int,
    size: int,
    deaths: Mapping[int, tuple[int, float]],
    in_place: bool = False,
    shard: str | None = None,
) -> list[int | None]:
    """Runs the ranks of one life, and returns their exit codes.

    deaths: step and delay, by rank. Unless the others continue in place, all end once one has died.
    """
    context = warm_context()
    ranks = [
        context.Process(target=train, args=(name, folder, life, rank, size, deaths.get(rank), in_place, shard))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + LIMIT_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        if not in_place and any(process.exitcode not in (None, 0) for process in ranks):
            break
        time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def lines_of(folder: Path) -> set[tuple[int, int]]:
    return {tuple(json.loads(line)) for log in folder.glob("log-*") for line in log.read_text().splitlines()}


def move_round(name: str, folder: Path, seed: int) -> list[str]:
    """Runs a training on one number of ranks, and again with deaths and other numbers. Returns what is wrong.

    The second one shares the optimizer's states among the ranks of most lives.
    """
    rng = random.Random(seed)
    steps = [*sorted(rng.sample(range(WINDOWS - 1), 2)), None]
    (folder / "whole").mkdir(parents=True)
    (folder / "moved").mkdir()
    if any(codes := live(name, folder / "whole", 0, rng.choice(SIZES), {})):
        return [f"the ranks of the whole run ended with {codes}"]
    sizes = rng.sample(SIZES, 3)
    for life, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        deaths = {} if step is None else {rng.randrange(size): (step, rng.random() * 0.05)}
        codes = live(name, folder / "moved", life, size, deaths, shard=rng.choice(("optimizer", "optimizer", None)))
        if step is None and any(codes):
            return [f"the last ranks ended with {codes}"]
    want, got = lines_of(folder / "whole"), lines_of(folder / "moved")
    if len(want) != WINDOWS:
        return [f"the ranks of the whole run differ: {sorted(want)}"]
    wrong = sorted({step for step, _ in got ^ want})
    return [f"steps {wrong} differ, deaths at {steps[:2]} on {sizes} ranks"] if wrong else []


def move_rounds(folder: Path, seeds: range) -> Iterator[tuple[int, bool, list[str]]]:
    """Yields (seed, True, problems) for each seed. Seeds take the models in turn."""
    for seed in seeds:
        name = MODELS[seed % len(MODELS)]
        place = folder / f"move-{seed}"
        problems = [f"{name}: {problem}" for problem in move_round(name, place, seed)]
        if not problems:
            shutil.rmtree(place)
        yield seed, True, problems
