"""Trains a byte-level transformer whose gradients and optimizer states are divided among the ranks.

torchrun --nproc-per-node 2 examples/shard.py
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from drivetrain import DistributedDataParallel as DDP
from drivetrain.optim import AdamW

WIDTH, CONTEXT, BATCH_SIZE, STEPS = 128, 64, 16, 40


class Transformer(nn.Module):
    """Predicts each next byte from at most CONTEXT bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [rows, bytes] -> float32 [rows, bytes, 256]
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return logits


def load_text() -> Tensor:
    """Returns the top-level modules of the standard library, uint8 [bytes]."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray().join(path.read_bytes() for path in paths), dtype=torch.uint8)


def own_bytes(tensor: Tensor) -> int:
    """Returns the bytes that this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    text, draw = load_text(), torch.Generator().manual_seed(rank)

    model = DDP(Transformer(), shard="gradients")  # "optimizer" divides the states alone
    optimizer = AdamW(model.parameters(), lr=2e-3, max_grad_norm=1.0)  # the norm is of all ranks' parts together
    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH_SIZE, 1), generator=draw)
        rows = text[starts + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    kept = sum(own_bytes(value) for state in optimizer.state.values() for value in state.values())
    whole = sum(2 * parameter.nbytes for parameter in model.parameters())
    print(f"rank {rank} keeps {kept / 2**20:.2f} MiB of states, of {whole / 2**20:.2f} MiB without shard")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
