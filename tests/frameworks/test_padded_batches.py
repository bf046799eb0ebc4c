"""Checks that a budget planned without padding holds for transformers' models on padded and shorter batches."""

import pytest
import torch
from torch import Tensor, nn

import drivetrain

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH, LAYERS, HEADS = 200, 64, 8, 4


def model_named(name: str) -> nn.Module:
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH, "vocab_size": VOCABULARY}
    if name == "gpt2":
        sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "vocab_size": VOCABULARY}
        config = transformers.GPT2Config(**sizes, n_positions=64, bos_token_id=0, eos_token_id=1)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=172)
        )
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=256))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_padded_and_shorter_batches_keep_the_budget(name: str) -> None:
    torch.manual_seed(0)
    model = model_named(name).train()
    ids = torch.randint(3, VOCABULARY, (8, 64))
    mask = torch.ones_like(ids)

    def gradients(length: int = 64) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        part = ids[:, :length].contiguous()
        model(input_ids=part, attention_mask=mask[:, :length], labels=part).loss.backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    plan = drivetrain.activation_budget(model, gradients, "40%")
    plan.remove()
    for row in range(8):
        mask[row, 64 - 6 * row :] = 0
    for length in (64, 40):
        expected = gradients(length)
        again = drivetrain.activation_budget(model, plan=plan.to_dict())
        found = gradients(length)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert again.peak_bytes <= 1.05 * again.budget_bytes
        assert not again.has_diverged
        again.remove()
