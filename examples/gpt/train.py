"""Trains a byte-level GPT on Python's standard library, with torch's DDP and AdamW or drivetrain's."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import held_out_batches, load_corpus, train_batch
from launch import ENGINES, end_process_group, engine_modules, positive, start_process_group
from measure import (
    StepTimer,
    exposed_communication_ms,
    gather,
    memory_at_rest_bytes,
    nccl_memory_bytes,
    peak_memory_bytes,
    reset_peak_memory,
)
from model import GPT, PRESETS
from report import TrainingProgress, console, mebibytes, print_sample, print_table
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
HELD_OUT_ROWS = 512
PROMPT = b"def "


@dataclass(frozen=True)
class Recipe:
    """Training defaults of a preset; `batch_size` is per rank."""

    steps: int
    batch_size: int
    lr: float
    accumulate: int = 1
    max_seconds: float | None = None


RECIPES = {
    "tiny": Recipe(steps=60, batch_size=4, lr=1e-2),
    "small": Recipe(steps=1200, batch_size=8, lr=6e-3, max_seconds=140),
    "gpt2": Recipe(steps=5000, batch_size=16, lr=6e-4, accumulate=2),
}


EPILOG = """examples:
  torchrun --nproc-per-node 2 examples/gpt/train.py                  two CPU ranks over gloo
  torchrun --nproc-per-node 2 examples/gpt/train.py --engine torch   the same run without drivetrain
  torchrun --nproc-per-node 8 examples/gpt/train.py --preset gpt2 --bf16   eight GPUs over NCCL
  python examples/gpt/train.py                                       one process with all cores, no launcher

