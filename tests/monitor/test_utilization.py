"""Tests the count of floating-point operations, and the measurements of host and device."""

from __future__ import annotations

import pytest
import torch
from loops import Kept, make_batches, train
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.monitor import Monitor
from drivetrain.monitor.collector import system_values
from drivetrain.monitor.flops import FlopCount, obstacle_to_counting, peak_flops


def test_counts_agree_with_torchs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))
    inputs = torch.randn(4, 3, 8, 8)
    counts = []
    for mode in (FlopCounterMode(display=False), FlopCount()):
        with mode:
            model(inputs).sum().backward()
        counts.append(mode.get_total_flops() if isinstance(mode, FlopCounterMode) else mode.total)
    assert counts[0] == counts[1] > 0


def test_the_dtype_of_most_products_decides_the_peak() -> None:
    with FlopCount() as count:
        assert count.dtype == torch.float32
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        with torch.autocast("cpu", torch.bfloat16):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    assert count.dtype == torch.bfloat16
    assert count.of_dtype == {torch.float32: 2 * 4**3, torch.bfloat16: 2 * 64**3}


def test_forward_is_counted_apart() -> None:
    layer = nn.Linear(16, 8)
    with FlopCount() as count:
        layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert count.forward == 2 * 4 * 16 * 8
    assert count.total == 3 * count.forward


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (4, 8), (8, 4)])
def test_causal_attention_counts_what_the_mask_keeps(queries: int, keys: int) -> None:
    query = torch.randn(2, 3, queries, 16, requires_grad=True)
    key, value = (torch.randn(2, 3, keys, 16, requires_grad=True) for _ in range(2))
    totals = {}
    for is_causal in (False, True):
        with FlopCount() as count:
            scaled_dot_product_attention(query, key, value, is_causal=is_causal).sum().backward()
        totals[is_causal] = count
    assert totals[False].forward == 2 * 2 * (2 * 3 * queries * keys * 16)
    kept = torch.ones(queries, keys).tril().mean().item()
    assert totals[True].forward == pytest.approx(kept * totals[False].forward)
    assert totals[True].total == pytest.approx(kept * totals[False].total)


def test_utilization_of_a_training() -> None:
    kept, model = Kept(), nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False, peak_flops=1e9) as monitor:
        train(model, optimizer, monitor(make_batches(6)))
    forward = 2 * 6 * (8 * 32 + 32 * 4)
    total = 3 * forward - 2 * 6 * 8 * 32  # the inputs need no gradient
    _, counted, *others = kept.steps()
    assert counted["counted_flops"]
    for step in others:
        assert step["hfu"] == pytest.approx(total / step["wall_s"] / 1e9)
        assert step["mfu"] == step["hfu"]


def test_given_flops_are_taken() -> None:
    kept, model = Kept(), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False, flops=1e6, peak_flops=1e12) as monitor:
        train(model, optimizer, monitor(make_batches(3)))
    for step in kept.steps():
        assert step["mfu"] == pytest.approx(6e6 / step["wall_s"] / 1e12)
        assert step["hfu"] is None


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) is None


def test_a_compiled_model_is_not_counted() -> None:
    model = nn.Linear(8, 4)
    assert obstacle_to_counting(model) is None
    assert "compiled" in str(obstacle_to_counting(nn.Sequential(torch.compile(model, backend="eager"))))
    model.compile(backend="eager")
    assert "compiled" in str(obstacle_to_counting(model))


def test_the_host_is_measured() -> None:
    values = system_values(torch.device("cpu"))
    assert values["process_memory_bytes"] > 10 * 2**20
    assert values["memory_available_bytes"] > 0
    assert values["load_average"] >= 0
    assert not any(name.startswith("gpu") for name in values)
