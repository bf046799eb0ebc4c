"""Trains one model with AdamW in every storage format of drivetrain and prints the cost of each in validation loss.

The reference is torch's AdamW with float32 parameters. Each other row shows drivetrain's AdamW with fewer bits. Its
figure is the mean difference in held-out loss from the reference over all seeds, with a 95 % interval (Student's t).
Runs are paired by seed: both start from equal weights and see equal batches in the same order.

Rows differ only in the optimizer's storage. Every forward uses the parameters rounded to bfloat16 and computes in
float32. Every gradient reaches the optimizer rounded to bfloat16, and bfloat16 represents all initial weights exactly.
Autocast cannot serve as the reference: it rounds activations at other points than a model in bfloat16. That changes
the loss more than the optimizer does. Float32 parameters here act as master weights of the bfloat16 model, as in
classic mixed precision.

The control must lose: it has bfloat16 parameters without master weights, compensation or stochastic rounding. Its
learning rate is so low that most updates are below half a bfloat16 step and are rounded away. Its reference is torch's
float32 run at that rate. Two rows with master weights use that rate too and lose next to nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

from data import Corpus, held_out_batches, load_corpus, train_batch
from launch import positive
from model import GPT, PRESETS
from report import console
from train import BETAS, MAX_GRAD_NORM, WEIGHT_DECAY, learning_rate

from drivetrain.optim import AdamW


@dataclass(frozen=True)
class Storage:
    """A row of the table: the AdamW, the parameters' dtype, and the options of its storage format."""

    label: str
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    is_torch: bool = False
    is_slow: bool = False  # True: trained with the low learning rate

    @property
    def name(self) -> str:
        return self.label + (", low rate" if self.is_slow else "")


REFERENCE = Storage("torch, fp32", torch.float32, is_torch=True)
MASTER_32 = Storage("bf16, master 32, states fp32", options={"master_bits": 32, "state_bits": 32})
MASTER_24 = Storage("bf16, master 24, states 8-bit", options={"master_bits": 24, "state_bits": 8})
STATES_4 = Storage("bf16, master 24, states 4-bit", options={"master_bits": 24, "state_bits": 4})
USUAL = (
    REFERENCE,
    Storage("fp32", torch.float32),
    MASTER_32,
    Storage("bf16, master 32, states bf16", options={"master_bits": 32, "state_bits": 16}),
    Storage("bf16, master 32, states 8-bit", options={"master_bits": 32, "state_bits": 8}),
    MASTER_24,
    STATES_4,
    Storage("fp32, states 8-bit", torch.float32, {"state_bits": 8}),
    Storage("fp32, states 4-bit", torch.float32, {"state_bits": 4}),
    Storage("fp32, states float8", torch.float32, {"state_bits": "fp8"}),
    Storage("bf16, Kahan, states bf16", options={"rounding": "kahan"}),
    Storage("bf16, stochastic, states bf16", options={"rounding": "stochastic"}),
)
SLOW_REFERENCE = replace(REFERENCE, is_slow=True)
CONTROL = Storage("bf16 alone (the control)", is_slow=True)
SLOW_MASTERS = tuple(replace(row, is_slow=True) for row in (MASTER_32, MASTER_24, STATES_4))
SLOW = (SLOW_REFERENCE, *SLOW_MASTERS, CONTROL)