Each preset sets these defaults:
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=EPILOG + "\n".join(f"  {name:6} {_fields(RECIPES[name])}" for name in PRESETS),
    )
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="drivetrain", help="whose DDP and AdamW to use (%(default)s)")
    add("--preset", choices=PRESETS, default="small", help="model shape and training defaults (%(default)s)")
    add("--steps", type=positive(int), help="optimizer steps; this option lifts the preset's max_seconds")
    add("--batch-size", type=positive(int), help="rows per rank in one forward")
    add("--block-size", type=positive(int), help="bytes per row, the model's context")
    add("--vocab-size", type=positive(int), help="at least 256; 50304 gives preset gpt2 the 124 M parameters of GPT-2")
    add("--lr", type=positive(float), help="peak learning rate; it warms up and decays by a cosine to a tenth")
    add("--accumulate", type=positive(int), help="forwards per step; all but the last under no_sync()")
    add("--bf16", action="store_true", help="autocast forward to bfloat16; weights stay fp32")
    add("--seed", type=int, default=0, help="seed of weights, batches and sample (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto selects CUDA if there is a GPU")
    add("--max-seconds", type=positive(float), help="time limit; plan fewer steps if they would take longer")
    add("--target-loss", type=positive(float), help="stop at this held-out loss, and record the time that it took")
    add("--evaluations", type=positive(int), default=4, help="held-out losses during the run (%(default)s)")
    add("--held-out-rows", type=positive(int), default=HELD_OUT_ROWS, help="rows of a held-out loss (%(default)s)")
    add("--sample-bytes", type=int, default=400, help="length of the sample, 0 for none (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="file for losses and measurements")
    args = parser.parse_args()
    recipe = RECIPES[args.preset]
    if args.steps is None and args.max_seconds is None:
        args.max_seconds = recipe.max_seconds
    for name in ("steps", "batch_size", "lr", "accumulate"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(recipe, name))
    return args


def _fields(record: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in vars(record).items() if value is not None)


def parameter_groups(gpt: GPT) -> list[dict[str, object]]:
    """Return two parameter groups: matrices with weight decay, and vectors (norms) without."""
    matrices = [parameter for parameter in gpt.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in gpt.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a tenth of the peak."""
    # A shorter warm-up overshoots and amplifies rounding until even torch's fused and plain AdamW disagree.
    warm_up = max(1, min(num_steps // 2, max(100, num_steps // 20)))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Trainer:
    """One training run: the engine, the data, and the measurements."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.corpus = load_corpus().to(device)
        torch.manual_seed(args.seed)
        config = PRESETS[args.preset]
        given = {name: getattr(args, name) for name in ("block_size", "vocab_size") if getattr(args, name)}
        self.gpt = GPT(replace(config, **given)).to(device)
        device_ids = [device.index] if device.type == "cuda" else None
        DistributedDataParallel, optim = engine_modules(args.engine)  # the engines differ in nothing else
        self.model = DistributedDataParallel(self.gpt, device_ids=device_ids)
        self.optimizer = optim.AdamW(parameter_groups(self.gpt), lr=args.lr, betas=BETAS, fused=True)
        self.num_steps: int = args.steps
        self.losses = torch.zeros(args.steps, device=device)  # read at the end, so that no step waits for its loss
        self.held_out_losses: list[tuple[int, float]] = []
        self.timer = StepTimer(device)
        self.seconds_to_target: float | None = None  # of steps, without the evaluations between them
        self.peak_memory = self.rest_memory = 0

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.gpt.parameters())

    @property
    def tokens_per_step(self) -> int:
        tokens: int = self.args.batch_size * self.gpt.config.block_size * self.args.accumulate * self.world_size
        return tokens

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's (inputs, targets) of one step, one pair per forward."""
        count, size = self.args.accumulate, self.gpt.config.block_size
        where = {"seed": self.args.seed, "rank": self.rank, "world_size": self.world_size}
        draws = range(step * count, (step + 1) * count)
        return [train_batch(self.corpus.train, self.args.batch_size, size, step=draw, **where) for draw in draws]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16)

    def train_step(self, batches: list[tuple[Tensor, Tensor]], synchronize: bool = True) -> Tensor:
        """Run forward, backward and the optimizer step on `batches`; return their mean loss."""
        total = torch.zeros((), device=self.device)
        for index, (tokens, targets) in enumerate(batches):
            is_last = index == len(batches) - 1
            with contextlib.nullcontext() if is_last and synchronize else self.model.no_sync():
                with self.autocast():
                    loss = self.model(tokens, targets) / len(batches)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def fit(self) -> None:
        """Run all steps, or as many as reach the target. Compute the held-out loss in between and at the end."""
        start = time.monotonic()
        reset_peak_memory(self.device)
        # On CUDA reading a loss waits for the GPU, so only every tenth loss is shown.
        show_every = 1 if self.device.type == "cpu" else 10
        with TrainingProgress(self.num_steps, self.tokens_per_step, visible=self.rank == 0) as progress:
            step = 0
            while step < self.num_steps:
                if step * self.args.evaluations >= len(self.held_out_losses) * self.num_steps:
                    self.note_peak_memory()
                    self.evaluate(step, progress)
                    if self.seconds_to_target is not None:
                        break
                    reset_peak_memory(self.device)
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(step, self.num_steps, self.args.lr)
                batches = self.batches(step)
                with self.timer:
                    self.losses[step] = self.train_step(batches)
                step += 1
                if step % 20 == 0 and self.args.max_seconds:
                    self.fit_into_time(step, time.monotonic() - start)
                if step % show_every == 0:
                    progress.update(step, self.num_steps, self.losses[step - 1].item())
            self.rest_memory = memory_at_rest_bytes(self.device)
            self.note_peak_memory()
            if self.seconds_to_target is None:
                self.evaluate(step, progress)
        self.losses = self.losses[:step]
        dist.all_reduce(self.losses)
        self.losses /= self.world_size

    def note_peak_memory(self) -> None:
        """Record the peak of training steps. Held-out losses use larger batches and do not count."""
        self.peak_memory = max(self.peak_memory, peak_memory_bytes(self.device))

    def fit_into_time(self, step: int, elapsed: float) -> None:
        """Plan the number of steps that fit into `max_seconds`, so that the learning rate still decays."""
        fitting = max(step, int(step * self.args.max_seconds / elapsed))
        num_steps = torch.tensor(min(self.args.steps, fitting), device=self.device)
        dist.broadcast(num_steps, src=0)  # one clock decides for all ranks
        self.num_steps = int(num_steps.item())

    @torch.no_grad()
    def evaluate(self, step: int, progress: TrainingProgress) -> None:
        """Record the mean loss over the held-out windows of all ranks."""
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)  # loss times rows, rows
        for tokens, targets in held_out_batches(
            self.corpus.held_out,
            4 * self.args.batch_size,
            self.gpt.config.block_size,
            num_rows=self.args.held_out_rows,
            rank=self.rank,
            world_size=self.world_size,
        ):
            with self.autocast():
                loss = self.gpt(tokens, targets)
            sums[0] += loss * len(tokens)
            sums[1] += len(tokens)
        dist.all_reduce(sums)
        self.held_out_losses.append((step, (sums[0] / sums[1]).item()))
        if self.args.target_loss and self.held_out_losses[-1][1] <= self.args.target_loss:
            self.seconds_to_target = self.timer.total_s()
        progress.note(f"step {step:>5}/{self.num_steps}  held-out loss {self.held_out_losses[-1][1]:.3f} nats/byte")

    def measure(self) -> dict[str, object]:
        """Return losses and measurements. Its steps without synchronization make the replicas' weights diverge."""
        batches = self.batches(0)
        synced_ms, unsynced_ms = exposed_communication_ms(
            lambda synchronize: self.train_step(batches, synchronize), self.device
        )
        return {
            "engine": self.args.engine,
            "preset": self.args.preset,
            "device": self.device.type,
            "bf16": self.args.bf16,
            "world_size": self.world_size,
            "num_parameters": self.num_parameters,
            "tokens_per_step": self.tokens_per_step,
            "losses": self.losses.tolist(),
            "held_out_losses": self.held_out_losses,
            "step_ms": self.timer.median_ms(skip=min(10, len(self.losses) // 4)),
            "seconds_to_target": self.seconds_to_target,
            "peak_memory_bytes": gather(self.peak_memory),
            "rest_memory_bytes": gather(self.rest_memory),
            "nccl_memory_bytes": gather(nccl_memory_bytes()[1]),
            "synced_step_ms": synced_ms,
            "unsynced_step_ms": unsynced_ms,
            "exposed_communication_ms": synced_ms - unsynced_ms,
        }


def print_header(trainer: Trainer) -> None:
    device, args = trainer.device, trainer.args
    where = f"{torch.get_num_threads()} threads each" if device.type == "cpu" else torch.cuda.get_device_name(device)
    console.print(f"data    {trainer.corpus.description}")
    console.print(f"model   {args.preset}, {trainer.num_parameters:,} parameters")
    console.print(f"        {_fields(trainer.gpt.config)}")
    console.print(f"engine  {args.engine} on {trainer.world_size} {device.type} rank(s), {where}")
    console.print(f"plan    {args.steps} steps of {trainer.tokens_per_step:,} bytes, lr {args.lr}", end="")
    console.print(f", at most {args.max_seconds:.0f} s" if args.max_seconds else "")


def print_summary(metrics: dict[str, Any], total_seconds: float) -> None:
    first, last = metrics["held_out_losses"][0][1], metrics["held_out_losses"][-1][1]
    step_ms, exposed_ms = metrics["step_ms"], metrics["exposed_communication_ms"]
    rows = [
        ("held-out loss", f"{first:.3f} -> {last:.3f} nats/byte, {last / math.log(2):.2f} bits/byte"),
        ("steps", f"{len(metrics['losses'])} in {total_seconds:.0f} s, from start-up to sample"),
        ("median step", f"{step_ms:.1f} ms, {1e3 * metrics['tokens_per_step'] / step_ms:,.0f} tokens/s"),
        ("communication left exposed", f"{exposed_ms:.1f} ms of {metrics['synced_step_ms']:.1f} ms"),
        ("peak memory per rank", f"{mebibytes(metrics['peak_memory_bytes'])} MiB"),
        ("memory at rest per rank", f"{mebibytes(metrics['rest_memory_bytes'])} MiB"),
    ]
    if any(metrics["nccl_memory_bytes"]):
        rows.append(("transport's part of these", f"{mebibytes(metrics['nccl_memory_bytes'])} MiB"))
    print_table(f"engine {metrics['engine']}", rows)


def main() -> None:
    start = time.monotonic()
    args = parse_arguments()
    engine_modules(args.engine)  # exits without it, before ranks wait for each other
    trainer = Trainer(args, start_process_group(args.device))
    is_first = trainer.rank == 0
    if is_first:
        print_header(trainer)
    trainer.fit()
    if is_first and args.sample_bytes:
        print_sample(PROMPT, trainer.gpt.generate(PROMPT, args.sample_bytes, seed=args.seed))
    total_seconds = time.monotonic() - start
    metrics = trainer.measure()
    if is_first:
        print_summary(metrics, total_seconds)
        if args.json:
            args.json.write_text(json.dumps(metrics))
    end_process_group()


if __name__ == "__main__":
    main()
