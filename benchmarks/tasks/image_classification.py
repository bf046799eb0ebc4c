"""Trains a residual network on scikit-learn's handwritten digits, enlarged to 32 x 32 and shifted at random.

torchrun --nproc-per-node 2 benchmarks/tasks/image_classification.py --engine torch
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from task_job import Job, parse_arguments
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 32
MAX_SHIFT = 3
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
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            convolution = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu(self.body(x) + self.shortcut(x))
        return out


def residual_network(num_classes: int = 10) -> nn.Sequential:
    """Return a network of three stages with 16, 32 and 64 channels, as in the paper's CIFAR experiments."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    for in_channels, out_channels, stride in ((16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2)):
        layers.append(Block(in_channels, out_channels, stride))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def load_images() -> tuple[Tensor, Tensor]:
    """Return images, float32 [1797, 1, 32, 32] with mean 0, and their labels, int64 [1797]."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    return F.interpolate(images, size=(SIZE, SIZE), mode="bilinear") - 0.3, torch.from_numpy(digits.target).long()


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to MAX_SHIFT pixels in both directions."""
    padded = F.pad(images, [MAX_SHIFT] * 4, value=-0.3)
    offsets = torch.randint(2 * MAX_SHIFT + 1, (len(images), 2), generator=generator).tolist()
    rows = [image[:, y : y + SIZE, x : x + SIZE] for image, (y, x) in zip(padded, offsets, strict=True)]
    return torch.stack(rows)


def main() -> None:
    args = parse_arguments(__doc__, num_steps=120, batch_size=32).parse_args()
    with Job(args) as job:
        images, labels = load_images()
        train = len(images) - HELD_OUT
        net = residual_network().to(job.device)
        model = job.DistributedDataParallel(net)
        optimizer = job.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        )

        @torch.no_grad()
        def accuracy() -> float:
            net.eval()
            predicted = net(images[train:].to(job.device)).argmax(1).cpu()
            net.train()
            return float((predicted == labels[train:]).float().mean())

        for step in job.steps(accuracy):
            generator = job.generator(step)
            rows = torch.randint(train, (args.batch_size,), generator=generator)
            inputs = shifted(images[rows], generator).to(job.device)
            loss = F.cross_entropy(model(inputs), labels[rows].to(job.device), label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            job.note(loss)
        job.result("held-out accuracy", accuracy())


if __name__ == "__main__":
    main()
