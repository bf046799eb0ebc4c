"""Trains with drivetrain's Checkpointer, which resumes the loop after an interruption."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 600), nn.GELU(), nn.Linear(600, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
dataset = TensorDataset(torch.randn(192, 300), torch.randint(10, (192,)))
loader = DataLoader(dataset, batch_size=32, sampler=ResumableSampler(dataset))
ckpt = Checkpointer("runs/mlp", model=model, optimizer=optimizer, scheduler=scheduler, data=loader, every=1, keep=2)
with ckpt:
    for epoch in range(ckpt.epoch, 2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"epoch {epoch} loss {loss.item():.6f}")
            ckpt.step()
