"""Trains a classifier that continues with the same bits after a kill: start it again with the same folder.

torchrun --nproc-per-node 2 examples/checkpointer.py runs/digits
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import DistributedDataParallel as DDP
from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler
from drivetrain.optim import AdamW

EPOCHS, BATCH_SIZE = 4, 32


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()
    dataset = TensorDataset(images, labels)
    sampler = ResumableSampler(dataset)  # splits samples over ranks, as DistributedSampler does
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)

    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

    folder = sys.argv[1] if sys.argv[1:] else "runs/digits"
    ckpt = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler, data=loader, every="20 steps")
    with ckpt:  # restores the newest complete checkpoint, if there is one
        for epoch in range(ckpt.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                ckpt.step()  # saves when due, and leaves the loop on a preemption
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
