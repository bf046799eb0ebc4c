"""Trains from torchdata's StatefulDataLoader, and saves its place with the model."""

import os

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader


class Words(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count, self.position = count, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.position)
        while self.position < self.count:
            self.position += 1
            yield torch.randn(400, generator=generator), self.position % 7
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


torch.manual_seed(0)
loader = StatefulDataLoader(Words(256), batch_size=16, num_workers=0)
model = nn.Sequential(nn.Linear(400, 500), nn.Tanh(), nn.Linear(500, 7))
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
if os.path.exists("state.pt"):
    saved = torch.load("state.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
for step, (x, y) in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.6f}")
    if step == 4:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, "state.pt.tmp")
        os.replace("state.pt.tmp", "state.pt")
