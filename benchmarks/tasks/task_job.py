"""Runs a task on either engine, and measures what compare_tasks.py prints: loss, time per step, and memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))  # it has the two modules below

from launch import ENGINES, end_process_group, engine_modules, positive, start_process_group
from measure import StepTimer, gather, peak_memory_bytes, reset_peak_memory
from rich.progress import track


def parse_arguments(description: str | None, num_steps: int, batch_size: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all tasks have."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="drivetrain", help="whose DDP and optimizer to use (%(default)s)")
    add("--steps", type=positive(int), default=num_steps, help="optimizer steps (%(default)s)")
    add("--batch-size", type=positive(int), default=batch_size, help="samples per rank and step (%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    add("--target", type=positive(float), help="stop once the result that the task evaluates reaches this")
    add("--evaluations", type=positive(int), default=4, help="looks at that result during the run (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto selects CUDA if there is a GPU")
    add("--json", type=Path, metavar="FILE", help="file for losses and measurements")
    return parser


class Job:
    """One training run on this rank.

    `with Job(args) as job:` joins the process group. `for step in job.steps():` times each step and shows a progress
    bar. The end of the block prints the results on rank 0.

    Attributes:
        DistributedDataParallel: The engine's class.
        optim: The engine's module of optimizers.
        device: This rank's device.
        rank, world_size: This rank's number, and the number of ranks.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.DistributedDataParallel, self.optim = engine_modules(args.engine)
        self.device = start_process_group(args.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._losses = torch.zeros(args.steps, device=self.device)  # read at the end, so that no step waits
        self._step = 0
        self._timer = StepTimer(self.device)
        self._results: dict[str, float] = {}
        self._seconds_to_target: float | None = None  # of steps, without the evaluations between them
        torch.manual_seed(args.seed)

    def __enter__(self) -> Job:
        return self

    def steps(self, evaluate: Callable[[], float] | None = None) -> Iterator[int]:
        """Yield the number of each step, and time the loop's body.

        With a --target, stop once the mean over ranks of what `evaluate` returns reaches it.
        """
        reset_peak_memory(self.device)
        is_shown = self.rank == 0 and sys.stdout.isatty()
        pause = max(1, self.args.steps // self.args.evaluations)
        for step in track(range(self.args.steps), "training", disable=not is_shown):
            self._step = step
            with self._timer:
                yield step
            if self.args.target and evaluate is not None and (step + 1) % pause == 0:
                value = torch.tensor(evaluate(), device=self.device)
                dist.all_reduce(value)
                if value.item() / self.world_size >= self.args.target:
                    self._seconds_to_target = self._timer.total_s()
                    break

    def generator(self, step: int) -> torch.Generator:
        """Return a generator that is the same in both engines and differs between steps and ranks."""
        draw = (self.args.seed * 1_000_003 + step) * self.world_size + self.rank
        return torch.Generator().manual_seed(draw)

    def note(self, loss: Tensor, step: int | None = None) -> None:
        """Record the loss of a step, by default of the present one."""
        self._losses[self._step if step is None else step] = loss.detach()

    def result(self, name: str, value: float) -> None:
        """Record a result of the whole run, such as an accuracy. Every rank passes its own; the mean is shown."""
        self._results[name] = value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            return  # the launcher ends the other ranks
        self._losses = self._losses[: self._step + 1]
        dist.all_reduce(self._losses)
        results = {name: sum(values) / self.world_size for name, values in _by_name(gather(self._results)).items()}
        metrics = {
            "engine": self.args.engine,
            "losses": (self._losses / self.world_size).tolist(),
            "results": results,
            "step_ms": self._timer.median_ms(skip=min(10, len(self._losses) // 4)),
            "seconds_to_target": self._seconds_to_target,
            "peak_memory_bytes": gather(peak_memory_bytes(self.device)),
        }
        if self.rank == 0:
            print_results(metrics)
            if self.args.json:
                self.args.json.write_text(json.dumps(metrics))
        end_process_group()


def _by_name(of_ranks: list[object]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for results in of_ranks:
        assert isinstance(results, dict)
        for name, value in results.items():
            found.setdefault(name, []).append(value)
    return found


def print_results(metrics: dict[str, object]) -> None:
    """Print the first and last loss, the results, and the costs of a run."""
    losses, results, memory = metrics["losses"], metrics["results"], metrics["peak_memory_bytes"]
    assert isinstance(losses, list)
    assert isinstance(results, dict)
    assert isinstance(memory, list)
    print(f"engine {metrics['engine']}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps", end="")
    print("".join(f", {name} {value:.4f}" for name, value in results.items()))
    print(f"median step {metrics['step_ms']:.1f} ms, peak memory per rank {max(memory) / 2**20:.0f} MiB")
