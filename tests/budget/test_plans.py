"""Checks the plan of an activation budget as an object: its JSON, its table, and copies of a planned model."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from models import Gpt, Step, UNet, assert_same_bits, gradients
from torch import Tensor, nn

import drivetrain


def test_a_plan_goes_through_json(gpt: tuple[nn.Module, Step], tmp_path: Path) -> None:
    model, step = gpt
    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, step, "50%")
    plan.save(tmp_path / "plan.json")
    plan.remove()
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        step()

    for source in (
        tmp_path / "plan.json",
        str(tmp_path / "plan.json"),
        json.loads((tmp_path / "plan.json").read_text()),
    ):
        again = drivetrain.activation_budget(model, plan=source)
        assert_same_bits(gradients(model, step), expected)
        assert again.peak_bytes == plan.measured_bytes
        assert str(again.to_dict()["choice"]) == str(plan.to_dict()["choice"])
        again.remove()
    assert calls == 0
    tighter = drivetrain.activation_budget(model, counted, "30%", plan=tmp_path / "plan.json")
    assert calls == 1
    assert tighter.measured_bytes is not None
    assert tighter.measured_bytes <= 0.3 * plan.unplanned_bytes
    with pytest.raises(ValueError, match="plan is another model's: module 1 is 'down' here"):
        drivetrain.activation_budget(UNet(), plan=tmp_path / "plan.json")
    with pytest.raises(ValueError, match="the model has 3 modules and the plan"):
        drivetrain.activation_budget(
            nn.ModuleDict({"embed": nn.Identity(), "blocks": nn.Identity()}), plan=plan.to_dict()
        )
    with pytest.raises(ValueError, match="not an activation plan of this version"):
        drivetrain.activation_budget(model, plan={"version": 3})


def test_the_table_adds_up(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    plan = drivetrain.activation_budget(model, step, "50%")
    rows = plan.blocks()
    names = [row["block"] for row in rows]
    assert all(any(name.startswith(f"blocks.{i}.") for name in names) for i in range(4))
    assert math.isclose(sum(row["planned_seconds"] for row in rows), plan.planned_seconds, rel_tol=1e-6, abs_tol=1e-9)
    assert math.isclose(sum(row["measured_seconds"] for row in rows), plan.measured_seconds or 0, rel_tol=1e-6)
    assert sum(row["kept_bytes"] for row in rows) <= plan.budget_bytes
    text = str(plan)
    assert "recomputed MiB" in text
    assert "blocks.3" in text
    assert repr(plan) == text
    assert plan._repr_html_().count("<tr>") == 1 + len(rows) + 1  # the header and the sum


def test_measured_times_are_those_of_a_step(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    plan = drivetrain.activation_budget(model, step, "50%")
    for _ in range(4):
        step()
    whole = plan._recorder.replay_seconds  # of the measured step and these four
    assert math.isclose(sum(row["measured_seconds"] for row in plan.blocks()), whole / 5, rel_tol=1e-6)


def test_the_loss_is_inside_with_the_plan_as_a_context() -> None:
    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 500)
    x, y = torch.randn(64, 8), torch.randint(500, (64,))

    class Whole(nn.Module):
        def forward(self) -> Tensor:
            return F.cross_entropy(head(model(x)), y)

    plan = drivetrain.activation_budget(model, lambda: F.cross_entropy(head(model(x)), y).backward(), 10**9)
    F.cross_entropy(head(model(x)), y)
    outside = plan.peak_bytes
    with plan:
        loss = F.cross_entropy(head(model(x)), y)
    assert plan.peak_bytes > 20 * outside
    loss.backward()
    whole = Whole()
    plan.reset_peak()
    outer = drivetrain.activation_budget(whole, lambda: whole().backward(), "100%")
    whole().backward()
    assert outer.peak_bytes > plan.peak_bytes == 0  # the outer plan counts the inner passes
    model(x).sum().backward()
    assert plan.peak_bytes > 0


def test_a_copy_of_the_model_works_without_it(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    expected = gradients(model, step)
    drivetrain.activation_budget(model, step, "50%")
    reference = copy.deepcopy(model)
    ids = torch.randint(50, (2, 24))
    for one in (reference, model):
        torch.manual_seed(3)
        one.zero_grad()
        one(ids).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert_same_bits(gradients(model, step), expected)


def test_a_model_with_a_plan_is_saved_without(gpt: tuple[nn.Module, Step], tmp_path: Path) -> None:
    model, step = gpt
    expected = gradients(model, step)
    drivetrain.activation_budget(model, step, "50%")
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.manual_seed(0)
    Gpt()
    ids = torch.randint(50, (2, 24))
    torch.manual_seed(1)
    loaded.zero_grad()
    loaded(ids).backward()
    assert_same_bits({name: param.grad for name, param in loaded.named_parameters()}, expected)
