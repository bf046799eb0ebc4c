"""Trains a network to continue lines of Python, with the exact mean over all bytes of all micro-batches and ranks.

Lines have different lengths, so a mean of the micro-batches' means would give bytes of short lines more weight.

torchrun --nproc-per-node 2 examples/accumulate.py
"""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import drivetrain
from drivetrain import DistributedDataParallel as DDP
from drivetrain.optim import AdamW

MICRO_BATCHES, LINES, STEPS = 4, 16, 40
PADDING = -100  # cross_entropy ignores these targets


class NextByte(nn.Module):
    """Predicts each next byte of a line from the bytes before it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:  # int64 [lines, bytes] -> float32 [lines, bytes, 256]
        logits: Tensor = self.head(self.memory(self.embedding(inputs))[0])
        return logits


def load_lines() -> list[bytes]:
    """Returns lines of 8 to 100 bytes of the standard library's top-level modules."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [line for path in paths for line in path.read_bytes().splitlines() if 8 <= len(line) <= 100]


def micro_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields padded inputs and targets of this rank's lines."""
    lines, draw = load_lines(), random.Random(seed)
    for _ in range(MICRO_BATCHES * STEPS):
        rows = [torch.tensor(list(line)) for line in draw.sample(lines, LINES)]
        inputs = pad_sequence([row[:-1] for row in rows], batch_first=True)
        yield inputs, pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=PADDING)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(NextByte())
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    with drivetrain.accumulate(model, optimizer, steps=MICRO_BATCHES, scheduler=scheduler, max_grad_norm=1.0) as window:
        for number, (inputs, targets) in enumerate(micro_batches(seed=dist.get_rank())):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
            is_step = window.backward(loss, weight=int((targets != PADDING).sum()))
            if is_step and number % (10 * MICRO_BATCHES) == MICRO_BATCHES - 1 and dist.get_rank() == 0:
                print(f"step {number // MICRO_BATCHES}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
