"""Models, calls and comparisons that the tests of drivetrain.checkpoint share."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from drivetrain import checkpoint

Checkpoint = Callable[..., Any]
torchs: Checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
verified: Checkpoint = functools.partial(checkpoint, verify=True)


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


ALL = pytest.mark.parametrize("call", [checkpoint, verified, torchs], ids=["ours", "verified", "torch"])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.25)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, call: Checkpoint = plain) -> None:
        super().__init__()
        self.call = call
        self.attention, self.norm, self.drop = Attention(), nn.LayerNorm(16), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(x))
        return x + self.call(self.mlp, self.norm(x))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(10, 16), nn.LSTM(16, 8, batch_first=True)

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        # Autocast would run the LSTM in bfloat16, which needs a processor with AVX-512.
        with torch.autocast(
            "cpu", enabled=torch.is_autocast_enabled("cpu") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            y, (h, _) = self.rnn(self.table(tokens))
        return y, {"hidden": h, "no tensor": "text", "list": [y.sum(), 3]}


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Dropout1d(0.5), nn.Linear(72, 4))  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), lambda: torch.randn(4, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh()), lambda: torch.randn(4, 8)),
    "attention": (Attention, lambda: torch.randn(2, 5, 16)),
    "block": (Block, lambda: torch.randn(2, 5, 16)),
    "embedding": (Embedded, lambda: torch.randint(0, 10, (3, 7))),
    "images": (images, lambda: torch.randn(4, 3, 8, 8)),
    "identity": (nn.Identity, lambda: torch.randn(3)),
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def loss_of(output: Any) -> Tensor:
    return torch.stack([t.float().sin().sum() for t in tensors_in(output) if t.requires_grad]).sum()


def result_of(call: Checkpoint, model: nn.Module, x: Tensor, repeats: int = 2, **kwargs: Any) -> list[Tensor]:
    """Outputs, gradients and the state of random numbers of some steps, each with a region of the same model."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_(x.is_floating_point())
    results = []
    for _ in range(repeats):
        output = call(model, x, **kwargs)
        results += [t.detach() for t in tensors_in(output)] + [torch.get_rng_state(), torch.rand(2)]
        loss_of(output).backward()
        results += [torch.get_rng_state()]
    return results + grads_of(x, *model.parameters())


def grads_of(*tensors: Tensor) -> list[Tensor]:
    return [t.grad for t in tensors if t.grad is not None]


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
