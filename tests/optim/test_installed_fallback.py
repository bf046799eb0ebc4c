"""Tests that install(optim=True) breaks nothing: torch's own step takes over where ours cannot step."""

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
STAYS = "stays torch's own class"


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


ODD: dict[str, tuple[Callable[[], list[nn.Parameter]], str]] = {
    "shared": (with_shared_memory, r"parameter 1 of .* and parameter 3 of .* share memory"),
    "wrapper": (with_a_wrapper, r"parameter 1 of .* subclass that wraps others \(a Scaled\)"),
    "meta": (with_a_meta_parameter, r"parameter 1 of .* is on meta"),
    "twice": (with_one_twice, r"parameter 3 of .* is in its group twice"),
}
CLASSES = {
    "meta": [name for name in TORCHS if name not in ("ASGD", "Adafactor", "Muon")],  # under torch, too
    "twice": ["AdamW", "Muon"],  # the same way as where memory is shared
}


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for index, param in enumerate(params):
            values = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))
            param.grad = values.to(param.device)
        optimizer.step()


def value(param: Tensor) -> Tensor:
    data = param.detach()
    return data.value() if isinstance(data, Scaled) else data


def assert_equal(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.is_meta or torch.equal(value(a), value(b)), index


def layout(optimizer: torch.optim.Optimizer) -> Any:
    """Returns a state dict's keys in their order, with the kinds of its values."""
    saved = optimizer.state_dict()
    states = [
        (key, [(name, type(entry), getattr(entry, "dtype", None)) for name, entry in state.items()])
        for key, state in saved["state"].items()
    ]
    return states, saved["param_groups"]


def said() -> list[str]:
    """Returns the lines of the exit report about optimizers that torch's class steps."""
    return [line for line in left_to_torch.constructed if STAYS in line]


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(("name", "odd"), [(n, o) for o in ODD for n in CLASSES.get(o, TORCHS)])
def test_what_only_torch_can_step_is_stepped_by_torch(name: str, odd: str) -> None:
    make, message = ODD[odd]
    ours, theirs = make(), make()
    torchs = TORCHS[name](theirs, lr=0.05)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        mine = getattr(torch.optim, name)(ours, lr=0.05)
        train(mine, ours, range(3))
    warnings_of_ours = [str(each.message) for each in warned if STAYS in str(each.message)]
    assert len(warnings_of_ours) == 1  # of three steps
    assert said() == warnings_of_ours
    assert re.match(f"torch.optim.{name} {STAYS}: {message}", said()[0]), said()
    assert type(mine) is (type(torchs) if odd == "wrapper" else getattr(optim, name))
    train(torchs, theirs, range(3))
    assert_equal(ours, theirs)
    assert layout(mine) == layout(torchs)
    # State dicts go both ways, and training goes on.
    if odd != "meta":
        saved = copy.deepcopy(mine.state_dict()), copy.deepcopy(torchs.state_dict())
        mine.load_state_dict(saved[1])
        torchs.load_state_dict(saved[0])
        train(mine, ours, range(3, 5))
        train(torchs, theirs, range(3, 5))
        assert_equal(ours, theirs)
        assert layout(mine) == layout(torchs)
    assert odd == "wrapper" or mine.report().num_elements > 0


@pytest.mark.usefixtures("installed")
def test_frozen_parameters_do_not_matter() -> None:
    frozen, param = scaled().requires_grad_(False), plain(0)
    optimizer = torch.optim.AdamW([frozen, param])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert list(optimizer.state) == [param]
    assert not said()


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
            if step == 2:
                optimizer.add_param_group({"params": [params[5]], "lr": 0.3})
            optimizer.zero_grad()
            quietly(train, optimizer, params[:4] if step == 1 else params, range(step, step + 1))
            scheduler.step()
        assert called == ["pre", "post"] * 4
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        made.append((optimizer, params))
    (mine, ours), (torchs, theirs) = made
    assert_equal(ours, theirs)
    assert layout(mine) == layout(torchs)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_training_goes_on_where_our_steps_end(name: str) -> None:
    """Keeps the states, the scheduler's wrapped step and hooks, which run once per step."""
    ours, theirs = ([nn.Parameter(torch.ones(4, 3))] for _ in range(2))
    mine = getattr(torch.optim, name)(ours, lr=0.1, weight_decay=0.1)
    torchs = TORCHS[name](theirs, lr=0.1, weight_decay=0.1)
    hooked = []
    for optimizer, params in ((mine, ours), (torchs, theirs)):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.register_step_pre_hook(lambda *_: hooked.append("pre"))
        optimizer.register_step_post_hook(lambda *_: hooked.append("post"))
        train(optimizer, params, range(3))
        scheduler.step()
        view = nn.Parameter(params[0].data[:2])
        params.append(view)
        quietly(optimizer.add_param_group, {"params": [view], "lr": -0.1})  # torch does not check it here
        quietly(train, optimizer, params, range(3))
        scheduler.step()
        quietly(train, optimizer, params, range(3))
    assert hooked == ["pre", "post"] * 18
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert mine.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # torch's SGD
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "ASGD"])
def test_differentiable_steps(name: str) -> None:
    def gradients(cls: type[torch.optim.Optimizer]) -> list[Tensor | None]:
        param, lr = torch.full((3,), 2.0, requires_grad=True), torch.tensor(0.1, requires_grad=True)
        stepped = param.clone()
        optimizer = cls([stepped], lr=lr, differentiable=True)  # type: ignore[call-arg]
        stepped.grad = param.square()
        optimizer.step()
        stepped.sum().backward()
        return [param.grad, lr.grad]

    with pytest.warns(UserWarning, match=f"torch.optim.{name} {STAYS}: .*differentiable=True"):
        ours = gradients(getattr(torch.optim, name))
    expected = gradients(TORCHS[name])
    assert expected[0] is not None
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)  # torch's ASGD does not differentiate by lr
        if a is not None and b is not None:
            assert torch.equal(a, b)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_stay_torchs_too(how: str) -> None:
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
    assert_equal(*made)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("overflows", [1, 2])
