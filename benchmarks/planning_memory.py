"""Prints how much memory the profile of an activation budget takes, against checkpointing of each block.

python benchmarks/planning_memory.py [--blocks 6 12 24]      a table of megabytes above the model; half a minute
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.budget.trace import profile

WIDTH, HEADS, BATCH, LENGTH = 128, 4, 16, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in qkv)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return x + hidden


class Model(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x.square().mean()


def resident(name: str) -> int:
    """Returns VmRSS or VmHWM of this process in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def peak_of(model: nn.Module, step: Callable[[], object]) -> int:
    """Returns the bytes that a step maps above the model, in its second run."""
    step()
    model.zero_grad()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    step()
    model.zero_grad()
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 12, 24], help="numbers of blocks")
    args = parser.parse_args()
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:  # so that freed tensors return to the system at once
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("blocks", "plain step", "checkpoint per block", "profile", title="MB above the model")
    for num_blocks in args.blocks:
        model, x = Model(num_blocks), torch.randn(BATCH, LENGTH, WIDTH)

        def step(model: nn.Module = model, x: Tensor = x) -> None:
            model(x).backward()

        plain = peak_of(model, step)
        model.is_checkpointed = True
        per_block = peak_of(model, step)
        model.is_checkpointed = False
        ours = peak_of(model, partial(profile, model, step))
        table.add_row(str(num_blocks), *(f"{num_bytes / 1e6:.0f}" for num_bytes in (plain, per_block, ours)))
    Console().print(table)


if __name__ == "__main__":
    main()
