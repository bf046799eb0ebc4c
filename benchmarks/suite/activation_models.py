"""Defines the models of the activation benchmarks. Each returns its loss, so a forward pass includes the loss."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 2048


@dataclass
class ModelCase:
    """A model, a batch for it, and a function that lists its blocks."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, ...]
    blocks: Callable[[nn.Module], list[nn.Module]]
    is_transformer: bool  # torch's selective policy applies to matrix products


def cases() -> Iterator[ModelCase]:
    """Yields one case at a time, including Hugging Face models if transformers is installed."""
    makers: list[Callable[[], ModelCase]] = [_gpt, _unet]
    if importlib.util.find_spec("transformers") is not None:
        makers += [_hf_gpt2, _hf_bert, _hf_resnet50]
    for make in makers:
        torch.manual_seed(0)
        yield make()


def num_cases() -> int:
    """Returns the number of cases."""
    return 2 if importlib.util.find_spec("transformers") is None else 5


# ---- A GPT


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        y: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return y


class GPT(nn.Module):
    """A pre-norm GPT with learned positions and dropout."""

    def __init__(
        self,
        depth: int = 12,
        dim: int = 192,
        heads: int = 3,
        length: int = 64,
        dropout: float = 0.1,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(dim, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.dropout(self.tokens(tokens) + self.positions(positions)))
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _gpt() -> ModelCase:
    model = GPT(dim=384, heads=6, length=128)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 128))
    return ModelCase("GPT, 12 blocks", model, (tokens, targets), lambda m: children_of(m, "blocks"), True)


# ---- A U-Net


class _Pair(nn.Module):
    """Two convolutions with BatchNorm and ReLU, then dropout."""

    def __init__(self, channels_in: int, channels: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (channels_in, channels):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Dropout2d(dropout))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


class UNet(nn.Module):
    """A U-Net with pooling, transposed convolutions, and concatenation at every level."""

    def __init__(self, channels: int = 16, levels: int = 4, classes: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_Pair(a, b, dropout) for a, b in zip([3, *widths], widths, strict=False))
        self.raised = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_Pair(2 * w, w, dropout) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, joined = images, []
        for level, pair in enumerate(self.down):
            x = pair(functional.max_pool2d(x, 2) if level else x)
            joined.append(x)
        joined.pop()
        for raised, pair in zip(self.raised, self.up, strict=True):
            x = pair(torch.cat([raised(x), joined.pop()], dim=1))
        return functional.cross_entropy(self.head(x), labels)


def _unet() -> ModelCase:
    batch = torch.randn(2, 3, 128, 128), torch.randint(8, (2, 128, 128))
    return ModelCase("U-Net", UNet(channels=32), batch, lambda m: children_of(m, "down") + children_of(m, "up"), False)


# ---- Hugging Face models at the sizes of their configurations, with small batches because they run on a CPU


class _WithLabels(nn.Module):
    """Returns the loss of a Hugging Face model."""

    def __init__(self, model: nn.Module, **always: object) -> None:
        super().__init__()
        self.model = model
        self.always = always

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(x, labels=labels, **self.always).loss
        return loss


def _hf_gpt2() -> ModelCase:
    hf = importlib.import_module("transformers")
    config = hf.GPT2Config(use_cache=False)
    tokens = torch.randint(config.vocab_size, (1, 128))
    model = _WithLabels(hf.GPT2LMHeadModel(config)).train()
    return ModelCase("HF GPT-2", model, (tokens, tokens), lambda m: children_of(m, "model.transformer.h"), True)


def _hf_bert() -> ModelCase:
    hf = importlib.import_module("transformers")
    config = hf.BertConfig()
    tokens = torch.randint(config.vocab_size, (1, 128))
    model = _WithLabels(hf.BertForMaskedLM(config)).train()
    blocks = functools.partial(children_of, path="model.bert.encoder.layer")
    return ModelCase("HF BERT-base", model, (tokens, tokens), blocks, True)


def _hf_resnet50() -> ModelCase:
    hf = importlib.import_module("transformers")
    model = _WithLabels(hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000))).train()
    batch = torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))

    def blocks(module: nn.Module) -> list[nn.Module]:
        stages = children_of(module, "model.resnet.encoder.stages")
        return [block for stage in stages for block in children_of(stage, "layers")]

    return ModelCase("HF ResNet-50", model, batch, blocks, False)


def children_of(module: nn.Module, path: str) -> list[nn.Module]:
    return list(module.get_submodule(path).children())
