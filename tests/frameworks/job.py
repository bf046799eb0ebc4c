"""Provides the framework scripts' arguments, their task, and the report of each rank that the test reads."""

import argparse
import faulthandler
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import drivetrain

RANK_TIMEOUT_S = 100
COLLECTIVE_TIMEOUT_S = 60  # shorter than the one above, because its message is more specific

MICRO_BATCH = 16  # rows per rank
ACCUMULATE = 2  # micro-batches per step of the optimizer
STEPS = 15
ROWS = 2 * MICRO_BATCH * ACCUMULATE * STEPS  # two ranks take STEPS steps in one epoch

# A tuple hides the class from install(), which would rebind a global of this module.
TORCHS_CLASS = (nn.parallel.DistributedDataParallel,)


def start() -> Path:
    """Reads the command line, installs its engine, and returns the folder for reports and checkpoints.

    Scripts call it after they import their framework, so that the framework already holds its names for torch's class.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--engine", choices=("torch", "drivetrain"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for reports and checkpoints")
    args = parser.parse_args()
    # A rank that hangs prints its stack and ends, under every launcher.
    faulthandler.dump_traceback_later(RANK_TIMEOUT_S, exit=True)
    torch.set_num_threads(1)
    if args.engine == "drivetrain":
        drivetrain.install(bucket_cap_mb=0.01)  # so that even these models have several buckets
    out: Path = args.out
    return out


class Notes:
    """Records the losses and gradients of one rank during one training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.collected: list[Tensor] = []
        self.reduced: list[Tensor] = []

    def gradient(self, model: nn.Module, is_reduced: bool) -> None:
        """Copies the first parameter's gradient. Call it after each backward, before the optimizer step."""
        grad = next(model.parameters()).grad
        assert grad is not None
        (self.reduced if is_reduced else self.collected).append(grad.clone())

    def report(self, path: Path, wrapper: nn.Module, saved: dict[str, Tensor]) -> None:
        """Writes the report for the test. `saved` is the state_dict of the framework's checkpoint."""
        assert isinstance(wrapper, TORCHS_CLASS), type(wrapper)
        facts = {
            "class": f"{type(wrapper).__module__}.{type(wrapper).__qualname__}",
            "num_buckets": len(wrapper._get_ddp_logging_data()["bucket_sizes"].split(", ")),
            "state": wrapper.module.state_dict(),
            "saved": saved,
            "losses": self.losses,
            "collected": self.collected,
            "reduced": self.reduced,
        }
        torch.save(facts, path)


def digits() -> TensorDataset:
    """Returns images of handwritten digits, 64 pixels with values from 0 to 16 each, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[:ROWS], dtype=torch.float32), torch.tensor(labels[:ROWS]))


def classifier(rank: int) -> nn.Module:
    """Builds a small classifier with different weights on every rank, which the wrapper must synchronize."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD, because Adam would turn a gradient that is only rounding error into a whole step."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
