"""Trains with Ray Train: python examples/cluster/ray_train.py --workers 2 (needs the package "ray[train]").

Ray's workers are processes of their own, which `drivetrain run` does not reach. The train function therefore calls
`drivetrain.install()`, after which Ray's prepare_model() wraps models in drivetrain's class.
"""

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import drivetrain


def train_on_worker(config: dict[str, Any]) -> None:
    """Trains on one worker. Prints the class that wraps the model, and the sum of weights, equal on all workers."""
    drivetrain.install()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=1e-2)
    context = train.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(rank)
    x, labels = torch.randn(32, 64), torch.randint(10, (32,))
    loss = torch.zeros(())
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    wrapper = f"{type(model).__module__}.{type(model).__qualname__}"
    print(f"rank {rank} of {context.get_world_size()}: weights sum to {total:.9f}, wrapped by {wrapper}", flush=True)
    train.report({"loss": loss.item()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"steps": args.steps},
        torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="drivetrain", storage_path=tempfile.mkdtemp()),
    )
    result = trainer.fit()
    if result.error is not None:
        raise result.error


if __name__ == "__main__":
    main()
