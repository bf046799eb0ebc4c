"""Tests optimizers under install(optim=True) that leave some of their parameters to torch's own step."""

import copy
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain
from drivetrain import optim
from drivetrain.optim import left_to_torch
from optim_cases import TORCHS, TORCHS_SCALER, Scaled, scaled

TORCHS_CLIP = torch.nn.utils.clip_grad_norm_
PARTLY = "parameters by torch's own step"


def plain(seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)))


def with_shared_memory() -> list[nn.Parameter]:
    memory = torch.linspace(-1, 1, 12).reshape(4, 3)
    return [plain(0), nn.Parameter(memory), plain(1), nn.Parameter(memory[:2]), plain(2)]


def with_a_wrapper() -> list[nn.Parameter]:
    return [plain(0), scaled(), plain(1)]


def with_a_meta_parameter() -> list[nn.Parameter]:
    return [plain(0), nn.Parameter(torch.empty(4, 3, device="meta")), plain(1)]


def with_one_twice() -> list[nn.Parameter]:
    twice = plain(3)
    return [plain(0), twice, plain(1), twice]


ODD: dict[str, tuple[Callable[[], list[nn.Parameter]], set[int], str]] = {
    "shared": (with_shared_memory, {1, 3}, r"2 of 5 .*: parameter 1 of .* and parameter 3 of .* share memory"),
    "wrapper": (with_a_wrapper, {1}, r"1 of 3 .*: parameter 1 of .* subclass that wraps others \(a Scaled\)"),
    "meta": (with_a_meta_parameter, {1}, r"1 of 3 .*: parameter 1 of .* is on meta"),
    "twice": (with_one_twice, {1, 3}, r"1 of 3 .*: parameter 3 of .* is in its group twice"),
}
ON_META = [name for name in TORCHS if name not in ("ASGD", "Adafactor", "Muon")]  # under torch, too


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))
        param.grad = values.to(param.device)


def value(param: Tensor) -> Tensor:
    data = param.detach()
    return data.value() if isinstance(data, Scaled) else data


