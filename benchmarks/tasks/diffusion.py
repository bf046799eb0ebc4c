"""Trains a small U-Net to remove noise from scikit-learn's digits, and draws new digits with it.

torchrun --nproc-per-node 2 benchmarks/tasks/diffusion.py --picture digits.png
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from task_job import Job, parse_arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SIZE = 16
NOISE_LEVELS = 200


class Block(nn.Module):
    """A convolution that is shifted by the noise level, and a second one with a shortcut around both."""

    def __init__(self, in_channels: int, out_channels: int, level_width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, in_channels), nn.SiLU(), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        )
        self.level = nn.Linear(level_width, out_channels)
        self.second = nn.Sequential(
            nn.GroupNorm(4, out_channels), nn.SiLU(), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        )
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) + self.level(level)[:, :, None, None]) + self.shortcut(x)
        return out


class UNet(nn.Module):
    """Predicts the noise in images [batch, 1, 16, 16] from their noise levels [batch]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.level = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width, width), Block(width, 2 * width, width)])
        self.middle = Block(2 * width, 2 * width, width)
        self.up = nn.ModuleList([Block(4 * width, width, width), Block(2 * width, width, width)])
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor, levels: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(1e4) * torch.arange(half, device=images.device) / half)
        angles = levels[:, None] * frequencies
        level = self.level(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.stem(images)
        skipped = []
        for block in self.down:
            x = block(x, level)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, level)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skipped.pop()], dim=1), level)
        out: Tensor = self.head(F.silu(x))
        return out


def kept_signal(device: torch.device) -> Tensor:
    """Return the share of the signal's variance that each noise level keeps: the cosine schedule, float32 [levels]."""
    at = (torch.arange(1, NOISE_LEVELS + 1, device=device) / NOISE_LEVELS + 0.008) / 1.008
    return torch.cos(at * math.pi / 2).square().clamp(min=1e-4)


@torch.no_grad()
def draw(net: nn.Module, count: int, kept: Tensor, generator: torch.Generator) -> Tensor:
    """Return new images [count, 1, 16, 16]: DDIM from pure noise in 40 steps."""
    images = torch.randn(count, 1, SIZE, SIZE, generator=generator).to(kept.device)
    levels = torch.linspace(NOISE_LEVELS - 1, 0, 41).long().tolist()
    for level, following in pairwise(levels):
        noise = net(images, torch.full((count,), level, device=kept.device))
        clean = ((images - (1 - kept[level]).sqrt() * noise) / kept[level].sqrt()).clamp(-1, 1)
        images = kept[following].sqrt() * clean + (1 - kept[following]).sqrt() * noise
    return images


def save_picture(images: Tensor, path: Path) -> None:
    """Write images as a grid with eight columns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grid = torch.cat([torch.cat(list(row[:, 0]), dim=1) for row in images.cpu().split(8)])
    pyplot.imsave(path, grid.numpy(), cmap="gray", vmin=-1, vmax=1)


def main() -> None:
    parser = parse_arguments(__doc__, num_steps=200, batch_size=32)
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="file for 32 new digits; needs matplotlib")
    args = parser.parse_args()
    with Job(args) as job:
        digits = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
        digits = F.interpolate(digits, size=(SIZE, SIZE), mode="bilinear")
        kept = kept_signal(job.device)
        net = UNet().to(job.device)
        model = job.DistributedDataParallel(net)
        optimizer = job.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        for step in job.steps():
            generator = job.generator(step)
            images = digits[torch.randint(len(digits), (args.batch_size,), generator=generator)].to(job.device)
            levels = torch.randint(NOISE_LEVELS, (args.batch_size,), generator=generator).to(job.device)
            noise = torch.randn(images.shape, generator=generator).to(job.device)
            share = kept[levels][:, None, None, None]
            predicted = model(share.sqrt() * images + (1 - share).sqrt() * noise, levels)
            loss = F.mse_loss(predicted, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(net)
            job.note(loss)
        new = draw(average, 32, kept, job.generator(args.steps))
        job.result("spread of new images", new.std().item())
        if args.picture and job.rank == 0:
            save_picture(new, args.picture)


if __name__ == "__main__":
    main()
