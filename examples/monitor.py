"""Trains a small network from slow files, and lets drivetrain.Monitor say where the time goes and what to do about it.

python examples/monitor.py                     trains, and writes events to run.jsonl
python -m drivetrain monitor run.jsonl         shows the table again
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drivetrain import Monitor
from drivetrain.optim import AdamW

EPOCHS, BATCH_SIZE, FILES = 3, 32, 640


class SlowDigits(Dataset[tuple[Tensor, Tensor]]):
    """Reads scikit-learn's digits as if each came from a slow disk."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.from_numpy(digits.images[:FILES]).float() / 16
        self.labels = torch.from_numpy(digits.target[:FILES]).long()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        return self.images[index], self.labels[index]


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(SlowDigits(), BATCH_SIZE, shuffle=True)

    # The block ends with a table of the phases, and advice such as "88% waiting for data: num_workers=... would do".
    with Monitor(model, optimizer, loader, to=["jsonl:run.jsonl"]) as monitor:
        for epoch in range(EPOCHS):
            for images, labels in monitor(loader):
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=loss.detach())
            print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
