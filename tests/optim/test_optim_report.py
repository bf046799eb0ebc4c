"""Tests the optimizers' report: allocated bytes, counted steps and updates lost to rounding."""

import copy
import math
from typing import Any

import pytest
import torch

from drivetrain import optim
from optim_cases import OWN_CLASSES


def stepped(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], grad: float = 1.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, grad)
    optimizer.step()


def test_bytes_are_those_of_the_tensors() -> None:
    big, small = torch.randn(64, 128).bfloat16().requires_grad_(), torch.randn(10).bfloat16().requires_grad_()
    unused = torch.randn(1000).requires_grad_()
    optimizer = optim.AdamW([big, small, unused], state_bits=8, master_bits=24, max_grad_norm=1.0)
    stepped(optimizer, [big, small])
    report = optimizer.report()
    assert report.num_elements == 64 * 128 + 10
    assert report.bytes == {
        "parameters": 2 * 8202,
        "gradients": 2 * 8202,
        "exp_avg_codes": 8192,
        "exp_avg_scales": 4 * 32,
        "exp_avg_sq_codes": 8192,
        "exp_avg_sq_scales": 4 * 32,
        "exp_avg": 40,
        "exp_avg_sq": 40,
        "param_remainder": 8202,
    }
    held = report.bytes_per_parameter * report.num_elements
    assert round(held) == sum(report.bytes.values())
    # A step reads and writes everything except gradients, which it reads twice because of the norm.
    assert report.bytes_moved == 2 * sum(report.bytes.values())
    assert report.step_s is not None
    assert report.share_of_bandwidth is not None
    assert report.share_of_bandwidth > 0
    assert "exp_avg_scales" in str(report)


def test_counts() -> None:
    param = torch.zeros(4).requires_grad_()
    optimizer = optim.SGD([param], lr=0.1, max_grad_norm=1.0)
    for grad in (0.1, 10.0, 0.2, 20.0):
        stepped(optimizer, [param], grad)
    with pytest.warns(UserWarning, match="left out"):
        stepped(optimizer, [param], math.inf)
    counts = optimizer.report().counts
    assert (counts.steps, counts.clipped, counts.skipped) == (4, 2, 1)
    assert "4 steps, 2 clipped, 1 left out" in str(optimizer.report())
    assert copy.deepcopy(optimizer).report().counts.steps == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_lost_to_rounding(dtype: torch.dtype) -> None:
    half = torch.finfo(dtype).eps / 2  # half the distance of values between 1 and 2
    param = torch.full((1000,), 1.5, dtype=dtype).requires_grad_()
    param.grad = torch.cat([torch.full((300,), 0.9 * half), torch.full((200,), 1.5 * half), torch.zeros(500)]).to(dtype)
    before = param.detach().clone()
    for options, expected in (
        ({}, {"weight": 300 / 500}),
        ({"rounding": "kahan"}, {}),
        ({"rounding": "stochastic"}, {}),
        ({"master_bits": 32}, {}),
    ):
        optimizer = optim.SGD([("weight", param)], lr=1.0, **options)
        report = optimizer.report()
        assert report.lost_updates == pytest.approx(expected)
        assert not optimizer.state
    assert torch.equal(param.detach(), before)
    assert "weight: 60.0% of the updates are lost" in str(optim.SGD([("weight", param)], lr=1.0).report())


def test_lost_updates_follow_the_state() -> None:
    param = torch.randn(64, 64).bfloat16().requires_grad_()
    optimizer = optim.AdamW([param], lr=1e-5, state_bits=32)
    for _ in range(3):
        param.grad = torch.randn_like(param)
        optimizer.step()
    state = copy.deepcopy(optimizer.state[param])
    (share,) = optimizer.report().lost_updates.values()
    assert share > 0.9
    before = param.detach().clone()
    optimizer.step()
    assert (param == before).double().mean() == pytest.approx(share, abs=0.02)
    assert optimizer.state[param]["step"] == state["step"] + 1


OPTIONS: list[dict[str, Any]] = [
    {},
    {"state_bits": 8, "min_8bit_size": 300},
    {"state_bits": 4, "min_8bit_size": 300},
    {"state_bits": 16},
    {"state_bits": 8, "master_bits": 24, "min_8bit_size": 0},
    {"master_bits": 32},
    {"rounding": "kahan"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OWN_CLASSES)
def test_before_the_first_step_and_after_zero_grad(
    name: str, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected sizes are those of the states that the step then makes."""
    monkeypatch.setattr(optim.report, "_triad_bandwidth", lambda: 1.0)  # The measurement would take time.
    torch.manual_seed(0)
    params = [torch.randn(33, 20).to(dtype).requires_grad_()]
    if name != "Muon":
        params.append(torch.randn(7).to(dtype).requires_grad_())
    optimizer = getattr(optim, name)(params, **options)
    before = optimizer.report()
    assert before.num_elements == sum(param.numel() for param in params)
    assert "gradients" in before.expected
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    made = optimizer.report()
    assert not made.expected
    assert (before.bytes, before.bytes_moved) == (made.bytes, made.bytes_moved)
    optimizer.zero_grad()
    after = optimizer.report()
    assert after.expected == {"gradients"}
    assert (after.bytes, after.num_elements) == (made.bytes, made.num_elements)
    assert "gradients" in str(after)
    assert "MiB (expected)" in str(after)


def test_in_a_notebook() -> None:
    optimizer = optim.AdamW([("<weight>", torch.zeros(3).requires_grad_())])
    report = optimizer.report()
    assert repr(report) == str(report)
    assert report._repr_html_().count("<tr>") == 1 + len(report.bytes)
    assert "<weight>" not in report._repr_html_()
