"""Trains a small classifier on every rank that a launcher started; the scripts of this folder start it on a cluster.

It needs the variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK) and no data.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from drivetrain import DistributedDataParallel
from drivetrain.checkpointing import Checkpointer
from drivetrain.optim import AdamW

INPUTS, CLASSES, BATCH = 64, 10, 32


def train(steps: int, device: torch.device, folder: Path | None = None) -> float:
    """Trains on this rank, within a process group. Returns the last mean loss over ranks.

    With a folder, it goes on from the newest checkpoint there.
    """
    torch.manual_seed(0)
    teacher = torch.randn(INPUTS, CLASSES)
    net = nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, CLASSES)).to(device)
    model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    loss = torch.zeros((), device=device)
    with Checkpointer(folder, model=model, optimizer=optimizer) if folder else nullcontext() as checkpoint:
        for step in range(checkpoint.steps if checkpoint else 0, steps):
            torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # another batch for every step and rank
            x = torch.randn(BATCH, INPUTS)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), (x @ teacher).argmax(1).to(device))
            loss.backward()
            optimizer.step()
            if checkpoint:
                checkpoint.step()  # saves when due, and when the job is about to be stopped
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, help="folder that all hosts share")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    try:
        loss = train(args.steps, device, args.checkpoints)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, {args.steps} steps: loss {loss:.3f}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
