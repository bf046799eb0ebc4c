"""Tests that activation_budget stops recording and frees memory when a step, its backward or planning ends early."""

import copy
import gc
import io
import itertools
import pickle
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from models import ABOVE
from rich.console import Console
from torch import Tensor, nn

import drivetrain
from drivetrain import _C
from drivetrain.budget import progress
from drivetrain.budget.plan import PlannedOp
from drivetrain.budget.trace import RECOMPUTE, Recording, profile
from effort import rounds

Step = Callable[[], object]
NUM_MOMENTS = {
    "forward": rounds(30, 90),
    "with": rounds(10, 30),
    "backward": rounds(15, 40),
}
WAIT_SECONDS = 60
AFTERWARDS = {drivetrain.activation_budget.__code__}  # It only returns the plan after planning.


class Twice(torch.autograd.Function):
    """Runs Python code in backward, where an interrupt can strike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.norm, self.drop = nn.BatchNorm1d(128), nn.Dropout(0.2)
        self.when_called: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.up(x)).tanh())
        self.when_called()
        x = x + Twice.apply(self.down(torch.nn.functional.softplus(hidden)))
        return drivetrain.checkpoint(torch.sigmoid, x).square().sum()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def step(model: Model) -> Step:
    x = torch.randn(16, 32)

    def step() -> None:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).backward()

    return step


class Moments:
    """Counts the moments at which the interpreter raises asynchronous exceptions in a thread: when a function begins
    and when a call has returned. Raises at one of them."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "c_call" and frame.f_code not in AFTERWARDS:
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt


def run_until(at: int, function: Step) -> int:
    """Runs the function, interrupted at that moment (0: at none), and returns the number of moments."""
    moments = Moments(at)
    sys.setprofile(moments)
    try:
        function()
    except KeyboardInterrupt:
        assert moments.count == at
    finally:
        sys.setprofile(None)
    return moments.count


def gradients(model: nn.Module, step: Step) -> list[Tensor]:
    step()
    return [param.grad.clone() for param in model.parameters()]


def assert_clean(plan: drivetrain.budget.ActivationPlan | None = None) -> None:
    """Checks that steps of another model are not recorded, and that nothing of the interrupted step is kept."""
    weight = torch.ones(64, 64, requires_grad=True)
    kept = (weight @ weight).tanh().sum()
    if plan is not None:
        if plan.live_bytes:
            gc.collect()
        assert plan.live_bytes == 0
        plan.reset_peak()
    kept.backward()
    assert not hooks_on(weight)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(_C.activation_recorder_key())
    assert torch.equal(torch.func.grad(lambda x: x.square().sum())(torch.ones(2)), torch.full((2,), 2.0))


def hooks_on(weight: Tensor) -> bool:
    """Returns whether autograd would call hooks for a tensor that it saves now."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("none should be there"):
            return False
    except RuntimeError:
        return True


@pytest.fixture
def drops_unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Python go on where an interrupt strikes a finalizer. pytest would keep that exception, and the graph that
    its frames hold."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.mark.usefixtures("drops_unraisable")
@pytest.mark.parametrize("where", NUM_MOMENTS)
@ABOVE
def test_interrupts_at_any_moment(where: str, model: Model, step: Step) -> None:
    x = torch.randn(16, 32)
    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, step, "60%")

    def forward() -> Tensor:
        return model(x)

    def forward_in_with() -> None:
        with plan:
            (model(x) + model.up(x).sin().sum()).backward()

    def run(at: int) -> int:
        if where == "backward":
            loss = forward()
            return run_until(at, lambda: loss.backward())
        return run_until(at, forward if where == "forward" else forward_in_with)

    run(0)  # modules are imported
    num_moments = run(0)
    choose = random.Random(20)
    for at in sorted(choose.choices(range(1, num_moments + 1), k=NUM_MOMENTS[where])):
        run(at)
        assert_clean(plan)
    found = gradients(model, step)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert_clean(plan)
    plan.remove()
    assert_clean(plan)
    plan.reset_peak()
    step()
    assert plan.peak_bytes == 0


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns all state that planning may change, by name."""
    state: dict[str, Any] = {"random": torch.get_rng_state()}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        state[name] = (id(tensor), tensor._version, tensor.detach().clone())
        grad = tensor.grad
        state[f"grad of {name}"] = None if grad is None else (id(grad), grad._version, grad.clone())
    for name, module in model.named_modules():
        state[f"attributes of {name}"] = set(vars(module))
        state[f"hooks of {name}"] = [len(hooks) for key, hooks in vars(module).items() if "hooks" in key]
    return state


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, tuple):
            assert value[:2] == other[name][:2], name
            assert torch.equal(value[2], other[name][2]), name
        else:
            assert torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name], name


