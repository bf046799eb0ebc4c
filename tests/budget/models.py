"""Defines the small models that the tests of activation budgets run, and helpers that several of them share."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import drivetrain
from drivetrain import _C
from drivetrain.budget.plan import PlannedOp
from drivetrain.budget.trace import Recording, profile

Step = Callable[[], object]
ABOVE = pytest.mark.filterwarnings("ignore:activation_budget. a step keeps:RuntimeWarning")  # on purpose


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = [h.view(batch, length, 4, -1).transpose(1, 2) for h in self.qkv(self.norm1(x)).split(width, -1)]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width // 2, 1), nn.Conv2d(width // 2, width, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(width // 2), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*[Bottleneck(16) for _ in range(4)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).logsumexp(1).sum()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 32)
        self.down = nn.ModuleList(self.convs(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in ((16, 32), (8, 16)))
        self.merge = nn.ModuleList(self.convs(2 * a, a) for a in (16, 8))
        self.head = nn.Conv2d(8, 1, 1)

    @staticmethod
    def convs(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(inplace=True), nn.Dropout2d(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, down in enumerate(self.down):
            x = down(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 16, 2, dropout=0.3), nn.GRU(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0].square().sum()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.model(x, x.flip(1), tgt_mask=mask).square().mean()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        result = hidden * x
        ctx.save_for_backward(x, hidden, result)
        return result, hidden.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_cos: Tensor) -> Tensor:
        x, hidden, result = ctx.saved_tensors
        return grad * (x + hidden / 2) * 2 + result * 0 - grad_cos * hidden.sin() * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y, z = Square.apply(self.linear(x).tanh())
        return (y.exp() * z.sigmoid()).sum()


class Unseen(nn.Module):
    """Writes memory without a torch operation that shows it, like kernels called with pointers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        made = torch.empty_like(x)
        made.detach().numpy()[:] = 3.0
        partly = torch.empty_like(x)
        partly[:, :8] = x[:, :8].sin()
        partly.detach().numpy()[:, 8:] = 0.5
        twice = torch.empty_like(x)
        twice.detach().numpy()[:] = 2.0
        twice.mul_(x.detach())
        return (x * made).exp().mean() + (x * partly).sum() + (x * twice).tanh().sum()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache[0] = x[0].detach()
        y = self.linear(x)
        y[:, 3] = 0
        y.mul_(2).clamp_(min=-1)
        out = torch.zeros_like(y)
        for i in range(4):
            out[:, 4 * i : 4 * i + 4] = y[:, 4 * i : 4 * i + 4].sin() * (i + 1)
        out.masked_fill_(out > 1, 0.5)
        rows = torch.zeros(4, 16).index_add(0, torch.tensor([0, 2]), out[:2])
        z = (rows + self.cache[0]).relu_() * self.calls
        return (z.exp_() + torch.add(z.detach(), z.detach(), out=torch.empty(0))).sum()


class Operations(nn.Module):
    """Uses lists of tensors, several results, indices, complex numbers, and values read by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.bag = nn.EmbeddingBag(10, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        top, index = y.topk(5, dim=1)
        ordered, _ = y.sort(dim=1)
        parts = torch.cat([p * (i + 1) for i, p in enumerate(y.chunk(4, 1))], 1)
        stacked = torch.stack([top.sum(1), ordered[:, 3], y[torch.arange(len(y)), index[:, 0]]])
        scale = 2.0 if y.sum().item() > 0 else 3.0
        chosen = y[y > 0].square().sum() + y.gather(1, index).prod(1).sum()
        wave = torch.fft.fft(y).conj().mul(torch.view_as_complex(torch.stack([y, y], -1))).abs().sum()
        bag = self.bag(torch.tensor([[1, 2], [3, 1]])).sum()
        looked = torch.einsum("ij,kj->ik", parts, y).softmax(1).cumsum(1).std()
        mapped = torch.vmap(lambda row: (row.sin() * row).sum())(y).sum()
        triu = torch.linalg.qr(y.T @ y + torch.eye(16))[1].sum()
        none = y[:0].exp().sum()
        return stacked.sum() * scale + chosen + wave + bag + looked + mapped + triu + none


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y + torch.randn_like(y) * torch.rand(16)
        y = F.rrelu(y, training=True) * torch.bernoulli(torch.sigmoid(y))
        y = F.alpha_dropout(y, 0.1, training=True) + torch.rand(y.shape, generator=self.own).exp()
        y = y * torch.empty_like(y).uniform_(generator=self.own)
        picked = torch.multinomial(y.detach().softmax(1), 3)
        return (y.gather(1, picked) * torch.randperm(3)).exp().mean() + F.gumbel_softmax(y).square().sum()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(2)
        self.lower = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.gpt(ids)
            with torch.autocast("cpu", enabled=False):
                x = torch.ones(4, 16) @ self.lower.weight
            extra = torch.bmm(x[None], x[None].mT).sum() + F.layer_norm(self.lower(x), (16,)).square().mean()
        return loss + extra


class Shared(nn.Module):
    """Uses one module three times, its weight directly, and nested checkpoints of torch's and ours."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.block(x))
        x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        x = drivetrain.checkpoint(self.block, x)
        return (x @ self.block.proj.weight.T.exp()).square().mean()


