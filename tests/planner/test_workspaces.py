"""Tests the memory that kernels take beyond their results, and memory that is not torch's, against the allocator."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from drivetrain.planner.planner import plan
from drivetrain.planner.replay import cpu_workspaces, memory_profile, peak_of
from drivetrain.planner.tracer import trace_steps

# Kernels, strides, channels and layouts for which oneDNN and torch copy different arguments.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "strided": (lambda: nn.Conv2d(32, 64, 4, 2, 1, bias=False), (16, 32, 16, 16)),
    "one channel": (lambda: nn.Conv2d(1, 16, 5, 2, 2), (16, 1, 28, 28)),
    "one pixel": (lambda: nn.ConvTranspose2d(100, 64, 4, 1, 0, bias=False), (16, 100, 1, 1)),
    "transposed": (lambda: nn.ConvTranspose2d(64, 3, 4, 2, 1), (16, 64, 16, 16)),
    "grouped": (lambda: nn.Conv2d(32, 32, 3, 1, 1, groups=32), (4, 32, 14, 14)),
    "one axis": (lambda: nn.Conv1d(2, 32, 5, padding=2), (16, 2, 64)),
    "three axes": (lambda: nn.Conv3d(3, 8, 3, 1, 1), (2, 3, 8, 16, 16)),
    "lstm": (lambda: nn.LSTM(64, 64, 2), (20, 16, 64)),
    "lstm, both ways": (lambda: nn.LSTM(32, 48, bidirectional=True, batch_first=True), (8, 20, 32)),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_hold_what_the_allocator_gives(name: str) -> None:
    make, shape = LAYERS[name]
    layer, source = make(), torch.randn(shape)

    def step() -> None:
        found = layer(source)
        (found[0] if isinstance(found, tuple) else found).square().mean().backward()
        layer.zero_grad()

    planned = plan(layer, step, device="cpu")
    assert not any("recurrent" in note for note in planned.trace.notes)
    step()
    with memory_profile() as profiled:
        step()
        step()
    there = sum(tensor.nbytes for tensor in (*layer.parameters(), source))
    assert planned.memory.peak_allocated == pytest.approx(
        there + peak_of(profiled)[0], rel=0.05 if "lstm" in name else 0.02
    )


def test_a_large_convolution_is_measured_with_parts_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv2d(16, 24, 3)
    source = torch.randn(32, 16, 20, 20)
    trace = trace_steps(layer, lambda: layer(source).sum().backward())
    whole = cpu_workspaces(trace)
    module = importlib.import_module("drivetrain.planner.replay")
    monkeypatch.setattr(module, "_MOST_FLOPS", 0.0)
    monkeypatch.setattr(module, "_known", {})
    assert cpu_workspaces(trace) == pytest.approx(whole, rel=0.05)
    assert len(whole) == 2


def test_optimizers_are_traced_until_their_memory_is_settled() -> None:
    layer, source = nn.Linear(300, 300), torch.randn(8, 300)
    for kind, arguments, steps in (
        (torch.optim.RAdam, {}, 6),
        (torch.optim.LBFGS, {"max_iter": 4, "history_size": 5}, 3),
    ):
        optimizer = kind(layer.parameters(), **arguments)  # type: ignore[operator]

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(layer(source), source)
            loss.backward()
            return loss

        trace = trace_steps(layer, lambda: optimizer.step(closure))  # noqa: B023 - called at once
        assert trace.num_steps == steps + 1
        names = [op.name for op in trace.last_step()]
        if kind is torch.optim.LBFGS:  # each step evaluates as often as it may, with a whole history
            assert names.count("aten::mse_loss") == 4
            assert trace.bytes_of("optimizer states") >= 2 * 5 * (300 * 300 + 300) * 4
        else:
            assert "aten::reciprocal" in names  # of the rectified step