@pytest.mark.usefixtures("drops_unraisable")
@pytest.mark.parametrize("has_grads", [False, True])
def test_planning_that_is_interrupted_leaves_the_model_as_it_was(has_grads: bool, model: Model) -> None:
    x = torch.randn(16, 32)

    def step() -> None:
        model(x).backward()

    plans: list[drivetrain.budget.ActivationPlan] = []

    def planning() -> None:
        plans.append(drivetrain.activation_budget(model, step, "60%"))

    reference = copy.deepcopy(model)
    drivetrain.activation_budget(reference, lambda: reference(x).backward(), "60%").remove()  # modules are imported
    num_moments = run_until(0, lambda: drivetrain.activation_budget(reference, lambda: reference(x).backward(), "60%"))
    if has_grads:
        step()
    else:
        model.zero_grad()
    model.train()
    before = state_of(model)
    choose = random.Random(21)
    for at in choose.choices(range(1, num_moments), k=20):
        run_until(at, planning)
        if plans:  # nothing was raised
            plans.pop().remove()
            before = state_of(model)
        assert_same_state(state_of(model), before)
        assert_clean()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_step_that_fails_under_the_plan_leaves_the_model_as_it_was(error: type[BaseException], model: Model) -> None:
    """Buffers have been written when the second step begins."""
    x, calls = torch.randn(16, 32), itertools.count(1)

    def step() -> None:
        model(x).backward()
        if next(calls) == 2:
            raise error

    before = state_of(model)
    with pytest.raises(error):
        drivetrain.activation_budget(model, step, "60%")
    assert next(calls) == 3
    assert_same_state(state_of(model), before)
    assert_clean()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Shows progress from the beginning of planning. Returns a function that waits within a step until it is shown."""
    monkeypatch.setattr(progress, "_LONG_SECONDS", 0.0)

    def wait() -> None:
        line = progress._of_thread.line
        if line is not None:
            line._timer.join(WAIT_SECONDS)

    return wait


def test_long_planning_says_what_it_is_at(
    told: Callable[[], None],
    model: Model,
    step: Step,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model.when_called = told
    with caplog.at_level("INFO", logger="drivetrain"):
        drivetrain.activation_budget(model, step, "60%")
    messages = [record.getMessage() for record in caplog.records]
    for said in (
        "operation by operation",
        "chooses which tensors",
        "under the plan",
    ):
        assert any(said in message for message in messages), said
    written = io.StringIO()
    caplog.clear()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=written, force_terminal=True))
    with caplog.at_level("INFO", logger="drivetrain"):
        drivetrain.activation_budget(model, step, "60%")
    assert "activation_budget: " in written.getvalue()
    assert not any("runs a step" in record.getMessage() for record in caplog.records)
    assert progress._of_thread.line is None


def test_other_ranks_say_nothing(
    told: Callable[[], None],
    model: Model,
    step: Step,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    model.when_called = lambda: None
    with caplog.at_level("INFO", logger="drivetrain"), progress.showing():
        progress.tell("runs a step")
        assert getattr(progress._of_thread, "line", None) is None
    assert not caplog.records


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """Returns the alarms that have gone off; each raises."""
    rung: list[int] = []

    def ring(number: int, frame: FrameType | None) -> None:
        rung.append(number)
        raise TimeoutError("the alarm has rung")

    before = signal.signal(signal.SIGALRM, ring)
    yield rung
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("kind", ["pre", "forward", "always called", "backward", "of saved tensors", "of all modules"])
def test_hooks_that_raise(kind: str, error: type[BaseException], model: Model, step: Step) -> None:
    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, step, "60%")

    def fail(*_: object) -> None:
        raise error("from a hook")

    def save() -> None:
        with torch.autograd.graph.saved_tensors_hooks(fail, fail):
            torch.ones(2, requires_grad=True).sin()

    if kind == "of saved tensors":
        model.when_called = save
        with pytest.raises(error):
            step()
        model.when_called = lambda: None
    else:
        handle = {
            "pre": lambda: model.register_forward_pre_hook(fail),
            "forward": lambda: model.norm.register_forward_hook(fail),
            "always called": lambda: model.register_forward_hook(fail, always_call=True),
            "backward": lambda: model.norm.register_full_backward_hook(fail),
            "of all modules": lambda: nn.modules.module.register_module_forward_hook(fail),
        }[kind]()
        with pytest.raises(error):
            step()
        handle.remove()
    assert_clean(plan)
    for one, other in zip(gradients(model, step), expected, strict=True):
        assert torch.equal(one, other)
    assert_clean(plan)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_solver_that_raises(
    error: type[BaseException], model: Model, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error("from the solver")

    before = set(vars(model))
    with monkeypatch.context() as patched:
        patched.setattr(_C, "activation_solve", fail)
        with pytest.raises(error):
            drivetrain.activation_budget(model, step, "60%")
    assert set(vars(model)) == before
    assert_clean()
    drivetrain.activation_budget(model, step, "60%")


def test_a_backward_that_fails_while_it_recomputes_says_so_when_it_is_run_again() -> None:
    fails = False

    def tangent(x: Tensor) -> Tensor:
        if fails:
            raise KeyboardInterrupt
        return x.tan()

    library = torch.library.Library("drivetrain_interrupts", "FRAGMENT")
    library.define("tangent(Tensor(a!) x) -> ()")

    def tangent_(x: Tensor) -> None:
        x.copy_(tangent(x))

    library.impl("tangent", tangent_, "CPU")

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            with torch.no_grad():
                z = y.sin()
                torch.ops.drivetrain_interrupts.tangent(z)
            return (y * z.exp()).sum()

    model, x = InPlace(), torch.randn(8, 32)
    trace, _ = profile(model, lambda: model(x).backward())
    recorder = _C.ActivationRecorder()
    recorder.set_plans(
        [[PlannedOp(op.name, [RECOMPUTE] * len(op.writes), True) for op in one.ops] for one in trace.passes]
    )
    with Recording(model, recorder):
        loss = model(x)
        fails = True
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
        fails = False
        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="run forward again"):
            loss.backward()
        del loss
        model(x).backward()
        assert recorder.num_replayed > 0
        assert recorder.live_bytes == 0
    assert_clean()


def test_an_interrupt_while_a_recomputation_ends_is_told() -> None:
    """The interrupt strikes while the frames of the function are left, and replaces the exception that ends it."""
    is_recomputed = False

    def function(x: Tensor) -> Tensor:
        nonlocal is_recomputed
        try:
            return x.exp().sin().clone()
        finally:
            if is_recomputed:
                raise KeyboardInterrupt
            is_recomputed = True

    loss = drivetrain.checkpoint(function, torch.ones(4, requires_grad=True)).sum()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()


@pytest.mark.parametrize("thread", ["this", "another"])
def test_removing_ends_what_nobody_else_does(thread: str, model: Model, step: Step) -> None:
    plan = drivetrain.activation_budget(model, step, "60%")
    is_entered, is_removed = threading.Event(), threading.Event()
    found: list[object] = []

    def work() -> None:
        plan.__enter__()
        kept = model.up(torch.randn(16, 32)).tanh()
        is_entered.set()
        assert is_removed.wait(WAIT_SECONDS)
        del kept
        torch.ones(1).add(1)
        assert_clean(plan)
        plan.__exit__(None, None, None)
        assert_clean(plan)
        found.append("clean")

    if thread == "this":
        plan.__enter__()
        kept = model.up(torch.randn(16, 32)).tanh()
        plan.remove()
        del kept
        assert_clean(plan)
        plan.__exit__(None, None, None)
        assert_clean(plan)
        return
    other = threading.Thread(target=work)
    other.start()
    assert is_entered.wait(WAIT_SECONDS)
    plan.remove()
    is_removed.set()
    other.join(WAIT_SECONDS)
    assert found == ["clean"]


def test_a_pass_that_cannot_begin_is_none(model: Model, step: Step) -> None:
    plan = drivetrain.activation_budget(model, step, "60%")
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        plan.__enter__()
    assert_clean(plan)
    plan.reset_peak()
    step()
    assert plan.peak_bytes > 0


def test_hooks_left_by_other_code_stay(model: Model, step: Step) -> None:
    """Hooks of the user stay as without a budget, and the hooks of the pass below them are removed."""
    plan = drivetrain.activation_budget(model, step, "60%")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    model.when_called = hooks.__enter__
    model(torch.randn(16, 32))
    model.when_called = lambda: None
    hooks.__exit__(None, None, None)
    assert_clean(plan)


def test_budgets_inside_budgets(model: Model, step: Step) -> None:
    outer = nn.Sequential(model)
    x = torch.randn(16, 32)
    inner_plan = drivetrain.activation_budget(model, step, "60%")
    outer_plan = drivetrain.activation_budget(outer, lambda: outer(x).backward(), "60%")

    def interrupt() -> None:
        raise KeyboardInterrupt

    model.when_called = interrupt
    with pytest.raises(KeyboardInterrupt):
        outer(x)
    model.when_called = lambda: None
    assert_clean(inner_plan)
    assert_clean(outer_plan)
    inner_plan.remove()
    outer(x).backward()
    assert outer_plan.peak_bytes > 0
    outer_plan.remove()
    assert "_compiled_call_impl" not in vars(model)
    assert "_compiled_call_impl" not in vars(outer)


def test_two_plans_of_a_model_go_in_any_order(model: Model, step: Step) -> None:
    first = drivetrain.activation_budget(model, step, "60%")
    second = drivetrain.activation_budget(model, step, "60%")
    first.remove()
    second.reset_peak()
    step()
    assert second.peak_bytes > 0
    second.remove()
    assert "_compiled_call_impl" not in vars(model)
    assert_clean(first)


def test_forward_that_is_called_directly_has_no_budget(model: Model, step: Step) -> None:
    plan = drivetrain.activation_budget(model, step, "60%")
    plan.reset_peak()
    model.forward(torch.randn(16, 32)).backward()
    assert plan.peak_bytes == 0


class CopiesAll(Model):
    """Pickles all of its attributes, unlike nn.Module."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "when_called": None}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_the_model_have_no_part_of_the_plan(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = CopiesAll()
    x = torch.randn(16, 32)
    plan = drivetrain.activation_budget(model, lambda: model(x).backward(), "60%")
    reference = copied(model)
    reference.when_called = lambda: None
    plan.reset_peak()
    reference(x).backward()
    assert (plan.peak_bytes > 0) == (copied is copy.copy)  # which copies no attribute
    assert type(model) is CopiesAll


def test_replicas_of_the_model_compute_with_what_they_have(model: Model, step: Step) -> None:
    plan = drivetrain.activation_budget(model, step, "60%")
    replica = model._replicate_for_data_parallel()
    called: list[str] = []
    model.when_called = lambda: called.append("model")
    replica.when_called = lambda: called.append("replica")
    replica.up, replica.down = model.up, model.down
    replica(torch.randn(16, 32))
    assert called == ["replica"]
    plan.remove()


def test_a_model_with_a_plan_is_freed() -> None:
    x = torch.randn(16, 32)

    def plan() -> "weakref.ref[nn.Module]":
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        model.compile(backend="eager")
        drivetrain.activation_budget(model, lambda: model(x).sum().backward(), "100%")
        return weakref.ref(model)

    gone = plan()
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
