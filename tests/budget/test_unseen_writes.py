"""Tests that writes which no version counter shows, between forward and backward, raise errors that name the tensor."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import drivetrain
from drivetrain import _C
from drivetrain.budget.plan import PlannedOp
from drivetrain.budget.trace import RECOMPUTE, Recording, profile

NUM_CHECKED_FIRST, CHECKED_EVERY = 8, 31


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("scale", torch.rand(64) + 0.5)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.nn.functional.softplus(self.up(x.sin()))
        return self.down((self.hidden * self.scale).tanh()).square().sum()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def forgetting(
    model: nn.Module, step: Callable[[], object], is_kept: Callable[[str], bool] = lambda op: False
) -> Recording:
    """Returns a recording that recomputes everything except the results of operations for which is_kept is true."""
    trace, _ = profile(model, step)
    recorder = _C.ActivationRecorder()
    recorder.set_plans(
        [
            [
                PlannedOp(
                    op.name,
                    [0 if is_kept(op.name) else RECOMPUTE] * len(op.writes),
                    True,
                    module=trace.modules[op.module],
                )
                for op in one.ops
            ]
            for one in trace.passes
        ]
    )
    return Recording(model, recorder)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 16)


@pytest.fixture
def recording(model: Model, x: Tensor) -> Iterator[None]:
    with forgetting(model, lambda: model(x).backward(), lambda op: op == "aten::softplus"):
        yield


def through_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy().reshape(-1)[3] += 1


def through_dlpack(tensor: Tensor) -> None:
    torch.from_dlpack(tensor.detach()).mul_(2)


def through_a_pointer(tensor: Tensor) -> None:
    """Writes as a custom operator may, without a version bump."""
    ctypes.memset(tensor.data_ptr() + 4 * (tensor.numel() - 1), 1, 4)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("write", [through_numpy, through_dlpack, through_a_pointer])
@pytest.mark.parametrize(
    ("which", "named"),
    [
        ("up.weight", r"parameter 'up\.weight' \(\[16, 64\] float\), which aten::addmm in 'up' read"),
        ("scale", r"buffer 'scale' \(\[64\] float\), which aten::mul read"),
        ("x", r"a tensor of \[8, 16\] float that the model was given \(argument 'self'\), which aten::sin read"),
        ("hidden", r"the result of aten::softplus \(\[8, 64\] float\), which aten::mul read"),
    ],
)
def test_what_was_written_is_named(
    which: str, named: str, write: Callable[[Tensor], None], model: Model, x: Tensor
) -> None:
    loss = model(x)
    model(x).backward()  # nothing was written
    written = {"x": x, "hidden": model.hidden, **dict(model.named_parameters()), **dict(model.named_buffers())}[which]
    if which == "hidden":
        loss = model(x)
        written = model.hidden
    assert written is not None
    write(written)
    with pytest.raises(CheckpointError, match=named):
        loss.backward()
    model.zero_grad()
    model(x).backward()


@pytest.mark.usefixtures("recording")
def test_what_is_given_and_not_written_may_have_written_neighbors(model: Model) -> None:
    """Only the elements that the operation reads count, not the rest of their memory."""
    whole = torch.randn(8, 32)
    rows = torch.randn(24, 16)
    for given, rest in (
        (whole[:, ::2], whole[:, 1::2]),
        (rows[:8], rows[8:]),
        (whole[:, :1].expand(8, 16), whole[:, 5]),
    ):
        loss = model(given)
        rest.numpy()[:] = 3.0
        loss.backward()
        loss = model(given)
        given.numpy()[0, 0] += 1.0
        with pytest.raises(CheckpointError, match="that the model was given"):
            loss.backward()


def test_the_first_passes_are_checked_and_every_31st(model: Model, x: Tensor) -> None:
    def is_seen() -> bool:
        loss = model(x)
        through_numpy(model.up.weight)
        try:
            loss.backward()
        except CheckpointError:
            return True
        return False

    with forgetting(model, lambda: model(x).backward()):
        seen = [is_seen() for _ in range(70)]
    assert [index for index, was in enumerate(seen) if was] == [*range(NUM_CHECKED_FIRST), CHECKED_EVERY, 62]


def test_a_plan_is_checked_from_its_first_step(model: Model, x: Tensor) -> None:
    plan = drivetrain.activation_budget(model, lambda: model(x).backward(), "60%")
    loss = model(x)
    x.numpy()[:] = 0
    model.up.weight.detach().numpy()[:] = 0
    with pytest.raises(CheckpointError, match="other values when backward recomputes that operation"):
        loss.backward()
    del loss
    model.hidden = None
    assert plan.live_bytes == 0
    model(x).backward()
