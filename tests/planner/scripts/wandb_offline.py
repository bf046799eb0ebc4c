"""Trains with logs and an artifact of Weights & Biases, offline, and an exponential average of the weights."""

import copy

import torch
import wandb
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
run = wandb.init(project="tiny", mode="offline", config={"lr": 3e-4, "width": 384, "epochs": 2})
config = wandb.config
model = nn.Sequential(nn.Linear(200, config.width), nn.SiLU(), nn.Linear(config.width, config.width), nn.SiLU())
model.append(nn.Linear(config.width, 1))
ema = copy.deepcopy(model).eval().requires_grad_(False)
wandb.watch(model, log=None)
x = torch.randn(125, 200)
train, val = random_split(TensorDataset(x, x[:, :1].sin()), [100, 25])
optimizer = torch.optim.NAdam(model.parameters(), lr=config.lr)
for epoch in range(config.epochs):
    for inputs, targets in DataLoader(train, batch_size=25, shuffle=True):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.01)
        wandb.log({"loss": loss.item(), "grad_norm": norm.item(), "epoch": epoch})
        print(f"loss {loss.item():.6f} norm {norm.item():.4f}")
    with torch.no_grad():
        losses = [nn.functional.mse_loss(ema(a), b).item() for a, b in DataLoader(val, batch_size=25)]
    wandb.log({"val_loss": sum(losses) / len(losses)})
    print(f"val {sum(losses) / len(losses):.6f}")
torch.save(ema.state_dict(), "ema.pt")
wandb.finish()