QUICK = {"preset": "tiny", "seeds": 2, "steps": 10, "batch_size": 4, "block_size": 32, "held_out_rows": 32}
EPILOG = """examples:
  python benchmarks/gpt/accuracy.py                        the table of the README
  python benchmarks/gpt/accuracy.py --seeds 8 --steps 150  more pairs of shorter runs: narrower intervals
  python benchmarks/gpt/accuracy.py --seeds 5 --only 4-bit the rows with 4-bit states and their references
  python benchmarks/gpt/accuracy.py --quick                a check of about a minute that everything runs

Reading the table: a difference is a row's held-out loss minus torch's float32 loss with the same seed, in nats
per byte; above 0 is worse. An interval that contains 0 means that these seeds show no difference; differences smaller
than its half width cannot be seen. Bytes are per parameter: the parameter, its gradient and the optimizer's state.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__, epilog=EPILOG
    )
    add = parser.add_argument
    add("--seeds", type=positive(int), default=3, help="runs per row with different weights and batches (%(default)s)")
    add("--steps", type=positive(int), default=300, help="optimizer steps per run (%(default)s)")
    add("--batch-size", type=positive(int), default=8, help="rows per step (%(default)s)")
    add("--block-size", type=positive(int), default=64, help="bytes per row, the model's context (%(default)s)")
    add("--preset", choices=PRESETS, default="small", help="model shape (%(default)s)")
    # The rate of train.py is three times as high. In so few steps it amplifies rounding until other differences vanish.
    add("--lr", type=positive(float), default=2e-3, help="peak of the usual learning rate (%(default)s)")
    add("--low-lr", type=positive(float), default=1e-4, help="peak of the control's learning rate (%(default)s)")
    add("--held-out-rows", type=positive(int), default=512, help="rows in the validation loss (%(default)s)")
    add("--threads", type=positive(int), default=len(os.sched_getaffinity(0)), help="threads of torch (%(default)s)")
    add("--quick", action="store_true", help=f"set {', '.join(f'{key}={value}' for key, value in QUICK.items())}")
    add("--only", metavar="REGEX", help="train only rows whose name has a match, and the references of their rates")
    add("--json", type=Path, metavar="FILE", help="file for every run's loss and the table")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    if args.seeds < 2:
        parser.error("--seeds: an interval needs 2 or more")
    if not any(rows_of(args)):
        parser.error(f"--only: no row's name has a match of {args.only!r}")
    return args


def rows_of(args: argparse.Namespace) -> list[tuple[Storage, ...]]:
    """Return the rows of the usual and of the low learning rate that this call trains, each after its reference."""
    found = [[row for row in rows[1:] if re.search(args.only or "", row.name)] for rows in (USUAL, SLOW)]
    return [(rows[0], *chosen) if chosen else () for rows, chosen in zip((USUAL, SLOW), found, strict=True)]


class Run:
    """One training run: a float32 model with rounded parameters, and the optimizer's copy of the parameters."""

    def __init__(self, storage: Storage, seed: int, args: argparse.Namespace, corpus: Corpus) -> None:
        self.storage, self.seed, self.args, self.corpus = storage, seed, args, corpus
        self.peak = args.low_lr if storage.is_slow else args.lr
        torch.manual_seed(seed)
        self.gpt = GPT(replace(PRESETS[args.preset], block_size=args.block_size))
        self.seen = list(self.gpt.parameters())
        self.stored = [param.detach().bfloat16().to(storage.dtype).requires_grad_() for param in self.seen]
        groups = [  # weight decay applies to matrices only, as in train.py
            {"params": [param for param in self.stored if param.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [param for param in self.stored if param.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer
        if storage.is_torch:
            self.optimizer = torch.optim.AdamW(groups, lr=self.peak, betas=BETAS)
        else:
            self.optimizer = AdamW(groups, lr=self.peak, betas=BETAS, max_grad_norm=MAX_GRAD_NORM, **storage.options)

    @torch.no_grad()
    def show_parameters(self) -> None:
        """Copy the optimizer's parameters, rounded to bfloat16, into the model."""
        for seen, stored in zip(self.seen, self.stored, strict=True):
            seen.copy_(stored.bfloat16())

    def step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.args.steps, self.peak)
        self.show_parameters()
        tokens, targets = train_batch(
            self.corpus.train,
            self.args.batch_size,
            self.gpt.config.block_size,
            seed=self.seed,
            step=step,
            rank=0,
            world_size=1,
        )
        self.gpt(tokens, targets).backward()
        for seen, stored in zip(self.seen, self.stored, strict=True):
            assert seen.grad is not None
            stored.grad = seen.grad.bfloat16().to(stored.dtype)
            seen.grad = None
        if self.storage.is_torch:
            nn.utils.clip_grad_norm_(self.stored, MAX_GRAD_NORM)
        self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        self.show_parameters()
        losses, rows = 0.0, 0
        for tokens, targets in held_out_batches(
            self.corpus.held_out,
            4 * self.args.batch_size,
            self.gpt.config.block_size,
            num_rows=self.args.held_out_rows,
            rank=0,
            world_size=1,
        ):
            losses += self.gpt(tokens, targets).item() * len(tokens)
            rows += len(tokens)
        return losses / rows

    def bytes_per_parameter(self) -> float:
        """Return the bytes of parameters, gradients and states, excluding the rounded copy of the comparison."""
        tensors: list[Tensor] = [*self.stored, *(param.grad for param in self.stored if param.grad is not None)]
        for state in self.optimizer.state.values():
            tensors += [value for name, value in state.items() if name != "step"]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / sum(p.numel() for p in self.stored)


@dataclass(frozen=True)
class Difference:
    """Mean of a row's losses minus the reference's, paired by seed, and the half width of its 95 % interval."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def paired_difference(losses: list[float], reference: list[float]) -> Difference:
    gaps = [a - b for a, b in zip(losses, reference, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Difference(statistics.mean(gaps), t_quantile(len(gaps) - 1) * error)


def t_quantile(degrees: int, probability: float = 0.975) -> float:
    """Return the quantile of Student's t distribution by Simpson's rule and bisection."""
    log_factor = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)

    def density_of_angle(angle: float) -> float:  # t = sqrt(degrees) tan(angle) maps the real line to an interval
        return math.sqrt(degrees) * math.exp(log_factor) * math.cos(angle) ** (degrees - 1)

    def share_below(angle: float, parts: int = 200) -> float:
        width = angle / parts
        weights = [1, *([4, 2] * (parts // 2))[:-1], 1]
        area = sum(w * density_of_angle(i * width) for i, w in enumerate(weights)) * width / 3
        return 0.5 + area

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_below(middle) < probability else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


@dataclass
class Result:
    """The results of a row: a loss per seed, and the bytes per parameter."""

    losses: list[float] = field(default_factory=list)
    bytes_per_parameter: float = 0.0


def train_all(args: argparse.Namespace, corpus: Corpus) -> dict[str, Result]:
    """Train every row with every seed. Show a progress bar, or print a line per run without a terminal."""
    rows = sum(rows_of(args), ())
    results = [Result() for _ in rows]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    bar = Progress(
        *columns, TimeRemainingColumn(), TextColumn("left"), console=console, disable=not console.is_terminal
    )
    start = time.monotonic()
    with bar:
        task = bar.add_task("", total=args.seeds * len(rows) * args.steps)
        for seed in range(args.seeds):
            for result, storage in zip(results, rows, strict=True):
                bar.update(task, description=f"seed {seed}, {storage.name}")
                run = Run(storage, seed, args, corpus)
                for step in range(args.steps):
                    run.step(step)
                    bar.advance(task)
                result.losses.append(run.held_out_loss())
                result.bytes_per_parameter = run.bytes_per_parameter()
                if not console.is_terminal:
                    console.print(
                        f"{time.monotonic() - start:6.0f} s  seed {seed}  {storage.name}: {result.losses[-1]:.4f}"
                    )
    return dict(zip([row.name for row in rows], results, strict=True))


def print_table(args: argparse.Namespace, results: dict[str, Result]) -> dict[str, Difference]:
    table = Table(title=f"{args.preset}, {args.steps} steps, {args.seeds} seeds", title_justify="left")
    table.add_column("parameters and states", no_wrap=True)
    for column in ("bytes", "held-out loss", "difference, 95 %"):
        table.add_column(column, justify="right", no_wrap=True)
    differences = {}
    for rows, peak in zip(rows_of(args), (args.lr, args.low_lr), strict=True):
        if not rows:
            continue
        table.add_section()
        reference = results[rows[0].name]
        for row in rows:
            result = results[row.name]
            label, shown = f"{row.label}, lr {peak:g}", ""
            if row is not rows[0]:
                gap = differences[row.name] = paired_difference(result.losses, reference.losses)
                label, shown = row.label, f"{gap.mean:+.4f} ± {gap.half_width:.4f}"
            table.add_row(label, f"{result.bytes_per_parameter:.2f}", f"{statistics.mean(result.losses):.4f}", shown)
    console.print(table)
    return differences


def control_is_worse(differences: dict[str, Difference]) -> bool:
    """Print and return whether the control's whole interval lies above 0 and above the masters' intervals."""
    control = differences[CONTROL.name]
    masters = max((differences[row.name].high for row in SLOW_MASTERS if row.name in differences), default=0.0)
    passed = control.low > max(0.0, masters)
    console.print(
        f"{'[green]PASS[/]' if passed else '[red]FAIL[/]'}  the control must be worse: at the low rate bf16 without a "
        f"master loses {control.mean:.4f} (at least {control.low:.4f}), and with one at most {masters:.4f}"
    )
    return passed


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    corpus = load_corpus()
    console.print(f"data    {corpus.description}")
    results = train_all(args, corpus)
    differences = print_table(args, results)
    passed = CONTROL.name not in differences or control_is_worse(differences)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        table = {name: vars(result) for name, result in results.items()}
        for name, gap in differences.items():
            table[name] |= {"difference": gap.mean, "interval": [gap.low, gap.high]}
        args.json.write_text(json.dumps({"settings": settings, "rows": table, "control_is_worse": passed}))
    # The few seeds and steps of --quick show only that everything runs.
    sys.exit(0 if passed or args.quick else 1)


if __name__ == "__main__":
    main()