def assert_as_torchs(ours: list[nn.Parameter], theirs: list[nn.Parameter], left: set[int]) -> None:
    """Parameters that torch steps have its bits, and the others are as close as our step is."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.is_meta:
            assert index in left
        elif index in left:
            assert torch.equal(value(a), value(b)), index
        else:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


def layout(optimizer: torch.optim.Optimizer) -> Any:
    """Returns a state dict's keys in their order, with the kinds of its values."""
    saved = optimizer.state_dict()
    states = [
        (key, [(name, type(entry), getattr(entry, "dtype", None)) for name, entry in state.items()])
        for key, state in saved["state"].items()
    ]
    return states, saved["param_groups"]


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(("name", "odd"), [(n, o) for o in ODD for n in (ON_META if o == "meta" else TORCHS)])
def test_torch_steps_only_what_ours_cannot(name: str, odd: str) -> None:
    make, left, message = ODD[odd]
    ours, theirs = make(), make()
    torchs = TORCHS[name](theirs, lr=0.05)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        mine = getattr(torch.optim, name)(ours, lr=0.05)
        train(mine, ours, range(3))
    partly = [str(each.message) for each in warned if PARTLY in str(each.message)]
    assert len(partly) == 1  # of three steps
    assert [line for line in left_to_torch.constructed if PARTLY in line] == partly
    assert re.match(f"torch.optim.{name} steps {message}", partly[0]), partly[0]
    assert type(mine) is getattr(optim, name)  # although torch steps some of its parameters
    train(torchs, theirs, range(3))
    assert_as_torchs(ours, theirs, left)
    assert layout(mine) == layout(torchs)
    # State dicts go both ways, and training goes on.
    if odd != "meta":
        saved = copy.deepcopy(mine.state_dict()), copy.deepcopy(torchs.state_dict())
        mine.load_state_dict(saved[1])
        torchs.load_state_dict(saved[0])
        train(mine, ours, range(3, 5))
        train(torchs, theirs, range(3, 5))
        assert_as_torchs(ours, theirs, set() if odd == "wrapper" else left)
        assert layout(mine) == layout(torchs)
    assert mine.report().num_elements > 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}, {}])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_flags_and_groups_are_torchs(name: str, options: dict[str, Any]) -> None:
    """Groups have their own settings, one is added later, a scheduler and hooks run once per step."""
    made = []
    for cls in (getattr(torch.optim, name), TORCHS[name]):
        params = [*with_shared_memory(), plain(7)]
        groups = [{"params": params[:2], "lr": 0.02}, {"params": params[2:5], "weight_decay": 0.1}]
        optimizer = cls(groups, lr=0.05, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("pre"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("post"))
        for step in range(4):
            set_gradients(params, step)
            if step == 2:
                optimizer.add_param_group({"params": [params[5]], "lr": 0.3})
            if step == 1:
                params[4].grad = None
            quietly(optimizer.step)
            scheduler.step()
        assert called == ["pre", "post"] * 4
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        made.append((optimizer, params))
    (mine, ours), (torchs, theirs) = made
    assert_as_torchs(ours, theirs, {1, 3})
    assert layout(mine) == layout(torchs)


@pytest.mark.usefixtures("installed")
def test_a_group_whose_numbers_only_torch_accepts_is_left_to_torch() -> None:
    made = []
    for cls in (torch.optim.SGD, TORCHS["SGD"]):
        params = [plain(0), plain(1)]
        params.append(nn.Parameter(params[0].data[:2]))  # torch must step it after the one it is a part of
        optimizer = cls(params[:2], lr=0.1, momentum=0.9)
        train(optimizer, params[:2], range(2))
        quietly(optimizer.add_param_group, {"params": params[2:], "lr": -0.1})
        quietly(train, optimizer, params, range(2, 5))
        made.append(params)
    assert_as_torchs(*made, {2})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("overflows", [1, 2])
def test_a_scaler_skips_all_parameters_after_an_overflow_in_any(fused: bool, clips: bool, overflows: int) -> None:
    """Parameter 1 is torch's, and parameter 2 ours."""

    def run(cls: Any, scaler: torch.amp.GradScaler, clip: Any) -> tuple[list[nn.Parameter], float, list[float]]:
        params = with_shared_memory()
        optimizer = cls(params, lr=0.1, fused=fused)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            factors = [math.inf if step == 2 and index == overflows else 1.0 for index in range(len(params))]
            loss = sum((param * param).sum() * factor for param, factor in zip(params, factors, strict=True))
            scaler.scale(loss).backward()  # type: ignore[arg-type]
            if clips:
                scaler.unscale_(optimizer)
                norms.append(float(clip(params, 0.5)))
            quietly(scaler.step, optimizer)
            scaler.update()
        assert int(optimizer.state[params[0]]["step"]) == int(optimizer.state[params[1]]["step"]) == 3
        return params, scaler.get_scale(), norms

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    ours, scale, norms = run(torch.optim.AdamW, scaler, torch.nn.utils.clip_grad_norm_)
    theirs, expected, their_norms = run(TORCHS["AdamW"], TORCHS_SCALER("cpu", init_scale=256.0), TORCHS_CLIP)
    assert (scale, norms) == (expected, pytest.approx(their_norms, nan_ok=True))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.usefixtures("installed")
def test_drivetrains_scaler_and_a_fused_step() -> None:
    """The scaler leaves the search for overflows to the step, which torch and drivetrain share."""
    params = with_shared_memory()
    optimizer = torch.optim.SGD(params, lr=0.5, fused=True)
    scaler = drivetrain.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for overflows in (None, 1, 2):
        before = [param.detach().clone() for param in params]
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, math.inf if index == overflows else 8.0)
        quietly(scaler.step, optimizer)
        scaler.update()
        for index, (param, start) in enumerate(zip(params, before, strict=True)):
            steps = 0 if overflows is not None else 1
            if index in (1, 3):  # Each of them steps the rows that they share.
                shared = start - steps * torch.tensor([[2.0], [2.0], [1.0], [1.0]])[: len(start)]
                torch.testing.assert_close(param.detach(), shared)
            else:
                torch.testing.assert_close(param.detach(), start - steps)
    assert scaler.get_scale() == 1.0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_leave_the_same_parameters_to_torch(how: str) -> None:
    made = []
    for cls in (torch.optim.SGD, TORCHS["SGD"]):
        params = with_shared_memory()
        optimizer = cls(params, lr=0.1, momentum=0.9)
        quietly(train, optimizer, params, range(2))
        # torch's class has no name to be pickled by now.
        is_pickled = how == "pickle" and cls is not TORCHS["SGD"]
        copied = pickle.loads(pickle.dumps(optimizer)) if is_pickled else copy.deepcopy(optimizer)
        copies = copied.param_groups[0]["params"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(copied, copies, range(2, 4))
        made.append(copies)
    assert_as_torchs(*made, {1, 3})


@pytest.mark.usefixtures("installed")
def test_a_parameter_that_comes_to_share_memory_later_is_left_to_torch() -> None:
    made = []
    for cls in (torch.optim.AdamW, TORCHS["AdamW"]):
        params = with_shared_memory()
        optimizer = cls(params, lr=0.1)
        quietly(train, optimizer, params, range(2))
        params[4].data = params[2].data[:3]
        del optimizer.state[params[4]]
        quietly(train, optimizer, params, range(2, 4))
        made.append(params)
    assert_as_torchs(*made, {1, 3})
    torch.testing.assert_close(made[0][2], made[1][2])


@pytest.mark.usefixtures("installed")
def test_torchs_error_leaves_all_parameters_as_they_were() -> None:
    embedding, other = nn.Embedding(4, 3, sparse=True), plain(0)
    optimizer = torch.optim.Adam([other, *embedding.parameters()])
    for _ in range(2):
        before = other.detach().clone()
        embedding(torch.tensor([1])).sum().backward()
        other.grad = torch.ones_like(other)
        with pytest.raises(RuntimeError, match="Adam does not support sparse gradients, please consider SparseAdam"):
            optimizer.step()
        assert torch.equal(other, before)
        assert not optimizer.state
    assert not [line for line in left_to_torch.constructed if PARTLY in line]
    embedding.zero_grad()
    optimizer.step()
    assert list(optimizer.state) == [other]


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:.*sparse")
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_beside_parameters_of_torch(name: str) -> None:
    made = []
    for cls in (getattr(torch.optim, name), TORCHS[name]):
        torch.manual_seed(0)
        embedding = nn.Embedding(8, 3, sparse=True)
        params = [*with_shared_memory(), embedding.weight]
        optimizer = cls(params, lr=0.1)
        for step in range(3):
            set_gradients(params, step)
            embedding.weight.grad = None
            embedding(torch.tensor([1, 2, 1])).square().sum().backward()
            quietly(optimizer.step)
        made.append(params)
    assert_as_torchs(*made, {1, 3, 5})


@pytest.mark.usefixtures("installed")
def test_what_torchs_class_lacks_is_refused_afterwards() -> None:
    params = with_shared_memory()
    optimizer: Any = torch.optim.SGD(params, lr=0.1)
    quietly(train, optimizer, params, range(1))
    model = nn.ParameterList(params)
    with pytest.raises(NotImplementedError, match=r"step_in_backward\(\) steps no parameter by torch's own SGD"):
        optimizer.step_in_backward(model)
    before = [param.detach().clone() for param in params]
    optimizer.zero_grad()
    with (
        pytest.raises(NotImplementedError, match=r"SGD takes torch's steps for 2 parameters, .*max_grad_norm"),
        drivetrain.accumulate(model, optimizer, steps=1, max_grad_norm=1.0) as window,
    ):
        window.backward(torch.stack([param.sum() for param in params]).sum())
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
