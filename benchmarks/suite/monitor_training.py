"""The training whose steps `benchmarks/run.py monitor` measures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

STEPS = 48  # of a timed block: the start of a monitor, which costs milliseconds once, must not be what it shows
_LOADING_S = 2e-3  # of a batch


class _Decoder(nn.Module):
    """A byte-level transformer of the shape of examples/gpt, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits of shape (batch, length, 256) for int64 tokens of shape (batch, length)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


class Training:
    """The training that is measured."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = _Decoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(256, (8, 129))

    def batches(self, count: int) -> Iterator[Tensor]:
        """Yields batches that take a while, as a loader's batches do."""
        for _ in range(count):
            time.sleep(_LOADING_S)
            yield self.tokens + 0

    def step(self, tokens: Tensor) -> None:
        """Makes one optimizer step."""
        with record_function("bench:forward"):
            logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with record_function("bench:backward"):
            loss.backward()
        with record_function("bench:optimizer"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def loop(self, batches: Iterator[Any]) -> float:
        """Runs all batches and returns the seconds."""
        begin = time.perf_counter()
        while True:
            with record_function("bench:data"):
                tokens = next(batches, None)
            if tokens is None:
                return time.perf_counter() - begin
            self.step(tokens)
