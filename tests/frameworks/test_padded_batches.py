"""Checks that a budget planned without padding holds for transformers' models on padded and shorter batches."""

import pytest

from suite.activation_batches import TARGET, kept_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "LoRA", "BERT"])
def test_padded_and_shorter_batches_keep_the_budget(name: str) -> None:
    for kind, budget, kept in kept_of(name):  # compares gradients with gradients without a budget
        assert kept <= TARGET * budget, kind
        assert kind != "padded" or kept >= 0.95 * budget, "recomputes what the budget has room for"
