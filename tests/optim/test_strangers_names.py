"""Tests subclasses, attributes and proxies of scripts that nobody wrote for drivetrain's optimizers."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from engines import ENGINES, assert_as_torch, engine
from torch import nn

from drivetrain import optim as ours
from drivetrain.optim.kept import kept_of
from drivetrain.optim.rule import torchs_base

engines = pytest.mark.parametrize("name", ENGINES)
NAMES = (
    *("_step", "_params", "_counts", "_result", "_reader", "_options", "_rule", "_precision", "_shards", "_states"),
    *("_loading", "_hypers", "_last_look", "_refused", "_scalar", "_description", "_gathers", "kept", "rule", "engine"),
    *("grad_norm", "last_step_skipped", "is_on_cpu", "report", "in_backward", "step_groups", "torch_state_dict"),
)


def train(optimizer: Any, param: nn.Parameter, steps: int = 3) -> list[Any]:
    for step in range(steps):
        param.grad = torch.tensor([1.0, -2.0, 0.5, 3.0]) * (step + 1)
        optimizer.step()
    return [param.detach().clone()]


def new_param() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))


@engines
@pytest.mark.parametrize("value", [0, None, {}, "x"])
def test_a_scripts_attributes(name: str, value: Any) -> None:
    def script(optim: Any) -> Any:
        results = {}
        for attribute in NAMES:
            param = new_param()
            optimizer = optim.AdamW([param], lr=0.1)
            train(optimizer, param, 1)
            setattr(optimizer, attribute, value)
            results[attribute] = train(optimizer, param), getattr(optimizer, attribute)
        return results

    assert_as_torch(name, script)


@engines
def test_a_subclasss_methods(name: str) -> None:
    def mine(self: Any, group: Any) -> Any:
        raise AssertionError

    def script(optim: Any) -> Any:
        results = {}
        for attribute in NAMES:
            param = new_param()
            optimizer = type("Mine", (optim.SGD,), {attribute: mine})([param], lr=0.1, momentum=0.9)
            results[attribute] = train(optimizer, param)
        return results

    assert_as_torch(name, script)


@engines
@pytest.mark.parametrize("attribute", ["state", "param_groups"])
def test_a_subclass_with_a_property_of_torchs_attribute(name: str, attribute: str) -> None:
    def script(optim: Any) -> Any:
        def get(self: Any) -> Any:
            return self.mine

        def put(self: Any, value: Any) -> None:
            self.mine = value

        param = new_param()
        optimizer = type("Mine", (optim.SGD,), {attribute: property(get, put)})([param], lr=0.1, momentum=0.9)
        return train(optimizer, param)

    assert_as_torch(name, script)


@pytest.mark.parametrize("value", [-1, 0.1, None])
@pytest.mark.parametrize("when", ["before", "after"])
def test_options_of_our_classes_are_the_scripts_in_torchs_place(value: Any, when: str) -> None:
    def script(optim: Any) -> Any:
        class Clip(optim.Adam):  # type: ignore[misc]
            def __init__(self, params: Any) -> None:
                if when == "before":
                    self.max_grad_norm = self.zero_grads_in_step = value
                super().__init__(params, lr=0.1)
                self.max_grad_norm = self.zero_grads_in_step = value

        param = new_param()
        optimizer = Clip([param])
        return train(optimizer, param), param.grad, optimizer.max_grad_norm, optimizer.zero_grads_in_step

    assert_as_torch("install", script)


def test_options_that_the_constructor_got_stay_options_in_torchs_place() -> None:
    with engine("install") as optim:
        param = new_param()
        optimizer = optim.SGD([param], lr=0.1, max_grad_norm=1.0)
        optimizer.max_grad_norm = 0.5
        train(optimizer, param, 1)
        assert param.grad is not None
        assert float(param.grad.norm()) == pytest.approx(0.5, rel=1e-4)


def test_keys_of_our_formats_are_the_scripts_in_torchs_place() -> None:
    def script(optim: Any) -> Any:
        param = new_param()
        optimizer = optim.SGD([{"params": [param], "state_bits": 4, "rounding": 0.5}], lr=0.1, momentum=0.9)
        train(optimizer, param)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return train(optimizer, param), list(optimizer.state_dict()["param_groups"][0])

    assert_as_torch("install", script)


@engines
@pytest.mark.filterwarnings("ignore:.*stays torch's own class")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop", "Adagrad", "NAdam", "Adadelta"])
@pytest.mark.parametrize("where", ["subclass", "object"])
def test_replaced_internals_are_called(name: str, kind: str, where: str) -> None:
    def script(optim: Any) -> Any:
        def init_group(self: Any, group: Any, *lists: Any, **options: Any) -> Any:
            result = getattr(torchs, kind)._init_group(self, group, *lists, **options)
            grads = lists[1]
            grads[:] = [grad.abs() for grad in grads]
            return result

        torchs = torch.optim
        cls, param = getattr(optim, kind), new_param()
        if where == "subclass":
            cls = type("Mine", (cls,), {"_init_group": init_group})
        optimizer = cls([param], lr=0.1)
        if where == "object":
            optimizer._init_group = init_group.__get__(optimizer)
        return train(optimizer, param)

    assert_as_torch(name, script)


def test_methods_that_torch_compile_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("install") as optim:
        param = new_param()
        optimizer = optim.SGD([param], lr=0.1)
        train(optimizer, param, 1)
        monkeypatch.setattr(torchs_base(optim.SGD), "_init_group", lambda *_: None)
        train(optimizer, param, 1)
        monkeypatch.undo()
        assert optim.SGD is ours.SGD  # so that torch.compile() finds ours under torch's name
        for cls in (ours.SGD, torchs_base(optim.SGD), ours.SGD):
            monkeypatch.setattr(cls, "_init_group", torch._dynamo.disable(cls._init_group))
            train(optimizer, param, 1)
            assert not kept_of(optimizer).steps_as_torch


def test_replaced_internals_and_options_of_ours() -> None:
    param = new_param()
    mine = type("Mine", (ours.SGD,), {"_init_group": lambda *_: None})
    with pytest.raises(NotImplementedError, match="Mine replaces _init_group"):
        train(mine([param], lr=0.1, max_grad_norm=1.0), param)


@engines
@pytest.mark.parametrize("way", ["past the class", "base", "borrowed"])
def test_other_ways_to_construct(name: str, way: str) -> None:
    def script(optim: Any) -> Any:
        class Past(optim.SGD):  # type: ignore[misc]
            def __init__(self, params: Any) -> None:
                options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
                options |= {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
                if way == "base":
                    torch.optim.Optimizer.__init__(self, params, options)
                else:
                    super(optim.SGD, self).__init__(params, options)
                self.defaults["mine"] = 1

        class Borrowed(torch.optim.Optimizer):
            step = optim.SGD.step
            _init_group = optim.SGD._init_group

            def __init__(self, params: Any) -> None:
                super().__init__(params, {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0})
                for group in self.param_groups:
                    group.update(nesterov=False, maximize=False, foreach=None, differentiable=False, fused=None)

        param = new_param()
        optimizer = Borrowed([param]) if way == "borrowed" else Past([param])
        train(optimizer, param)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return train(optimizer, param)

    assert_as_torch(name, script)


@engines
def test_copies_of_an_optimizers_attributes(name: str) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.__dict__.update(optimizer.__dict__)

    def script(optim: Any) -> Any:
        param = new_param()
        optimizer = optim.SGD([param], lr=0.1, momentum=0.9)
        train(optimizer, param)
        copied = [copy.deepcopy(vars(optimizer)), vars(copy.deepcopy(Wrapper(optimizer)))]
        copied.append(pickle.loads(pickle.dumps(vars(optimizer))))
        return [list(each["state"].values()) for each in copied]

    assert_as_torch(name, script)


def proxy_of(framework: str, optimizer: torch.optim.Optimizer) -> Any:
    """Returns the object that a framework gives to scripts in place of their optimizer."""
    if framework == "Lightning":
        return pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer)
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    strategies = pytest.importorskip("lightning.fabric.strategies")
    return wrappers._FabricOptimizer(optimizer, strategies.SingleDeviceStrategy(torch.device("cpu")))


frameworks = pytest.mark.parametrize("framework", ["Fabric", "Lightning"])


@frameworks
def test_proxies_share_options_and_results(framework: str) -> None:
    param = new_param()
    optimizer = ours.SGD([param], lr=0.1, max_grad_norm=100.0)
    proxy = proxy_of(framework, optimizer)
    stepped: Any = proxy if framework == "Fabric" else optimizer  # A step of Lightning's proxy needs a Trainer.
    train(stepped, param, 1)
    assert proxy.grad_norm == optimizer.grad_norm != None  # noqa: E711
    proxy.max_grad_norm = 0.5
    assert optimizer.max_grad_norm == 0.5
    train(stepped, param, 1)
    assert param.grad is not None
    assert float(param.grad.norm()) == pytest.approx(0.5, rel=1e-4)
    param.grad.fill_(torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stepped.step()
    assert proxy.last_step_skipped
    counts = proxy.report().counts
    assert (counts.steps, counts.skipped) == (2, 1)


@frameworks
def test_proxies_add_groups_with_the_formats(framework: str) -> None:
    optimizer = ours.AdamW([new_param()], lr=0.1, state_bits=16)
    proxy_of(framework, optimizer).add_param_group({"params": [new_param()]})
    assert optimizer.param_groups[1]["state_bits"] == 16
