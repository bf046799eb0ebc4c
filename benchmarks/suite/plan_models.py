"""Defines the models over which the planner's errors are published, and measures their steps."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.planner.replay import memory_profile, peak_of

from .activation_models import GPT, UNet

_VOCABULARY = 2048


@dataclass
class Case:
    """A model and its training step."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    autocast: bool = False

    def step(self) -> None:
        """Runs a training step."""
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def cases() -> Iterator[Case]:
    """Yields the published set, one case at a time. Models of Hugging Face need transformers."""
    for make in makers():
        torch.manual_seed(0)
        yield make()


def makers() -> list[Callable[[], Case]]:
    """Returns a function per case."""
    made: list[Callable[[], Case]] = [
        _gpt,
        functools.partial(_gpt, autocast=True),
        functools.partial(_gpt, checkpointed=True),
        functools.partial(_gpt, optimizer="SGD"),
        _unet,
        functools.partial(_unet, size=96, optimizer="SGD"),
    ]
    if importlib.util.find_spec("transformers") is not None:
        made += [_bert, functools.partial(_bert, autocast=True), _resnet, _vit, _t5, _llama]
        made += [functools.partial(_llama, autocast=True)]
    return made


def measured_peak(case: Case, steps: int = 2) -> int:
    """Returns the most bytes that torch's CPU allocator gave out during steps, with what existed before.

    The figures are the allocator's own events in torch's profiler.
    """
    before = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*case.model.parameters(), *case.model.buffers(), *case.batch)
    }
    with memory_profile() as profiled:
        for _ in range(steps):
            case.step()
    return sum(before.values()) + peak_of(profiled)[0]


def measured_seconds(case: Case, steps: int, warm_up: int = 2, least_s: float = 0.0) -> float:
    """Returns the median seconds of steps: of so many, and of more until `least_s` seconds are over."""
    for _ in range(warm_up):
        case.step()
    times: list[float] = []
    while len(times) < steps or sum(times) < least_s:
        begin = time.perf_counter()
        case.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _of(name: str, model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[[], Tensor], **how: object) -> Case:
    kind = getattr(torch.optim, str(how.get("optimizer", "AdamW")))
    optimizer = kind(model.parameters(), lr=1e-3)
    return Case(name, model, batch, loss, optimizer, bool(how.get("autocast", False)))


def _gpt(autocast: bool = False, checkpointed: bool = False, optimizer: str = "AdamW") -> Case:
    model = GPT(depth=6, dim=384, heads=6, length=128)
    tokens, targets = torch.randint(_VOCABULARY, (2, 4, 128))
    if checkpointed:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    name = "GPT, " + ", ".join([optimizer, *["autocast"] * autocast, *["checkpointed blocks"] * checkpointed])
    return _of(name, model, (tokens, targets), lambda: model(tokens, targets), optimizer=optimizer, autocast=autocast)


def _unet(size: int = 64, optimizer: str = "AdamW") -> Case:
    model = UNet(channels=24)
    images, labels = torch.randn(4, 3, size, size), torch.randint(8, (4, size, size))
    name = f"U-Net, {optimizer}, {size} pixels"
    return _of(name, model, (images, labels), lambda: model(images, labels), optimizer=optimizer)


def _hugging_face(name: str, kind: str, config: str, batch: dict[str, Tensor], autocast: bool, **sizes: object) -> Case:
    hf = importlib.import_module("transformers")
    model = getattr(hf, kind)(getattr(hf, config)(**sizes)).train()
    name += ", AdamW" + ", autocast" * autocast

    def loss() -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    return _of(name, model, tuple(batch.values()), loss, autocast=autocast)


def _tokens(batch: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(_VOCABULARY, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def _bert(autocast: bool = False) -> Case:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    batch = _tokens(4, 128)
    return _hugging_face("BERT", "BertForMaskedLM", "BertConfig", batch, autocast, vocab_size=_VOCABULARY, **sizes)


def _resnet() -> Case:
    batch = {"pixel_values": torch.randn(4, 3, 96, 96), "labels": torch.randint(100, (4,))}
    return _hugging_face("ResNet-50", "ResNetForImageClassification", "ResNetConfig", batch, False, num_labels=100)


def _vit() -> Case:
    batch = {"pixel_values": torch.randn(4, 3, 128, 128), "labels": torch.randint(100, (4,))}
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
    sizes |= {"image_size": 128, "patch_size": 16, "num_labels": 100}
    return _hugging_face("ViT", "ViTForImageClassification", "ViTConfig", batch, False, **sizes)


def _t5() -> Case:
    sizes = {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
    batch = _tokens(4, 96)
    return _hugging_face("T5", "T5ForConditionalGeneration", "T5Config", batch, False, vocab_size=_VOCABULARY, **sizes)


def _llama(autocast: bool = False) -> Case:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 768, "vocab_size": _VOCABULARY}
    return _hugging_face("Llama", "LlamaForCausalLM", "LlamaConfig", _tokens(4, 128), autocast, **sizes)
