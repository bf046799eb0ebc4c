"""Holds loops as people write them. Each is killed at random moments, and must continue with the same bits."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import BatchSampler, DataLoader, Dataset, SubsetRandomSampler, WeightedRandomSampler

import drivetrain
from checkpoint_crashes.resumes import Run
from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler

ROWS, BATCH = 42, 8  # the last batch of an epoch has two rows
EPOCHS = 100  # more than a run takes


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
    return model(rows).square().mean()


def shuffled(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(), **({"batch_size": BATCH, "shuffle": True} | options))


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def batches(
    run: Run, model: nn.Module, loader: Any, watched: nn.Module | None = None, **objects: Any
) -> Iterator[tuple[Checkpointer, int, Tensor]]:
    """Yields the batches of a run with its Checkpointer and the epoch, and makes a step after each one.

    The loop puts the loss into `run.loss`. The weights of `watched`, or of the model, are compared.
    """
    ckpt = run.checkpointer(model=model, data=loader, **objects)
    with ckpt, objects.get("window") or nullcontext():
        for epoch in range(ckpt.epoch, EPOCHS):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for rows in loader:
                yield ckpt, epoch, rows
                ckpt.step()
                if run.ends(watched or model, run.loss):
                    return


def plain(run: Run) -> None:
    _over(run, shuffled())


def resumable_sampler(run: Run) -> None:
    _over(run, DataLoader(Rows(), BATCH, sampler=ResumableSampler(ROWS, seed=3)), state_bits=8, min_8bit_size=32)


def schedule_per_epoch(run: Run) -> None:
    model, loader = net(), shuffled(drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
    for ckpt, _, rows in batches(run, model, loader, optimizer=optimizer, scheduler=scheduler):
        run.loss = loss_of(model, rows)
        descend(optimizer, run.loss)
        if ckpt.steps % len(loader) == len(loader) - 1:
            scheduler.step()


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


def stochastic_weight_averaging(run: Run) -> None:
    model, loader = net(), shuffled()
    swa = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=5)
    objects = {"optimizer": optimizer, "scheduler": scheduler, "extra": {"swa": swa}}
    for ckpt, _, rows in batches(run, model, loader, watched=swa, **objects):
        run.loss = loss_of(model, rows)
        descend(optimizer, run.loss)
        if ckpt.steps % 3 == 2:
            swa.update_parameters(model)
            scheduler.step()


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
    for _, _, rows in batches(run, both, loader, optimizer=[of_generator, of_critic]):
        fake = generator(torch.randn(len(rows), 4))
        run.loss = critic(fake.detach()).sigmoid().mean() - critic(rows).sigmoid().mean()
        descend(of_critic, run.loss)
        descend(of_generator, -critic(fake).mean())


def accumulates_by_hand(run: Run) -> None:
    model, loader = net(), shuffled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ckpt, _, rows in batches(run, model, loader, optimizer=optimizer):
        run.loss = loss_of(model, rows) / 3
        run.loss.backward()
        if ckpt.steps % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_window(run: Run) -> None:
    model, loader = net(), shuffled()
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=1e-2)
    window = drivetrain.accumulate(model, optimizer, steps=3)
    for _, _, rows in batches(run, model, loader, optimizer=optimizer, window=window):
        run.loss = loss_of(model, rows)
        window.backward(run.loss, weight=len(rows))


def scaled(run: Run) -> None:
    model, loader = net(), shuffled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    for ckpt, _, rows in batches(run, model, loader, optimizer=optimizer, scaler=scaler):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            run.loss = loss_of(model, rows).float() * (math.inf if ckpt.steps == 6 else 1.0)  # one step is skipped
        scaler.scale(run.loss).backward()
        scaler.step(optimizer)
        scaler.update()


def weighted_sampler(run: Run) -> None:
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, ROWS), 50, generator=torch.Generator().manual_seed(2))
    _over(run, shuffled(sampler=sampler, shuffle=None))


def subset_sampler(run: Run) -> None:
    _over(run, shuffled(sampler=SubsetRandomSampler(range(3, 40, 2)), shuffle=None))


def batch_sampler(run: Run) -> None:
    sampler = SubsetRandomSampler(range(ROWS), generator=torch.Generator().manual_seed(8))
    _over(run, DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 5, drop_last=True)))


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


class RepeatedAugmentation:
    """Repeats each index three times in a shuffle by epoch, as timm's sampler of that name does."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        indices = torch.randperm(ROWS, generator=generator).repeat_interleave(3)
        return iter(indices[: len(self)].tolist())

    def __len__(self) -> int:
        return ROWS

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def repeated_augmentation(run: Run) -> None:
    _over(run, DataLoader(Rows(), BATCH, sampler=RepeatedAugmentation()))


def workers(run: Run) -> None:
    _over(run, _values(num_workers=2, multiprocessing_context="fork"))


def persistent_workers(run: Run) -> None:
    _over(run, _values(num_workers=1, multiprocessing_context="fork", persistent_workers=True, prefetch_factor=3))


def _values(**options: Any) -> DataLoader[Tensor]:
    """Workers have random states that nobody can restore, so their rows have no noise."""
    values: Any = Rows().values
    return DataLoader(values, BATCH, shuffle=True, **options)


