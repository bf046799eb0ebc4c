"""Measures what `optimizer.statistics()` costs, next to wandb.watch, and draws docs/images/statistics.svg.

`cost` times the own tail on the shapes of GPT-2 124M, with and without. `watch` times whole steps of a small GPT:
plain, with statistics, and with wandb.watch. `noise` times backward passes of two ranks over the shapes of GPT-2 124M,
with and without norms for the noise scale. `picture` trains the small GPT in bfloat16, with and without a master.

Each ratio is the median of pairs that follow each other in one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from drivetrain import DistributedDataParallel, optim
from drivetrain.bench.measure import interleaved
from drivetrain.bench.shapes import gpt2_124m
from drivetrain.optim.statistics import StepStatistics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))

from data import load_corpus, train_batch
from model import GPT, PRESETS

REPOSITORY = Path(__file__).resolve().parents[1]
EVERY = 10
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, master 24, states 8-bit": (torch.bfloat16, {"master_bits": 24, "state_bits": 8}),
}


def ratio(plain: list[float], other: list[float]) -> float:
    """Returns the median of the paired ratios other / plain."""
    return statistics.median(b / a for a, b in zip(plain, other, strict=True))


def cost(rounds: int) -> None:
    """Prints the time of a step that measures as a ratio to one that does not, for several storage formats."""
    for name, (dtype, options) in FORMATS.items():
        params = [torch.randn(shape).mul_(0.02).to(dtype).requires_grad_() for shape in gpt2_124m()]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = optim.AdamW(params, max_grad_norm=1.0, **options)

        def measured(optimizer: optim.AdamW = optimizer) -> None:
            with optimizer.statistics(every=1):
                optimizer.step()

        plain_s, measured_s = interleaved((optimizer.step, measured), rounds)
        extra = ratio(plain_s, measured_s) - 1
        print(
            f"{name:34} plain {1e3 * statistics.median(plain_s):7.1f} ms, a step that measures {extra:+.1%}, "
            f"every={EVERY} {extra / EVERY:+.2%}"
        )


class Training:
    """A small GPT with an optimizer, and one step of its training."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = GPT(PRESETS["small"]).to(dtype)
        self.optimizer = optim.AdamW(self.model.parameters(), max_grad_norm=1.0, **options)
        self.corpus = load_corpus()
        self.num_steps = 0
        self.after: Callable[[], None] = lambda: None

    def step(self) -> float:
        batch = train_batch(
            self.corpus.train, 4, self.model.config.block_size, seed=0, step=self.num_steps, rank=0, world_size=1
        )
        self.num_steps += 1
        loss: torch.Tensor = self.model(*batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.after()
        return loss.item()


def watch(rounds: int) -> None:
    """Prints the processor time of whole steps with statistics, and with wandb.watch, as ratios to plain steps."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    plain, ours, sparse = Training(), Training(), Training()
    ours.optimizer.statistics(1, ours.model)
    sparse.optimizer.statistics(EVERY, sparse.model)
    rows = {"plain": plain, "statistics(every=1)": ours, f"statistics(every={EVERY})": sparse}
    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder)
        for index, frequency in enumerate((1, EVERY)):
            watched = Training()
            run.watch(watched.model, log="all", log_freq=frequency, idx=index)
            watched.after = lambda: run.log({"step": 1})
            rows[f"wandb.watch(log='all', log_freq={frequency})"] = watched
        # A period of ten steps, so that each row has its share of steps that measure.
        periods = [lambda one=one: [one.step() for _ in range(EVERY)] for one in rows.values()]
        seconds = interleaved(periods, rounds, warm_up=1, clock=time.process_time)
        for name, found in zip(rows, seconds, strict=True):
            milliseconds = 1e3 * statistics.median(found) / EVERY
            print(f"{name:40} {milliseconds:7.1f} ms per step, {ratio(seconds[0], found):.3f} times")
        wandb.teardown()


class Shapes(torch.nn.Module):
    """Has the parameters of GPT-2 124M, and the sum of their squares as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.randn(shape).mul_(0.02) for shape in gpt2_124m()])

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def noise_of_rank(rank: int, store: str, rounds: int) -> None:
    """Prints, on rank 0, the processor time that measuring norms adds to a backward pass."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(Shapes())

    def backward() -> None:
        wrapped.zero_grad()
        wrapped().backward()

    plain, measured = interleaved(
        (backward, backward), rounds, prepare=wrapped.reducer.set_noise_every, clock=time.process_time
    )
    if rank == 0:
        extra = statistics.median(b - a for a, b in zip(plain, measured, strict=True))
        print(f"plain {1e3 * statistics.median(plain):.0f} ms, norms for the noise scale {1e3 * extra:+.0f} ms")
    dist.destroy_process_group()


def noise(rounds: int) -> None:
    """Starts two ranks that measure."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(noise_of_rank, (f"{folder}/store", rounds), 2)


def layers(found: StepStatistics) -> dict[int, float]:
    """Returns the share of lost updates by layer."""
    return {depth: one.lost_updates for depth, one in found.by_depth().items()}


def picture(path: Path, num_steps: int) -> None:
    """Draws relative updates and lost updates by layer, of a training in bfloat16 whose learning rate falls."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "drivetrain"
    from matplotlib import pyplot

    found: dict[str, list[StepStatistics]] = {}
    for name, options in {"bfloat16": {}, "master_bits=24": {"master_bits": 24}}.items():
        training = Training(torch.bfloat16, lr=1e-3, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, num_steps, 1e-5)
        measured = training.optimizer.statistics(EVERY, training.model)
        found[name] = []
        for _ in range(num_steps):
            training.step()
            schedule.step()
            assert measured.latest is not None
            if measured.latest not in found[name][-1:]:
                found[name].append(measured.latest)
        print(measured)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    colors = pyplot.get_cmap("viridis")
    for name, style in (("bfloat16", "-"), ("master_bits=24", ":")):
        steps = [one.step for one in found[name]]
        depths = list(found[name][0].by_depth())
        for depth in depths:
            color = colors(depth / len(depths))
            label = f"layer {depth}" if name == "bfloat16" else None
            updates = [one.by_depth()[depth].relative_update for one in found[name]]
            if name == "bfloat16":
                left.plot(steps, updates, style, color=color, label=label)
            right.plot(steps, [100 * layers(one)[depth] for one in found[name]], style, color=color)
    left.set_yscale("log")
    left.set_ylabel("norm of update / norm of weights")
    right.set_ylabel("updates lost to rounding, %")
    right.plot([], [], "-", color="0.3", label="bfloat16")
    right.plot([], [], ":", color="0.3", label="master_bits=24")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "watch", "noise", "picture"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600, help="of the training that the picture shows")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "images" / "statistics.svg")
    args = parser.parse_args()
    if args.what == "cost":
        cost(args.rounds)
    elif args.what == "watch":
        watch(args.rounds)
    elif args.what == "noise":
        noise(args.rounds)
    else:
        picture(args.output, args.steps)


if __name__ == "__main__":
    main()
