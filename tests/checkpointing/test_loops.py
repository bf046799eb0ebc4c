"""Tests that loops as people write them continue with the same bits after they were left twice without a last save."""

from __future__ import annotations

import copy
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import drivetrain
from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler

ROWS, BATCH = 42, 8  # the last batch of an epoch has two rows
EPOCHS = 100  # more than a run takes
STEPS = 28  # five epochs of most loops


class Death(Exception):
    """Leaves a loop, whose block then saves nothing."""


class Run:
    """One run of a loop, from its start or from a checkpoint to its last step or its death.

    Attributes:
        lines: The number, the loss and a checksum of the weights of each step.
    """

    def __init__(self, folder: Path, death: int | None) -> None:
        self.lines: list[tuple[int, float, int]] = []
        self._folder, self._death = folder, death
        self._ckpt: Checkpointer | None = None

    def checkpointer(self, **objects: Any) -> Checkpointer:
        """Returns a Checkpointer of these objects."""
        self._ckpt = Checkpointer(self._folder, every=2, signals=(), **objects)
        return self._ckpt

    def ends(self, model: nn.Module, loss: Tensor) -> bool:
        """Notes the loss and the weights of a step, and returns whether it is the last one."""
        assert self._ckpt is not None
        step, bits = self._ckpt.steps, 0
        for tensor in model.state_dict().values():
            bits = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), bits)
        self.lines.append((step, loss.item(), bits))
        if step == self._death:
            raise Death
        return step == STEPS


class Rows(Dataset[Tensor]):
    """Random rows with augmentation: each read adds noise from torch's, NumPy's and Python's generators."""

    def __init__(self, seed: int = 1) -> None:
        self.values = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index] + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand()


def net(width: int = 24) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = model(rows).square().mean()
    return loss


def shuffled(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(), **({"batch_size": BATCH, "shuffle": True} | options))


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def plain(run: Run) -> None:
    _over(run, shuffled())


def resumable_sampler(run: Run) -> None:
    _over(run, DataLoader(Rows(), BATCH, sampler=ResumableSampler(ROWS, seed=3)), state_bits=8, min_8bit_size=32)


def averages_swapped_in(run: Run) -> None:
    """Validates averaged weights that are copied in after the step, as torch_ema and diffusers do."""
    model, loader = net(), shuffled()
    shadow = copy.deepcopy(model)
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=1e-2)
    with run.checkpointer(model=model, optimizer=optimizer, data=loader, extra={"shadow": shadow}) as ckpt:
        for _ in range(ckpt.epoch, EPOCHS):
            for rows in loader:
                descend(optimizer, loss := loss_of(model, rows))
                for mean, param in zip(shadow.parameters(), model.parameters(), strict=True):
                    mean.data.lerp_(param.data, 0.1)
                ckpt.step()
                kept = [param.data.clone() for param in model.parameters()]
                for mean, param in zip(shadow.parameters(), model.parameters(), strict=True):
                    param.data.copy_(mean.data)
                model.eval()
                with torch.no_grad():
                    validated = loss_of(model, Rows(2).values)
                model.train()
                for before, param in zip(kept, model.parameters(), strict=True):
                    param.data.copy_(before)
                if run.ends(model, loss + validated):
                    return


def two_optimizers(run: Run) -> None:
    """Trains a generator and a discriminator in turn."""
    generator, critic, loader = (
        nn.Linear(4, 6),
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)),
        shuffled(),
    )
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    of_generator = drivetrain.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    with run.checkpointer(model=both, optimizer=[of_generator, of_critic], data=loader) as ckpt:
        for _ in range(ckpt.epoch, EPOCHS):
            for rows in loader:
                fake = generator(torch.randn(len(rows), 4))
                of_critic.zero_grad()
                loss = critic(fake.detach()).sigmoid().mean() - critic(rows).sigmoid().mean()
                loss.backward()
                of_critic.step()
                descend(of_generator, -critic(fake).mean())
                ckpt.step()
                if run.ends(both, loss):
                    return


def weighted_sampler(run: Run) -> None:
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, ROWS), 50, generator=torch.Generator().manual_seed(2))
    _over(run, shuffled(sampler=sampler, shuffle=None))


class Buckets:
    """Groups rows by length and shuffles the groups with a generator of its own, as samplers of speech data do."""

    def __init__(self) -> None:
        self.rng = random.Random(4)
        self.numpy = np.random.default_rng(5)

    def __iter__(self) -> Iterator[list[int]]:
        lengths = [index % 3 for index in range(ROWS)]
        order = sorted(self.numpy.permutation(ROWS).tolist(), key=lambda index: lengths[index])
        batches = [order[at : at + 6] for at in range(0, ROWS, 6)]
        self.rng.shuffle(batches)
        yield from batches


