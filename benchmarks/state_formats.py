"""Compares formats for the states of AdamW: codes of 8 and 4 bits, and float8 numbers with a scale per block.

Trains a small GPT on Python's source text and a classifier on digits, in float32 with torch's AdamW. Their gradients
also reach states that are stored in each format after every step. The table shows, as shares of the norm, how far these
states are from the float32 states at the end. It also shows how far their update is from float32's. The losses are of
other trainings, which step with the stored states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from drivetrain import _C
from drivetrain.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))

BLOCK = 256  # values per scale, as in csrc/formats/storage.h
BETAS = (0.9, 0.95)
EPS = 1e-8
LEARNING_RATE = 2e-3
E4M3 = torch.float8_e4m3fn
# Options of drivetrain's AdamW. None stands for e4m3 squares, which it does not have and torch's casts imitate.
FORMATS: dict[str, dict[str, Any] | None] = {
    "block codes (state_bits=8)": {"state_bits": 8, "min_8bit_size": 0},
    "4-bit codes (state_bits=4)": {"state_bits": 4, "min_8bit_size": 0},
    'e4m3 means, e5m2 squares (state_bits="fp8")': {"state_bits": "fp8", "min_8bit_size": 0},
    "e4m3 means, e4m3 squares": None,
}
Losses = Callable[[], Iterator[Tensor]]


@dataclass
class Task:
    """A model, the losses of its steps in order, and its validation loss."""

    model: nn.Module
    losses: Losses
    held_out: Callable[[], float]


def gpt(seed: int, steps: int) -> Task:
    """Returns the tiny GPT of examples/gpt on Python's source text."""
    from data import held_out_batches, load_corpus, train_batch
    from model import GPT, PRESETS

    corpus = load_corpus()
    torch.manual_seed(seed)
    model = GPT(PRESETS["tiny"])
    size = model.config.block_size

    def losses() -> Iterator[Tensor]:
        for step in range(steps):
            yield model(*train_batch(corpus.train, 8, size, seed=seed, step=step, rank=0, world_size=1))

    def held_out() -> float:
        batches = held_out_batches(corpus.held_out, 32, size, num_rows=256, rank=0, world_size=1)
        return statistics.fmean(model(*batch).item() for batch in batches)

    return Task(model, losses, held_out)


def digits(seed: int, steps: int) -> Task:
    """Returns a classifier of scikit-learn's digits. Its corner pixels are always black, so some squares are tiny."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held = rows[:1400], rows[1400:]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def losses() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            batch = train[torch.randint(len(train), (64,), generator=draw)]
            yield nn.functional.cross_entropy(model(images[batch]), labels[batch])

    return Task(model, losses, lambda: nn.functional.cross_entropy(model(images[held]), labels[held]).item())


TASKS = {"GPT": gpt, "digits": digits}


def stored(values: Tensor, is_squares: bool) -> Tensor:
    """Returns the values after a round trip through e4m3 with a float32 scale per block.

    As in block codes, squares that are not zero do not become zero, which would let their update grow a thousandfold.
    """
    blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / torch.finfo(E4M3).max
    scaled = blocks / torch.where(scales > 0, scales, 1.0)
    if is_squares:
        least = torch.finfo(E4M3).smallest_normal * 2.0**-3
        scaled = torch.where(scaled > 0, scaled.clamp(min=least), scaled)
    return (scaled.to(E4M3).float() * scales).flatten()[: values.numel()].view_as(values)


class Shadow:
    """States in one format that follow a float32 training by its gradients alone."""

    def __init__(self, options: dict[str, Any] | None, params: list[Tensor]) -> None:
        self.params = [param.detach().clone() for param in params]
        # A learning rate of 0 leaves the copies as they are; the states do not depend on them.
        self.optimizer = optimizer_of(options, self.params, lr=0.0)

    def step(self, grads: list[Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer.step()

    def states(self) -> Iterator[tuple[Tensor, Tensor]]:
        for param in self.params:
            yield states_of(self.optimizer, param)


def states_of(optimizer: torch.optim.Optimizer, param: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the means and squares of a parameter in float32."""
    state = optimizer.state[param]
    names = ("exp_avg", "exp_avg_sq")
    if "exp_avg_codes" not in state:
        return state[names[0]], state[names[1]]
    means, squares = (_C.optim_load_state(state[f"{name}_codes"], state[f"{name}_scales"], param) for name in names)
    return means, squares


