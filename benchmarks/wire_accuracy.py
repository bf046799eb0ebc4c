"""Measures what dtypes on the wire cost in accuracy: the error of gradients, and the held-out loss of a short training.

python benchmarks/wire_accuracy.py [--preset tiny] [--steps 200] [--seeds 3] [--ranks 2] [--json FILE]

Ranks train the GPT of examples/gpt with AdamW over gloo. From the eleventh step on, each step also computes the exact
mean of the ranks' gradients in float64. Errors are relative to the norm over all parameters. They are the root mean
square of the steps' errors, and the error of the sum over these steps. Losses of a seed start from equal weights and
see equal batches, so that the difference from float32 on the wire is paired.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
from accuracy import paired_difference
from data import Corpus, held_out_batches, load_corpus, train_batch
from model import GPT, PRESETS
from train import BETAS, MAX_GRAD_NORM, WEIGHT_DECAY, learning_rate

from drivetrain import DistributedDataParallel as DDP
from drivetrain.bench.ranks import on_ranks
from drivetrain.optim import AdamW

WIRES: tuple[str | None, ...] = (None, "bfloat16", "float8_e5m2")
FIRST_COMPARED = 10  # the buckets are as they stay by then
LIMIT_S = 1200.0
PEAK = 2e-3


@dataclass
class Row:
    """The figures of one dtype on the wire."""

    wire: str
    step_error: float
    sum_error: float
    loss: float  # held-out, in nats per byte, mean over seeds
    difference: float  # from float32 on the wire
    half_width: float  # of its 95 % interval


def flat(tensors: list[Tensor]) -> Tensor:
    """Returns all elements one behind another, in float64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def held_out_loss(model: torch.nn.Module, corpus: Corpus, block_size: int) -> float:
    """Returns the mean loss of fixed windows of text on which nothing was trained."""
    losses, rows = 0.0, 0
    with torch.no_grad():
        for tokens, targets in held_out_batches(corpus.held_out, 64, block_size, num_rows=512, rank=0, world_size=1):
            losses += float(model(tokens, targets)) * len(tokens)
            rows += len(tokens)
    return losses / rows


def train(wire: str | None, seed: int, args: argparse.Namespace, corpus: Corpus) -> list[float]:
    """Returns the error of a step, the error of the sum of steps, and the held-out loss."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    config = replace(PRESETS[args.preset], block_size=args.block_size)
    model = DDP(GPT(config), transport="torch", wire_dtype=wire)
    params = list(model.parameters())
    optimizer = AdamW(params, lr=PEAK, betas=BETAS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)
    squares: list[float] = []
    sums: list[Tensor] = []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, PEAK)
        tokens, targets = train_batch(
            corpus.train, args.batch_size, args.block_size, seed=seed, step=step, rank=rank, world_size=world
        )
        optimizer.zero_grad()
        model(tokens, targets).backward()
        if step >= FIRST_COMPARED:
            exact = flat(list(torch.autograd.grad(model.module(tokens, targets), params)))
            dist.all_reduce(exact)
            exact /= world
            arrived = flat([param.grad for param in params if param.grad is not None])
            squares.append(float((arrived - exact).norm() / exact.norm()) ** 2)
            both = torch.stack([arrived, exact])
            sums = [both if not sums else sums[0] + both]
        optimizer.step()
    error_of_sum = float((sums[0][0] - sums[0][1]).norm() / sums[0][1].norm())
    return [math.sqrt(statistics.mean(squares)), error_of_sum, held_out_loss(model.module, corpus, args.block_size)]


def train_all(args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Trains every dtype with every seed on one rank, and returns {dtype: [figures of each seed]}."""
    corpus = load_corpus()
    results: dict[str, list[list[float]]] = {}
    for seed in range(args.seeds):
        for wire in WIRES:
            results.setdefault(wire or "float32", []).append(train(wire, seed, args, corpus))
    return results


def measure(args: argparse.Namespace) -> list[Row]:
    """Returns a row per dtype. Raises RuntimeError if a rank fails or takes too long."""
    results: dict[str, list[list[float]]] = on_ranks(partial(train_all, args), args.ranks, timeout_s=LIMIT_S)
    reference = [figures[2] for figures in results["float32"]]
    rows = []
    for wire, seeds in results.items():
        step_error, sum_error, _ = (statistics.mean(column) for column in zip(*seeds, strict=True))
        losses = [figures[2] for figures in seeds]
        gap = paired_difference(losses, reference)
        rows.append(Row(wire, step_error, sum_error, statistics.mean(losses), gap.mean, gap.half_width))
    return rows


def main() -> int:
    """Prints a table, and writes JSON if a file is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="model shape (default: tiny)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps per run (default: 200)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each dtype, 2 or more (default: 3)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, each on a host of its own (default: 2)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per rank and step (default: 8)")
    parser.add_argument("--block-size", type=int, default=32, help="bytes per row (default: 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: an interval needs 2 or more")
    if args.steps <= FIRST_COMPARED:
        parser.error(f"--steps: errors are compared from step {FIRST_COMPARED + 1} on, so that more steps are needed")
    from rich.console import Console
    from rich.table import Table

    rows = measure(args)
    title = f"GPT {args.preset}, {args.steps} steps, {args.seeds} seeds, {args.ranks} ranks"
    table = Table(title=title)
    for column in ("on the wire", "error of a step", "error of the sum", "held-out loss", "difference, 95 %"):
        table.add_column(column, justify="left" if column == "on the wire" else "right")
    for row in rows:
        gap = "" if row.wire == "float32" else f"{row.difference:+.4f} ± {row.half_width:.4f}"
        table.add_row(row.wire, f"{row.step_error:.1e}", f"{row.sum_error:.1e}", f"{row.loss:.4f}", gap)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if args.json:
        facts = {key: value for key, value in vars(args).items() if key != "json"}
        args.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