class DefaultDtype(nn.Module):
    """Makes positions in another default dtype, as libraries do around code of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch.set_default_dtype(torch.float64)
            try:
                positions = (torch.linspace(0, 1, 16) + torch.arange(16) * 0.1).float()
            finally:
                torch.set_default_dtype(torch.float32)
            x = layer(x).sin() * positions
        return x.square().sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (Gpt, lambda: torch.randint(50, (2, 24))),
    "autocast": (Autocast, lambda: torch.randint(50, (2, 24))),
    "resnet": (ResNet, lambda: torch.randn(4, 3, 12, 12)),
    "unet": (UNet, lambda: torch.randn(2, 3, 16, 16)),
    "recurrent": (Recurrent, lambda: torch.randn(7, 3, 8)),
    "encoder-decoder": (Translator, lambda: torch.randn(2, 9, 16)),
    "custom function": (Custom, lambda: torch.randn(4, 16)),
    "memory written unseen": (Unseen, lambda: torch.randn(4, 16)),
    "in place": (InPlace, lambda: torch.randn(4, 16)),
    "operations": (Operations, lambda: torch.randn(4, 16)),
    "random": (Random, lambda: torch.randn(4, 16)),
    "shared": (Shared, lambda: torch.randn(2, 6, 16)),
    "default dtype": (DefaultDtype, lambda: torch.randn(4, 16)),
}


class Run:
    """Runs a model, and collects its gradients and buffers after some steps."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        make, make_input = MODELS[name]
        self.model = make()
        self.inputs = make_input()
        if self.inputs.is_floating_point():
            self.inputs.requires_grad_()

    def step(self) -> Tensor:
        loss = self.model(self.inputs)
        loss.backward()
        return loss.detach()

    def result(self, steps: int = 2) -> dict[str, Tensor]:
        torch.manual_seed(1)
        found = {f"loss {i}": self.step() for i in range(steps)}
        found |= {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        found |= dict(self.model.named_buffers())
        if self.inputs.grad is not None:
            found["inputs"] = self.inputs.grad
        return {name: value.to_dense().clone() if value.is_sparse else value.clone() for name, value in found.items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=0, atol=0, equal_nan=True, msg=lambda said, n=name: f"{n}: {said}"
        )


def forget_all(model: nn.Module, step: Step) -> tuple[Recording, _C.ActivationRecorder]:
    """Recomputes everything that can be recomputed, at any cost."""
    before = copy.deepcopy(model.state_dict())
    trace, _ = profile(model, step)
    model.load_state_dict(before)
    recorder = _C.ActivationRecorder()
    recorder.set_plans([[PlannedOp(op[0], [-1] * len(op[4]), True) for op in one.ops] for one in trace.passes])
    return Recording(model, recorder).__enter__(), recorder


def fill_free_memory() -> None:
    """Fills free memory with NaN, to reveal reads of uninitialized memory."""
    sizes = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
    held = [torch.full((numel,), torch.nan) for numel in sizes for _ in range(40)]
    held.clear()


def smallest_in(error: ValueError) -> str:
    number, unit = str(error).split("this step is ")[1].split(" (")[0].split()
    return f"{1.05 * float(number):.2f} {unit}"  # a second profile measures other times


def gradients(model: nn.Module, step: Step) -> dict[str, Tensor]:
    step()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def masks_and_more() -> tuple[nn.Module, Tensor, Step]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Dropout(0.3), nn.Softplus())]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)

    def step() -> None:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().mean().backward()

    return model, x, step