def round_states(optimizer: torch.optim.Optimizer) -> None:
    """Stores the states of torch's optimizer in e4m3 after each of its steps."""

    def store(*_: object) -> None:
        for param, state in optimizer.state.items():
            if param.ndim >= 2:
                state["exp_avg"].copy_(stored(state["exp_avg"], is_squares=False))
                state["exp_avg_sq"].copy_(stored(state["exp_avg_sq"], is_squares=True))

    optimizer.register_step_post_hook(store)


def optimizer_of(
    options: dict[str, Any] | None, params: Sequence[Tensor], lr: float = LEARNING_RATE
) -> torch.optim.Optimizer:
    """Returns an AdamW with states in one of FORMATS. Vectors keep float32 states."""
    if options is not None:
        return AdamW(params, lr=lr, betas=BETAS, **options)
    optimizer = torch.optim.AdamW(params, lr=lr, betas=BETAS)
    round_states(optimizer)
    return optimizer


def train(task: Task, optimizer: torch.optim.Optimizer, shadows: list[Shadow], params: list[nn.Parameter]) -> float:
    for loss in task.losses():
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
        for shadow in shadows:
            shadow.step([param.grad.clone() for param in params if param.grad is not None])
        optimizer.zero_grad()
    with torch.no_grad():
        return task.held_out()


@dataclass
class Row:
    """One format: relative errors of means, of roots of squares and of updates, and loss differences by seed."""

    means: float
    roots: float
    update: float
    differences: list[float]


def share(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def measure(name: str, seeds: int, steps: int) -> dict[str, Row]:
    """Trains the task in float32 and in every format."""
    task = TASKS[name](0, steps)
    params = [param for param in task.model.parameters() if param.ndim >= 2]
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    shadows = {label: Shadow(options, list(params)) for label, options in FORMATS.items()}
    losses = [train(task, optimizer, list(shadows.values()), params)]
    for seed in range(1, seeds):
        task = TASKS[name](seed, steps)
        again = torch.optim.AdamW(task.model.parameters(), lr=LEARNING_RATE, betas=BETAS)
        losses.append(train(task, again, [], []))
    rows = {}
    for label, options in FORMATS.items():
        # Corrections of the bias are the same for all formats.
        errors: list[tuple[float, float, float]] = []
        for param, (means, squares) in zip(params, shadows[label].states(), strict=True):
            m, v = states_of(optimizer, param)
            errors.append(
                (
                    share(means, m),
                    share(squares.sqrt(), v.sqrt()),
                    share(means / (squares.sqrt() + EPS), m / (v.sqrt() + EPS)),
                )
            )
        differences = []
        for seed in range(seeds):
            task = TASKS[name](seed, steps)
            optimizer_in_it = optimizer_of(options, list(task.model.parameters()))
            differences.append(train(task, optimizer_in_it, [], []) - losses[seed])
        means_error, roots_error, update_error = (statistics.fmean(column) for column in zip(*errors, strict=True))
        rows[label] = Row(means_error, roots_error, update_error, differences)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings per format, 2 or more (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps per training (%(default)s)")
    parser.add_argument("--task", choices=TASKS, action="append", help="train this one only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: a deviation needs 2 or more")
    console, found = Console(), {}
    for name in args.task or TASKS:
        rows = found[name] = measure(name, args.seeds, args.steps)
        table = Table(title=f"{name}, {args.steps} steps, {args.seeds} seeds", title_justify="left")
        table.add_column("states")
        for column in ("error of means", "of roots of squares", "of the update", "loss - fp32's"):
            table.add_column(column, justify="right")
        for label, row in rows.items():
            gap, spread = statistics.fmean(row.differences), statistics.stdev(row.differences)
            errors = (f"{error:.2%}" for error in (row.means, row.roots, row.update))
            table.add_row(label, *errors, f"{gap:+.4f} (deviation {spread:.4f})")
        console.print(table)
    if args.json:
        args.json.write_text(
            json.dumps({name: {label: asdict(row) for label, row in rows.items()} for name, rows in found.items()})
        )


if __name__ == "__main__":
    main()