def stateful_loader(run: Run) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    _over(run, StatefulDataLoader(Rows(), BATCH, shuffle=True))


def _over(run: Run, loader: Any, **options: Any) -> None:
    """Trains over a loader."""
    model = net()
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for _, _, rows in batches(run, model, loader, optimizer=optimizer):
        run.loss = loss_of(model, rows)
        descend(optimizer, run.loss)


def consumed_samples(run: Run) -> None:
    """Counts consumed samples by itself, as Megatron's samplers do, and needs no position of the loader."""

    class Consumed:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    model, consumed, values = net(), Consumed(), Rows().values
    optimizer = drivetrain.optim.Lion(model.parameters(), lr=1e-3)
    with run.checkpointer(model=model, optimizer=optimizer, extra={"consumed": consumed}) as ckpt:
        while True:
            epoch, place = divmod(consumed.value, ROWS - ROWS % BATCH)
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
            descend(optimizer, loss := loss_of(model, values[order[place : place + BATCH]]))
            consumed.value += BATCH
            ckpt.step()
            if run.ends(model, loss):
                return


def drawn_batches(run: Run) -> None:
    """Draws batches from the default generator by step, as nanoGPT does."""
    model, text = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), torch.arange(500) % 50
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    with run.checkpointer(model=model, optimizer=optimizer) as ckpt:
        for step in itertools.count(ckpt.steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (step + 1) / 5)
            at = torch.randint(490, (4,))
            tokens, targets = (torch.stack([text[i + k : i + k + 8] for i in at]) for k in (0, 1))
            descend(optimizer, loss := nn.functional.cross_entropy(model(tokens).mT, targets))
            ckpt.step()
            if run.ends(model, loss):
                return


def early_stopping(run: Run) -> None:
    """Keeps the best weights and a count of bad steps, and goes back to them."""

    class Best:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.loss, self.bad, self.weights = model, math.inf, 0, copy.deepcopy(model.state_dict())

        def see(self, loss: float) -> None:
            if loss < self.loss:
                self.loss, self.bad, self.weights = loss, 0, copy.deepcopy(self.model.state_dict())
            elif (bad := self.bad + 1) > 3:
                self.model.load_state_dict(self.weights)
                self.loss, self.bad = loss, 0
            else:
                self.bad = bad

        def state_dict(self) -> dict[str, Any]:
            return {"loss": self.loss, "bad": self.bad, "weights": self.weights}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loss, self.bad, self.weights = state["loss"], state["bad"], state["weights"]

    model, loader = net(), shuffled()
    best, optimizer = Best(model), torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _, _, rows in batches(run, model, loader, optimizer=optimizer, extra={"best": best}):
        run.loss = loss_of(model, rows)
        descend(optimizer, run.loss)
        best.see(run.loss.item())


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
    for _, _, rows in batches(run, model, loader, optimizer=optimizer):

        def evaluate(rows: Tensor = rows) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        run.loss = optimizer.step(evaluate)


def thawed(run: Run) -> None:
    """Trains the head first. The body follows from the second epoch on, in a group of its own rate."""
    model, loader = net(), shuffled()
    groups = [{"params": model[:4].parameters(), "lr": 1e-3}, {"params": model[4].parameters(), "lr": 1e-2}]
    optimizer = drivetrain.optim.AdamW(groups)
    for _, epoch, rows in batches(run, model, loader, optimizer=optimizer):
        for param in model[:4].parameters():
            param.requires_grad_(epoch > 0)
        run.loss = loss_of(model, rows)
        descend(optimizer, run.loss)


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


def curriculum(run: Run) -> None:
    """Draws harder rows from epoch to epoch, by weights that follow the losses of the last one."""
    model, values = net(), Rows().values
    sampler = WeightedRandomSampler(torch.ones(ROWS), ROWS)
    model.register_buffer("weights", sampler.weights.clone())
    loader = DataLoader(Rows(), BATCH, sampler=sampler)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    with run.checkpointer(model=model, optimizer=optimizer, data=loader) as ckpt:
        for epoch in range(ckpt.epoch, EPOCHS):
            sampler.weights.copy_(model.weights)
            for rows in loader:
                descend(optimizer, loss := loss_of(model, rows))
                if ckpt.steps % len(loader) == len(loader) - 1:
                    with torch.no_grad():
                        model.weights.copy_(values.norm(dim=1) + epoch)
                ckpt.step()
                if run.ends(model, loss):
                    return


LOOPS: dict[str, Callable[[Run], None]] = {
    loop.__name__: loop
    for loop in (
        *(plain, resumable_sampler, schedule_per_epoch, averages_swapped_in, stochastic_weight_averaging),
        *(two_optimizers, accumulates_by_hand, accumulation_window, scaled, weighted_sampler, subset_sampler),
        *(batch_sampler, buckets_by_length, repeated_augmentation, workers, persistent_workers, stateful_loader),
        *(consumed_samples, drawn_batches, early_stopping, replay_buffer, closure, thawed, two_loaders, endless),
        curriculum,
    )
}