def buckets_by_length(run: Run) -> None:
    _over(run, DataLoader(Rows(), batch_sampler=Buckets()))


def _over(run: Run, loader: Any, **options: Any) -> None:
    """Trains over a loader, and looks at a batch of it now and then."""
    model = net()
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=1e-2, **options)
    with run.checkpointer(model=model, optimizer=optimizer, data=loader) as ckpt:
        for epoch in range(ckpt.epoch, EPOCHS):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for rows in loader:
                if len(rows) == 1:
                    continue
                descend(optimizer, loss := loss_of(model, rows))
                ckpt.step()
                if run.ends(model, loss):
                    return


def replay_buffer(run: Run) -> None:
    """Learns from a buffer of past transitions, with a target network and exploration by NumPy's generator."""

    class Buffer:
        def __init__(self) -> None:
            self.items: deque[tuple[Tensor, int, float]] = deque(maxlen=30)

        def state_dict(self) -> dict[str, Any]:
            return {"items": list(self.items)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.items = deque(state["items"], maxlen=30)

    policy, target, buffer, rng = nn.Linear(6, 3), nn.Linear(6, 3), Buffer(), np.random.default_rng(1)
    both = nn.ModuleDict({"policy": policy, "target": target})
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with run.checkpointer(model=both, optimizer=optimizer, extra={"buffer": buffer}, generators=[rng]) as ckpt:
        while True:
            state = torch.randn(6)
            action = int(rng.integers(3)) if rng.random() < 0.3 else int(policy(state).argmax())
            buffer.items.append((state, action, float(state[action])))
            states, actions, rewards = zip(*random.choices(buffer.items, k=8), strict=True)
            values = policy(torch.stack(states)).gather(1, torch.tensor(actions)[:, None])[:, 0]
            expected = torch.tensor(rewards) + 0.9 * target(torch.stack(states)).amax(1).detach()
            descend(optimizer, loss := nn.functional.smooth_l1_loss(values, expected))
            if ckpt.steps % 5 == 4:
                target.load_state_dict(policy.state_dict())
            ckpt.step()
            if run.ends(both, loss):
                return


def closure(run: Run) -> None:
    model, loader = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), shuffled()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    with run.checkpointer(model=model, optimizer=optimizer, data=loader) as ckpt:
        for _ in range(ckpt.epoch, EPOCHS):
            for rows in loader:

                def evaluate(rows: Tensor = rows) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, rows)
                    loss.backward()
                    return loss

                loss = optimizer.step(evaluate)
                ckpt.step()
                if run.ends(model, loss):
                    return


def two_loaders(run: Run) -> None:
    """Trains on labeled and unlabeled batches together."""
    model = net()
    labeled, unlabeled = shuffled(), DataLoader(Rows(5), BATCH, sampler=ResumableSampler(ROWS, seed=1))
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    with run.checkpointer(model=model, optimizer=optimizer, data=[labeled, unlabeled]) as ckpt:
        for epoch in range(ckpt.epoch, EPOCHS):
            unlabeled.sampler.set_epoch(epoch)
            for ours, theirs in zip(labeled, unlabeled, strict=True):
                descend(optimizer, loss := loss_of(model, ours) + 0.1 * model(theirs).abs().mean())
                ckpt.step()
                if run.ends(model, loss):
                    return


def endless(run: Run) -> None:
    """Takes batches from an iterator that begins anew at its end, and counts steps instead of epochs."""
    model, loader = net(), shuffled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    with run.checkpointer(model=model, optimizer=optimizer, data=loader) as ckpt:
        batches = iter(loader)
        while True:
            try:
                rows = next(batches)
            except StopIteration:
                batches = iter(loader)
                rows = next(batches)
            descend(optimizer, loss := loss_of(model, rows))
            ckpt.step()
            if run.ends(model, loss):
                return


LOOPS = [
    *(plain, resumable_sampler, averages_swapped_in, two_optimizers, weighted_sampler, buckets_by_length),
    *(replay_buffer, closure, two_loaders, endless),
]


def steps_of(loop: Callable[[Run], None], folder: Path, death: int | None = None) -> list[tuple[int, float, int]]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(11)
    run = Run(folder, death)
    with nullcontext() if death is None else pytest.raises(Death):
        loop(run)
    return run.lines


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_that_was_left_continues_with_the_same_bits(loop: Callable[[Run], None], tmp_path: Path) -> None:
    expected = {line[0]: line for line in steps_of(loop, tmp_path / "whole")}
    found = [line for death in (7, 16, None) for line in steps_of(loop, tmp_path / "left", death)]
    assert sorted({step for step, *_ in found}) == list(range(1, STEPS + 1))
    assert [step for step, *_ in found].count(1) == 1  # no run began again
    assert [line for line in found if line != expected[line[0]]] == []
