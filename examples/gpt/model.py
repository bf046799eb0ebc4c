"""Defines a byte-level GPT in plain PyTorch: pre-norm blocks, causal attention, tied embedding and head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 256  # one token per byte, so the example needs no tokenizer


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    `block_size` is the longest context in bytes. `vocab_size` may exceed 256; the further tokens never occur.
    """

    num_layers: int
    num_heads: int
    width: int
    block_size: int
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be a multiple of num_heads, {self.num_heads}")
        if self.vocab_size < VOCAB_SIZE:
            raise ValueError(f"vocab_size {self.vocab_size} must be at least {VOCAB_SIZE}, one token per byte")


PRESETS = {
    "tiny": GPTConfig(num_layers=2, num_heads=2, width=32, block_size=32),
    "small": GPTConfig(num_layers=4, num_heads=4, width=128, block_size=128),
    "gpt2": GPTConfig(num_layers=12, num_heads=12, width=768, block_size=1024),
}


def rotate(x: Tensor, angles: Tensor) -> Tensor:  # x: [..., time, channels]; angles: [time, channels / 2]
    """Rotate pairs of channels by an angle that grows with the position (RoPE, Su et al. 2021)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # x: [batch, time, width]
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        query, key = rotate(query, angles), rotate(key, angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """One pre-norm transformer block: attention, then an MLP with a hidden size of four times the width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # x: [batch, time, width]
        x = x + self.attention(self.attention_norm(x), angles)
        hidden: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return hidden


class GPT(nn.Module):
    """Maps bytes to logits for the next byte, or to the mean cross entropy if `targets` are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            # Each block adds twice to the residual stream, so this scale keeps its variance independent of depth.
            std = 0.02 / math.sqrt(2 * self.config.num_layers)
            nn.init.normal_(module.attention.out.weight, std=std)
            nn.init.normal_(module.down.weight, std=std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # both int64 [batch, time]
        # The angles are recomputed, because DDP would broadcast a buffer before every forward.
        channels, device = self.config.width // self.config.num_heads, tokens.device
        frequencies = 1e-3 ** torch.linspace(0, 1, channels // 2, device=device)
        angles = torch.outer(torch.arange(tokens.shape[1], device=device), frequencies)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits = F.linear(self.norm(x), self.embedding.weight)  # [batch, time, vocab_size]
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Append `num_bytes` sampled bytes to `prompt`; each byte costs a forward over the whole window."""
        device = self.embedding.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.config.block_size :])[:, -1, :VOCAB_SIZE].float()
            chances = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return bytes(tokens[0].tolist())
