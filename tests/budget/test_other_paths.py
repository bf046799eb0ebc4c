"""Checks that a budget holds, and gradients keep their bits, in steps whose operations differ from the planned ones."""

import random
import warnings
from collections.abc import Callable
from operator import attrgetter

import pytest
import torch
from models import assert_same_bits, gradients
from torch import Tensor, nn

import drivetrain
from drivetrain import _C
from drivetrain.budget import ActivationPlan
from drivetrain.budget.trace import Recording
from suite import activation_paths

TOLERANCE = 1.05


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self, blocks: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(x)
        if not mask.all():
            x = x * mask[:, None]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step_of(model: nn.Module, *args: object) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(*args).backward()

    return step


def chain(blocks: int = 8) -> tuple[Chain, Tensor, Tensor]:
    torch.manual_seed(0)
    return Chain(blocks), torch.randn(64, 32), torch.ones(64)


def check(plan: ActivationPlan, model: nn.Module, step: Callable[[], None], expected: dict[str, Tensor]) -> None:
    plan.reset_peak()
    assert_same_bits(gradients(model, step), expected)
    assert plan.live_bytes == 0


def test_a_batch_with_padding_keeps_the_budget_of_a_plan_without() -> None:
    model, x, mask = chain()
    padded = mask.clone()
    padded[40:] = 0
    expected = gradients(model, step_of(model, x, padded))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = drivetrain.activation_budget(model, step_of(model, x, mask), "40%")
        for _ in range(3):
            check(plan, model, step_of(model, x, padded), expected)
            assert plan.peak_bytes <= TOLERANCE * plan.budget_bytes
            assert not plan.has_diverged
    assert "aten::mul" in plan._recorder.divergence
    plan.remove()


@pytest.mark.parametrize("case", activation_paths.cases(), ids=attrgetter("name"))
def test_other_paths_keep_the_budget(case: activation_paths.Case) -> None:
    budget, kept = activation_paths.kept_of(case)  # compares gradients with gradients without a budget
    # A tensor of the convolutions is a twentieth of the budget, so two or three more make the difference. A few
    # trees keep more than 1.05, because a part of their pass reads values of many others.
    assert kept <= (1.15 if "convolutions" in case.name or "trees" in case.name else TOLERANCE) * budget


def test_another_path_keeps_what_the_budget_leaves() -> None:
    case = next(case for case in activation_paths.cases() if case.name == "no planned operation")
    plan = drivetrain.activation_budget(case.model, step_of(case.model, *case.planned), 10**9)
    step = step_of(case.model, *case.draw())
    step()
    assert plan.replay_seconds == 0
    plan.remove()


def test_the_first_step_above_the_budget_warns_once() -> None:
    model, x, mask = chain()
    plan = drivetrain.activation_budget(model, step_of(model, x, mask), "40%")
    larger = step_of(model, torch.cat([x, x, x, x]), torch.ones(256))
    with pytest.warns(RuntimeWarning, match=r"a step keeps [\d.]+ MB for backward, above the budget of [\d.]+ MB: its"):
        larger()
    assert plan.has_diverged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        larger()
        step_of(model, x, mask)()
    assert not plan.has_diverged
    plan.remove()


def test_any_plan_gives_the_bits_of_a_step_without_one() -> None:
    """Follows plans of other models, whose operations have the same names in another order."""
    draw = random.Random(0)
    model, x, mask = chain(4)
    step = step_of(model, x, mask)
    expected = gradients(model, step)
    trace = drivetrain.activation_budget(model, step, "60%")
    ops = trace._chosen.tape_plans(trace._trace)[0]
    trace.remove()
    for _ in range(50):
        recorder = _C.ActivationRecorder()
        cuts = sorted(draw.randrange(len(ops)) for _ in range(4))
        parts = [ops[a:b] for a, b in zip([0, *cuts], [*cuts, len(ops)], strict=True)]
        draw.shuffle(parts)
        mixed = [
            op._replace(prefetches=(), forms=[draw.choice((-2, -1, 0)) for _ in op.forms]) for p in parts for op in p
        ]
        recorder.set_plans([mixed])
        recorder.set_formats([], None, draw.choice((0, 10_000, 2**40)))
        with Recording(model, recorder):
            assert_same_bits(gradients(model, step), expected)
        assert recorder.live_bytes == 0


@pytest.mark.parametrize("has_grads", [False, True])
def test_planning_leaves_nothing_behind(has_grads: bool) -> None:
    class Counted(Chain):
        calls = 0

        def __init__(self) -> None:
            super().__init__(2)
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(self.norm(x + torch.rand_like(x)), mask)

    def state() -> list[object]:
        grads = [None if p.grad is None else (p.grad.data_ptr(), p.grad._version, p.grad.sum().item()) for p in params]
        buffers = [(buffer._version, buffer.sum().item()) for buffer in model.buffers()]
        return [grads, buffers, torch.get_rng_state().sum().item(), model.calls, model.training]

    torch.manual_seed(0)
    model, x, mask = Counted(), torch.randn(64, 32), torch.ones(64)
    params = list(model.parameters())
    model.calls = 7
    if has_grads:
        model(x, mask).backward()
    model.eval()

    def step() -> None:
        assert all(param.grad is None for param in params)  # so that no run holds them twice
        model.train()
        model(x, mask).backward()

    before = state()
    plan = drivetrain.activation_budget(model, step, "60%")
    assert state() == before
    plan.remove()


def test_a_first_step_that_keeps_more_does_not_decide() -> None:
    class WarmsUp(Chain):
        is_warm = False

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            loss = super().forward(x, mask)
            if not self.is_warm:
                self.is_warm = True
                loss = loss + self.embed(x).repeat(1, 1000).square().mean()
            return loss

    torch.manual_seed(0)
    model = WarmsUp(8)
    step = step_of(model, torch.randn(64, 32), torch.ones(64))
    plan = drivetrain.activation_budget(model, step, "50%")
    assert plan.unplanned_bytes < 64 * 32 * 1000  # without the tensor of the first step
    plan.remove()
