"""Measures what padded, unpadded and shorter batches keep under a plan that was made for an unpadded batch.

The models are transformers', with random weights. A padded batch has an attention mask, whose operations no plan has.
"""

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.bench.measure import Row
from drivetrain.budget import activation_budget

TARGET = 1.05
NAMES = ("BERT", "GPT-2", "Llama", "Longformer", "Mixtral", "ModernBERT", "T5")
_SHARE = "40%"
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
        case "Llama":
            made = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, intermediate_size=172, num_key_value_heads=2))
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


def kept_of(name: str) -> Iterator[tuple[str, int, int]]:
    """Yields (batch, budget, kept bytes) for each kind of batch.

    Raises:
        AssertionError: A gradient differs from the gradient without a budget.
    """
    model = model_named(name)
    ids = torch.randint(3, _VOCABULARY, (_ROWS, _LENGTH))
    full = torch.ones_like(ids)
    padded = full.clone()
    for row in range(_ROWS):
        padded[row, _LENGTH - 6 * row :] = 0
    batches = {
        "unpadded": (ids, full),
        "padded": (ids, padded),
        "shorter": tuple(part[:, :_SHORT].contiguous() for part in (ids, padded)),
    }

    def gradients(ids: Tensor, mask: Tensor) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    plan = activation_budget(model, lambda: gradients(*batches["unpadded"]), _SHARE)
    plan.remove()
    for kind, batch in batches.items():
        expected = gradients(*batch)
        again = activation_budget(model, plan=plan.to_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a step above the budget
            found = gradients(*batch)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"{name}, {kind} batch"
        yield kind, again.budget_bytes, again.peak_bytes
        again.remove()


def rows() -> Iterator[Row]:
    """Yields a row per model and batch: the budget, and what the batch keeps."""
    for name in NAMES:
        for kind, budget, kept in kept_of(name):
            what = f"{name}, {kind} batch under a plan for an unpadded one: budget of {_SHARE}, and kept"
            ratio = kept / budget
            yield Row(what, "MiB", budget / _MIB, kept / _MIB, ratio, target=f"<= {TARGET}", met=ratio <= TARGET)
