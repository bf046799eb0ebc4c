"""Trains a residual network on scikit-learn's digits. Two imports of drivetrain take the place of torch's.

torchrun --nproc-per-node 2 examples/swap.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from drivetrain import DistributedDataParallel as DDP  # instead of torch.nn.parallel's
from drivetrain.optim import SGD  # instead of torch.optim's

EPOCHS, BATCH_SIZE = 3, 32
HELD_OUT = 297  # of 1,797 images


class Block(nn.Module):
    """Two convolutions with batch normalization, and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def residual_network() -> nn.Sequential:
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def main() -> None:
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16 - 0.3
    labels = torch.from_numpy(digits.target).long()
    train = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])
    sampler = DistributedSampler[tuple[Tensor, ...]](train)
    loader = DataLoader(train, BATCH_SIZE, sampler=sampler)

    net = residual_network().to(device)
    model = DDP(net)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    net.eval()
    with torch.no_grad():
        right = net(images[:HELD_OUT].to(device)).argmax(1).cpu() == labels[:HELD_OUT]
    if dist.get_rank() == 0:
        print(f"held-out accuracy {right.float().mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