def test_a_scaler_skips_all_parameters_after_an_overflow_in_any(fused: bool, clips: bool, overflows: int) -> None:
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
    assert_equal(*made)


@pytest.mark.usefixtures("installed")
def test_torchs_errors_are_torchs() -> None:
    embedding, other = nn.Embedding(4, 3, sparse=True), plain(0)
    optimizer = torch.optim.Adam([other, *embedding.parameters()])
    for _ in range(2):
        before = other.detach().clone()
        embedding(torch.tensor([1])).sum().backward()
        other.grad = torch.ones_like(other)
        with pytest.raises(RuntimeError, match="Adam does not support sparse gradients, please consider SparseAdam"):
            optimizer.step()
        assert torch.equal(other, before)
    assert not said()
    embedding.zero_grad()
    optimizer.step()
    assert list(optimizer.state) == [other]


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:.*sparse")
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_in_torchs_steps(name: str) -> None:
    made = []
    for cls in (getattr(torch.optim, name), TORCHS[name]):
        torch.manual_seed(0)
        embedding = nn.Embedding(8, 3, sparse=True)
        params = [*with_shared_memory(), embedding.weight]
        optimizer = cls(params, lr=0.1)
        for step in range(3):
            embedding(torch.tensor([1, 2, 1])).square().sum().backward()
            sparse_grad, embedding.weight.grad = embedding.weight.grad, None
            for param in params[:-1]:
                param.grad = torch.full_like(param, step - 0.5)
            embedding.weight.grad = sparse_grad
            quietly(optimizer.step)
        made.append(params)
    assert_equal(*made)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("given", ["Adam", "AdamW", "NAdam", "RAdam"])
@pytest.mark.parametrize("taken", ["Adam", "AdamW", "NAdam", "RAdam"])
def test_states_of_related_classes_are_taken_as_by_torch(given: str, taken: str) -> None:
    made = []
    for classes in ({name: getattr(torch.optim, name) for name in TORCHS}, TORCHS):
        params = [plain(0), plain(1)]
        first = classes[given](params, lr=0.01)
        train(first, params, range(2))
        second = classes[taken](params, lr=0.01)
        try:
            second.load_state_dict(first.state_dict())
            train(second, params, range(2, 4))
        except (KeyError, ValueError):  # a later step of torch's, or the load of ours
            params = []
        made.append(params)
    assert len(made[0]) == len(made[1])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs)


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
        pytest.raises(NotImplementedError, match=r"SGD takes torch's steps, .*max_grad_norm"),
        drivetrain.accumulate(model, optimizer, steps=1, max_grad_norm=1.0) as window,
    ):
        window.backward(torch.stack([param.sum() for param in params]).sum())
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"state_bits": 16}, {"zero_grads_in_step": True}])
def test_options_that_torch_lacks_keep_our_errors(options: dict[str, Any]) -> None:
    params = with_shared_memory()
    optimizer = torch.optim.AdamW(params, **options)
    with pytest.raises(ValueError, match="share memory"):
        train(optimizer, params, range(1))


def test_without_install_our_classes_raise() -> None:
    params = with_shared_memory()
    with pytest.raises(ValueError, match="share memory"):
        train(drivetrain.optim.SGD(params), params, range(1))
    with pytest.raises(NotImplementedError, match="differentiable=True"):
        drivetrain.optim.SGD(params, differentiable=True)
