"""The benchmark's accounts of activations, on models whose bytes are known."""

import torch
from torch import Tensor, nn

from drivetrain.bench.activation_memory import allocated, peak_of_alive
from drivetrain.bench.activation_rivals import full

ROWS, WIDTH = 64, 256
LAYER_BYTES = 4 * ROWS * WIDTH


def _model(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


def test_what_a_forward_pass_keeps_is_what_the_allocator_says() -> None:
    model, x = _model(4), torch.randn(ROWS, WIDTH)

    def forward() -> Tensor:
        return model(x).sum()

    assert peak_of_alive(forward, model, [x]) == 4 * LAYER_BYTES + 8  # each tanh's, the sum, and its gradient
    model.zero_grad(set_to_none=True)
    grown, peak = allocated(forward)
    assert grown == 4 * LAYER_BYTES + 4
    assert peak > grown  # gradients come


def test_of_checkpointed_blocks_their_inputs_and_one_recomputed_block_are_alive() -> None:
    model, x = _model(4), torch.randn(ROWS, WIDTH)
    full(list(model))
    # The inputs of the last three, the last one's output that the sum came from, and its linear and tanh again.
    assert 5 * LAYER_BYTES < peak_of_alive(lambda: model(x).sum(), model, [x]) <= 6 * LAYER_BYTES + 8
