"""Tests activation_budget on models with compiled parts: bytes, gradients, and the state that planning leaves."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import lookup_backend

import drivetrain
from drivetrain import _C
from drivetrain.budget.trace import Recording

BACKEND = "aot_eager"  # inductor's partitioner, without its compiler
pytestmark = pytest.mark.filterwarnings(  # both by torch's own compiler
    "ignore:`torch.jit:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).logsumexp(1).sum()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def whole(model: Mlp) -> nn.Module:
    return torch.compile(model, backend=BACKEND)


def in_place(model: Mlp) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def forward_only(model: Mlp) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=BACKEND)
    return model


def blocks_in_place(model: Mlp) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


def two_blocks(model: Mlp) -> nn.Module:
    for index in range(2):
        model.blocks[index] = torch.compile(model.blocks[index], backend=BACKEND)
    return model


def step_of(model: nn.Module, rows: int = 64) -> Callable[[], None]:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def grads(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def peak_of(model: nn.Module, step: Callable[[], object]) -> int:
    """Measures saved bytes with a recorder that keeps everything."""
    recorder = _C.ActivationRecorder()
    with Recording(model, recorder):
        step()
    return recorder.peak_bytes


@pytest.mark.parametrize("how", [whole, in_place, forward_only, blocks_in_place, two_blocks])
def test_keeps_to_the_budget(how: Callable[[Mlp], nn.Module]) -> None:
    model = how(Mlp())
    step = step_of(model)
    step()
    expected = grads(model)
    plan = drivetrain.activation_budget(model, step, "50%")
    ratio = plan.to_dict()["compiled"]["ratio"]
    assert 0 <= ratio < 1
    assert 0 < (plan.measured_bytes or 0) <= plan.budget_bytes < plan.unplanned_bytes
    if how is whole:
        said = " ".join(str(plan).split())
        assert f"1 compiled region, compiled at torch's activation_memory_budget {ratio:g}; they save" in said
        assert plan.compiled.saved_bytes <= plan.budget_bytes
    plan.reset_peak()
    step()
    assert 0 < plan.peak_bytes <= plan.budget_bytes
    torch.testing.assert_close(grads(model), expected, rtol=0, atol=0)
    assert torch._functorch.config.activation_memory_budget == 1.0
    plan.remove()
    plan.remove()
    step()
    torch.testing.assert_close(grads(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("share", ["60%", "85%"])
def test_blocks_share_what_a_single_ratio_leaves(share: str) -> None:
    """Equal blocks change together, so one ratio for all either leaves much of the budget unused or does not fit."""
    model = blocks_in_place(Mlp())
    step = step_of(model)
    step()
    expected = grads(model)
    plan = drivetrain.activation_budget(model, step, share)
    assert plan.measured_bytes <= plan.budget_bytes
    ratio, higher = plan.compiled.ratio, plan.compiled.higher
    assert higher is not None
    assert higher[0] > ratio
    assert 0 < higher[1] < len(plan.compiled) == 3
    assert max(b for b in plan.compiled.measured.values() if b <= plan.compiled.saved_bytes) < plan.compiled.saved_bytes
    said = " ".join(str(plan).split())
    assert f"3 compiled regions, compiled at torch's activation_memory_budget {higher[0]:g} for the first" in said
    step()
    torch.testing.assert_close(grads(model), expected, rtol=0, atol=0)
    saved = json.loads(json.dumps(plan.to_dict()))
    plan.remove()
    again = drivetrain.activation_budget(model, plan=saved)
    assert again.compiled.higher == higher
    again.reset_peak()
    step()
    assert again.peak_bytes == plan.measured_bytes
    torch.testing.assert_close(grads(model), expected, rtol=0, atol=0)
    again.remove()


def test_a_compiled_loss_function_is_no_matter() -> None:
    model = nn.Sequential(*Mlp().blocks)
    model.compile(backend=BACKEND)
    loss_function = torch.compile(lambda y: y.logsumexp(1).sum(), backend=BACKEND)
    x = torch.randn(64, 32)

    def step() -> None:
        model.zero_grad()
        loss_function(model(x)).backward()

    step()
    expected = grads(model)
    plan = drivetrain.activation_budget(model, step, "50%")
    step()
    assert plan.measured_bytes <= plan.budget_bytes
    torch.testing.assert_close(grads(model), expected, rtol=0, atol=0)
    plan.remove()


def test_a_compiled_function_around_the_model_is_told_apart() -> None:
    model = Mlp()
    x = torch.randn(64, 32)
    forward = torch.compile(lambda x: model(x) * 2, backend=BACKEND)

    def step() -> None:
        model.zero_grad()
        forward(x).backward()

    with pytest.raises(RuntimeError, match=r"inside of a function that torch.compile made.*`model.compile\(\)`"):
        drivetrain.activation_budget(model, step, "50%")


def test_without_need_nothing_is_compiled_again() -> None:
    seen = Seen()
    model = torch.compile(Mlp(), backend=seen)
    step = step_of(model)
    step()
    plan = drivetrain.activation_budget(model, step, "100%")
    assert plan.to_dict()["compiled"]["ratio"] is None
    assert seen.ratios == [1.0]


class Seen:
    """A backend that records the memory budget in force when it compiles."""

    def __init__(self) -> None:
        self.ratios: list[float] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.ratios.append(torch._functorch.config.activation_memory_budget)
        return lookup_backend(BACKEND)(graph, inputs)


def test_ratio_is_the_models_own_and_removed() -> None:
    seen = Seen()
    model = torch.compile(Mlp(), backend=seen)
    step = step_of(model)
    plan = drivetrain.activation_budget(model, step, "50%")
    ratio = plan.to_dict()["compiled"]["ratio"]
    assert len(seen.ratios) <= 6
    seen.ratios.clear()
    step()
    step_of(torch.compile(Mlp(), backend=seen))()  # the same code
    assert seen.ratios in ([], [1.0])  # what was compiled without a plan may serve the other, too
    seen.ratios.clear()
    step_of(torch.compile(Mlp(), backend=seen), 16)()
    step_of(model, 48)()
    assert seen.ratios == [1.0, ratio]
    seen.ratios.clear()
    plan.remove()
    step()
    assert seen.ratios == []  # what was there before is there again
    step_of(model, 100)()
    assert set(seen.ratios) <= {1.0}


def test_many_plans_stay_below_the_limit_of_recompilations() -> None:
    seen = Seen()
    model = torch.compile(Mlp(), backend=seen)
    step = step_of(model)
    with torch._dynamo.config.patch(recompile_limit=5):
        for share in ("50%", "30%"):
            plan = drivetrain.activation_budget(model, step, share)
            assert 0 < (plan.measured_bytes or 0) <= plan.budget_bytes
            plan.remove()
        assert len(seen.ratios) > torch._dynamo.config.recompile_limit


def test_equal_blocks_are_compiled_once() -> None:
    seen = Seen()
    model = Mlp()
    for block in model.blocks:
        block.compile(backend=seen)
    step = step_of(model)
    step()
    alone = len(seen.ratios)
    drivetrain.activation_budget(model, step, "50%").remove()
    assert len(seen.ratios) <= 8 * alone  # as found, five ratios, and two side by side


def test_json() -> None:
    model = two_blocks(Mlp())
    plan = drivetrain.activation_budget(model, step_of(model), "50%")
    written = json.loads(json.dumps(plan.to_dict()))
    assert written["compiled"]["measured"]
    torch._dynamo.reset()
    torch.manual_seed(0)
    other = two_blocks(Mlp())
    step = step_of(other)
    step()
    expected = grads(other)
    again = drivetrain.activation_budget(other, step, plan=written)
    assert again.measured_bytes == plan.measured_bytes
    assert again.to_dict()["compiled"] == written["compiled"]
    torch.testing.assert_close(grads(other), expected, rtol=0, atol=0)


def test_plan_for_compiled_regions_needs_them() -> None:
    model = Mlp()
    model.blocks.compile(backend=BACKEND)
    written = drivetrain.activation_budget(model, step_of(model), "50%").to_dict()
    with pytest.raises(ValueError, match="compile the model before it gets the plan"):
        drivetrain.activation_budget(Mlp(), plan=written)


@pytest.mark.parametrize("how", [whole, two_blocks])
def test_below_the_smallest(how: Callable[[Mlp], nn.Module]) -> None:
    model = how(Mlp())
    step = step_of(model)
    step()  # compiles, which is not to be done under a recorder alone
    before = peak_of(model, step)
    with pytest.raises(ValueError, match=r"smallest that is possible with this step is .* regions save .* at 0\.000"):
        drivetrain.activation_budget(model, step, 1000)
    assert peak_of(model, step) == before


def test_graph_breaks_and_dropout() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Mlp().blocks, Mlp().blocks

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return F.dropout(self.second(x), 0.0).sum()

    model = torch.compile(Broken(), backend=BACKEND)
    step = step_of(model)
    step()
    expected = grads(model)
    plan = drivetrain.activation_budget(model, step, "50%")
    assert 0 < (plan.measured_bytes or 0) <= plan.budget_bytes
    step()
    torch.testing.assert_close(grads(model), expected, rtol=0, atol=0)
