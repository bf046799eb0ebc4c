"""Kills runs with logical ranks at random moments, continues on drawn numbers of ranks, and compares every step."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from checkpoint_crashes.resumes import die_after
from drivetrain import DistributedDataParallel
from drivetrain.checkpointing import Checkpointer, continue_in_place
from drivetrain.data import ResumableSampler
from resumed_training import checksum_of
from warm_python import warm_context

PARTS, STEPS, BATCH = 8, 2, 2
SIZES = (1, 2, 4, 8)
LIMIT_S = 120.0
MODELS = ("gpt", "llama", "resnet")
SHARDS = ("optimizer", "gradients", None)
LONG_EVERY = 25


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


class TinyLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits.flatten(0, 1)


def make(name: str) -> tuple[nn.Module, TensorDataset]:
    """Returns a model and its data."""
    torch.manual_seed(1)
    rng = torch.Generator().manual_seed(2)
    if name != "resnet":
        tokens = torch.randint(13, (100, 7), generator=rng)
        return TinyGPT() if name == "gpt" else TinyLlama(), TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return TinyResNet(), TensorDataset(torch.randn(100, 3, 6, 6, generator=rng), torch.arange(100) % 10)


@dataclass(frozen=True)
class Training:
    """A training in a folder, on any number of ranks.

    in_place: ranks continue in their process once others have died. shard: as of DistributedDataParallel.
    """

    model: str
    folder: Path
    steps: int = 12
    in_place: bool = False
    shard: str | None = None

    @property
    def limit_s(self) -> float:
        return LIMIT_S + self.steps


def train(of: Training, life: int, rank: int, size: int, death: tuple[int, float] | None) -> None:
    """Trains as one rank."""
    torch.set_num_threads(1)
    os.dup2(os.open(of.folder / "errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)  # ranks of a dead one say a lot
    limit = of.limit_s / 6 if of.in_place else of.limit_s  # some of gloo's collectives notice a death by it only
    store = dist.FileStore(str(of.folder / f"store-{life}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit))
    if of.in_place:
        continue_in_place(lambda: train_in_group(of, death), of.folder / "checkpoints", timeout=of.limit_s)
    else:
        train_in_group(of, death)
    dist.destroy_process_group()


def train_in_group(of: Training, death: tuple[int, float] | None) -> None:
    """Trains from the newest checkpoint on, and notes the bits of every step.

    death: the step at which this rank begins to die, and the seconds until it does.
    """
    rank = dist.get_rank()
    model, dataset = make(of.model)
    torch.manual_seed(3 + rank)
    wrapped = DistributedDataParallel(model, logical_ranks=PARTS, shard=of.shard)
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.01)
    sampler = ResumableSampler(dataset, logical_ranks=PARTS, part=STEPS * BATCH)
    loader = DataLoader(dataset, BATCH, sampler=sampler, generator=torch.Generator())
    window = drivetrain.accumulate(wrapped, optimizer, STEPS, max_grad_norm=1.0)
    parts: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "data": loader, "window": window}
    with Checkpointer(of.folder / "checkpoints", **parts, every=1, signals=(), timeout=of.limit_s) as ckpt, window:
        for epoch in range(ckpt.epoch, of.steps):
            if ckpt.steps == of.steps:
                break
            sampler.set_epoch(epoch)
            for x, targets in loader:
                loss = F.cross_entropy(wrapped(x), targets.flatten())
                if not window.backward(loss, weight=targets.numel()):
                    continue
                note(of.folder / f"log-{rank}", ckpt.steps, model, optimizer)
                if death is not None and ckpt.steps >= death[0]:
                    threading.Thread(target=die_after, args=(death[1],), daemon=True).start()
                    death = None
                ckpt.step()
                if ckpt.steps == of.steps:
                    break


def note(log: Path, step: int, model: nn.Module, optimizer: Any) -> None:
    bits = checksum_of([*model.parameters(), torch.tensor(optimizer.grad_norm)])
    with log.open("a") as lines:
        lines.write(json.dumps([step, bits]) + "\n")


def live(of: Training, life: int, size: int, deaths: Mapping[int, tuple[int, float]]) -> list[int | None]:
    """Runs the ranks of one life, and returns their exit codes.

    deaths: step and delay, by rank. Unless the others continue in place, all end once one has died.
    """
    context = warm_context()
    ranks = [context.Process(target=train, args=(of, life, rank, size, deaths.get(rank))) for rank in range(size)]
    for process in ranks:
        process.start()
    end = time.monotonic() + of.limit_s
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        if not of.in_place and any(process.exitcode not in (None, 0) for process in ranks):
            break
        time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def lines_of(folder: Path) -> set[tuple[int, int]]:
    return {tuple(json.loads(line)) for log in folder.glob("log-*") for line in log.read_text().splitlines()}


def move_round(folder: Path, seed: int) -> list[str]:
    """Runs a training on one number of ranks, and again with deaths and other numbers. Returns what is wrong.

    The second one shares the optimizer's states, or gradients as well, among the ranks of most lives. Seeds take the
    models in turn, and some trainings are long.
    """
    name = MODELS[seed % len(MODELS)]
    steps, lives = (300, 6) if seed % LONG_EVERY == 0 else (12, 3)
    rng = random.Random(seed)
    ends = [*sorted(rng.sample(range(steps - 1), lives - 1)), None]
    (folder / "whole").mkdir(parents=True)
    (folder / "moved").mkdir()
    if any(codes := live(Training(name, folder / "whole", steps), 0, rng.choice(SIZES), {})):
        return [f"{name}: the ranks of the whole run ended with {codes}"]
    sizes = [*rng.sample(SIZES, 3), *rng.choices(SIZES, k=lives - 3)]
    for life, (size, step) in enumerate(zip(sizes, ends, strict=True)):
        deaths = {} if step is None else {rng.randrange(size): (step, rng.random() * 0.05)}
        moved = Training(name, folder / "moved", steps, shard=rng.choice(SHARDS))
        codes = live(moved, life, size, deaths)
        if step is None and any(codes):
            return [f"{name}: the last ranks ended with {codes}"]
    want, got = lines_of(folder / "whole"), lines_of(folder / "moved")
    if len(want) != steps:
        return [f"{name}: the ranks of the whole run differ: {sorted(want)}"]
    wrong = sorted({step for step, _ in got ^ want})
    return [f"{name}: steps {wrong} differ, deaths at {ends[:-1]} on {sizes} ranks"] if wrong else []
