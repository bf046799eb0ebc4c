"""Trains a small convolutional net on batches that drivetrain's prefetch loads ahead, with metrics of NumPy."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.data import prefetch

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Signals(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = np.random.default_rng(index)
        return torch.as_tensor(generator.standard_normal((2, 64)), dtype=torch.float32), index % 4


model = nn.Sequential(
    nn.Conv1d(2, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 5, stride=2), nn.ReLU(),
    nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4),
).to(device)  # fmt: skip
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
loader = prefetch(DataLoader(Signals(), batch_size=16, shuffle=True, num_workers=1), device)
for epoch in range(2):
    losses, predictions = [], []
    for signals, labels in loader:
        logits = model(signals)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        predictions.extend(logits.argmax(1).cpu().numpy().tolist())
    print(f"epoch {epoch} loss {np.mean(losses):.6f} classes {np.bincount(predictions, minlength=4).tolist()}")
