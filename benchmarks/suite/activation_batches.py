"""Measures what padded, unpadded and smaller batches keep under a plan that was made for an unpadded batch.

The models come from transformers, timm and diffusers, with random weights. A padded batch has an attention mask,
whose operations no plan has.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.bench.measure import Row
from drivetrain.budget import activation_budget

TARGET = 1.05
NAMES = ("BERT", "GPT-2", "Llama", "LoRA", "Longformer", "Mixtral", "ModernBERT", "T5")
OF_IMAGES = {  # which timm knows by these names
    "ConvNeXt": "convnext_atto",
    "EfficientNet": "efficientnet_b0",
    "ResNet": "resnet26d",
    "ViT": "vit_tiny_patch16_224",
}
DIFFUSION = "UNet of latents"
_SHARE = "40%"
Batches = dict[str, dict[str, Any]]  # the arguments of a call per kind of batch, that of the plan first
_VOCABULARY, _ROWS, _LENGTH, _SHORT = 200, 8, 64, 40
_MIB = 2**20


def model_named(name: str) -> nn.Module:
    """Returns a small model with dropout in training mode."""
    tf: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    width, layers, heads = 64, 8, 4
    sizes = {"vocab_size": _VOCABULARY, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made: nn.Module
    match name:
        case "BERT":
            made = tf.BertForMaskedLM(tf.BertConfig(**sizes, intermediate_size=4 * width))
        case "GPT-2":
            config = tf.GPT2Config(vocab_size=_VOCABULARY, n_embd=width, n_layer=layers, n_head=heads, **tokens)
            made = tf.GPT2LMHeadModel(config)
        case "Llama" | "LoRA":
            made = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, intermediate_size=172, num_key_value_heads=2))
            if name == "LoRA":
                _adapt(made)
        case "Longformer":
            made = tf.LongformerForMaskedLM(
                tf.LongformerConfig(**sizes, intermediate_size=4 * width, attention_window=32, pad_token_id=1)
            )
        case "Mixtral":
            experts = {"intermediate_size": 2 * width, "num_key_value_heads": 2, "num_local_experts": 4}
            made = tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, **experts))
        case "ModernBERT":
            others = {"intermediate_size": 96, "cls_token_id": 1, "sep_token_id": 2}
            made = tf.ModernBertForMaskedLM(tf.ModernBertConfig(**sizes, **tokens, **others))
        case "T5":
            names = {"d_model": width, "d_kv": 16, "d_ff": 4 * width, "num_layers": 6, "num_heads": heads}
            config = tf.T5Config(vocab_size=_VOCABULARY, **names, decoder_start_token_id=0, pad_token_id=0)
            made = tf.T5ForConditionalGeneration(config)
        case _:
            raise ValueError(f"name is {name!r}, expected one of {', '.join(NAMES)}")
    return made.train()


class _LowRank(nn.Module):
    """A frozen layer with a trained update of low rank (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen, self.dropout = frozen, nn.Dropout(0.1)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + 2 * self.up(self.down(self.dropout(x)))
        return y


def _adapt(model: nn.Module) -> None:
    """Freezes the model and adapts the projections of its attention."""
    model.requires_grad_(False)
    for block in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if isinstance(getattr(block, name, None), nn.Linear):
                setattr(block, name, _LowRank(getattr(block, name)))


def _of_text(name: str) -> tuple[nn.Module, Batches]:
    model = model_named(name)
    ids = torch.randint(3, _VOCABULARY, (_ROWS, _LENGTH))
    full = torch.ones_like(ids)
    padded = full.clone()
    for row in range(_ROWS):
        padded[row, _LENGTH - 6 * row :] = 0
    cut = [part[:, :_SHORT].contiguous() for part in (ids, padded)]
    kinds = {"unpadded": (ids, full), "padded": (ids, padded), "shorter": cut}
    return model, {
        kind: {"input_ids": ids, "attention_mask": mask, "labels": ids} for kind, (ids, mask) in kinds.items()
    }


def _of_images(name: str) -> tuple[nn.Module, Batches]:
    timm: Any = importlib.import_module("timm")
    torch.manual_seed(0)
    options = {"img_size": 64, "dynamic_img_size": True} if name == "ViT" else {}
    model: nn.Module = timm.create_model(OF_IMAGES[name], num_classes=10, drop_path_rate=0.1, **options)
    sizes = {"unpadded": (8, 64), "last": (3, 64), "smaller": (8, 48)}
    return model.train(), {kind: {"x": torch.randn(rows, 3, side, side)} for kind, (rows, side) in sizes.items()}


def _of_latents() -> tuple[nn.Module, Batches]:
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    model: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), norm_num_groups=8, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    mask = torch.arange(12) < torch.arange(4, 12, 2)[:, None]
    batches: Batches = {}
    for kind, side in (("unpadded", 16), ("padded", 16), ("smaller", 8)):
        batches[kind] = {"sample": torch.randn(4, 4, side, side), "timestep": torch.arange(4)}
        batches[kind]["encoder_hidden_states"] = torch.randn(4, 12, 32)
        if kind == "padded":
            batches[kind]["encoder_attention_mask"] = mask
    return model.train(), batches


def kept_of(name: str) -> Iterator[tuple[str, int, int]]:
    """Yields (batch, budget, kept bytes) for each kind of batch.

    Raises:
        AssertionError: A gradient differs from the gradient without a budget.
    """
    model, batches = _of_images(name) if name in OF_IMAGES else _of_latents() if name == DIFFUSION else _of_text(name)

    def gradients(batch: dict[str, Any]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        made = model(**batch)
        loss = made.square().mean() if isinstance(made, Tensor) else made.loss if "labels" in batch else made[0].var()
        loss.backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    plan = activation_budget(model, lambda: gradients(next(iter(batches.values()))), _SHARE)
    plan.remove()
    for kind, batch in batches.items():
        expected = gradients(batch)
        again = activation_budget(model, plan=plan.to_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a step above the budget
            found = gradients(batch)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"{name}, {kind} batch"
        yield kind, again.budget_bytes, again.peak_bytes
        again.remove()


def rows() -> Iterator[Row]:
    """Yields a row per model and batch: the budget, and what the batch keeps."""
    names = {"transformers": NAMES, "timm": tuple(OF_IMAGES), "diffusers": (DIFFUSION,)}
    installed = [package for package in names if importlib.util.find_spec(package) is not None]
    for name in [name for package in installed for name in names[package]]:
        for kind, budget, kept in kept_of(name):
            what = f"{name}, {kind} batch under a plan for a full, unpadded one: budget of {_SHARE}, and kept"
            ratio = kept / budget
            yield Row(what, "MiB", budget / _MIB, kept / _MIB, ratio, target=f"<= {TARGET}", met=ratio <= TARGET)
