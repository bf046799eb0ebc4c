"""Tests what scripts keep in an optimizer's groups and state besides its own entries, and what they give as groups."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import ENGINES, assert_as_torch
from torch import nn

from drivetrain import optim as ours
from effort import covering

engines = pytest.mark.parametrize("name", ENGINES)


def params(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(1.0, 4 + i)) for i in range(count)]


def train(optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, step + 1.0)
        optimizer.step()


def values_of(optimizer: Any) -> list[Any]:
    return [[param.detach().clone() for param in group["params"]] for group in optimizer.param_groups]


CLASSES = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop", "ASGD"]
KEYS = ["rho", "clip", "lr_decay", "warmup_steps", "alpha", "eps", "always_adapt", "name", "t0", "momentum_decay"]


@engines
@pytest.mark.parametrize("kind", CLASSES)
def test_a_dict_without_the_keys_of_a_wrapper(name: str, kind: str) -> None:
    """As timm's Lookahead loads the dict of its base: its own options are among the defaults and in the groups."""

    def script(optim: Any) -> Any:
        saved = getattr(optim, kind)(params(), lr=0.1)
        train(saved)
        loaded = getattr(optim, kind)(params(), lr=0.1)
        loaded.defaults.update(lookahead_alpha=0.5)
        loaded.param_groups[0]["lookahead_alpha"] = 0.5
        loaded.load_state_dict(saved.state_dict())
        train(loaded)
        return values_of(loaded), loaded.param_groups[0].get("lookahead_alpha")

    assert_as_torch(name, script)


WHENS = ("constructor", "later", "only the saved one")


@pytest.mark.parametrize(("kind", "name", "when"), covering(2, CLASSES, list(ENGINES), WHENS))
def test_groups_with_a_scripts_keys(name: str, kind: str, when: str) -> None:
    """The key is in both optimizers' groups, or only in those of the one that is saved."""

    def script(key: str) -> Callable[[Any], Any]:
        def run(optim: Any) -> Any:
            def make(with_key: bool) -> Any:
                own = key in getattr(optim, kind)(params()).defaults
                value: Any = () if own else (("x" if key == "name" else 0.25),)
                at_once = with_key and value and when == "constructor"
                made = getattr(optim, kind)([{"params": params(), **({key: value[0]} if at_once else {})}], lr=0.1)
                if with_key and value and when == "later":
                    made.param_groups[0][key] = value[0]
                return made

            first, second = make(True), make(when != "only the saved one")
            if when == "only the saved one":
                first.param_groups[0].setdefault(key, 0.25)
            train(first)
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            file.seek(0)
            second.load_state_dict(torch.load(file))
            train(second)
            return values_of(second), second.param_groups[0].get(key)

        return run

    # The last key makes a group NAdam's, which our classes refuse.
    assert_as_torch(name, *map(script, KEYS[:-1] if when == "only the saved one" else KEYS))


@engines
def test_sam_around_a_base_optimizer(name: str) -> None:
    def script(optim: Any) -> Any:
        class Sam(torch.optim.Optimizer):
            def __init__(self, of: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
                super().__init__(of, {"rho": rho, **options})
                self.base = base(self.param_groups, **options)
                self.param_groups = self.base.param_groups

            def step(self, closure: Any = None) -> None:
                self.base.step()

        optimizer = Sam(params(), optim.SGD, lr=0.1, momentum=0.9)
        train(optimizer)
        optimizer.base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
        train(optimizer)
        return values_of(optimizer)

    assert_as_torch(name, script)


FLAGS = ["amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"]


@engines
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_dicts_without_flags(name: str, kind: str) -> None:
    """As older versions of torch wrote them, and transformers' former AdamW."""

    def script(optim: Any) -> Any:
        first, second = (getattr(optim, kind)(params(), lr=0.1) for _ in range(2))
        train(first)
        saved = first.state_dict()
        for flag in FLAGS:
            del saved["param_groups"][0][flag]
        second.load_state_dict(saved)
        train(second)
        return values_of(second), second.param_groups[0]["amsgrad"]

    if kind == "AdamW":  # torch fills in a decay that is not decoupled, and so do we.
        assert_as_torch(name, lambda optim: script(optim)[1])
    else:
        assert_as_torch(name, script)


@pytest.mark.parametrize("kind", ["Lion", "LAMB", "ADOPT", "AdamWScheduleFree"])
def test_dicts_of_other_packages_lack_flags(kind: str) -> None:
    first, second, third = (getattr(ours, kind)(params(), lr=0.1) for _ in range(3))
    train(first)
    whole = copy.deepcopy(first.state_dict())
    saved = copy.deepcopy(whole)
    for flag in [key for key, value in saved["param_groups"][0].items() if key in FLAGS]:
        del saved["param_groups"][0][flag]
    second.load_state_dict(saved)
    third.load_state_dict(whole)
    assert second.param_groups[0].keys() == third.param_groups[0].keys()
    train(second)
    train(third)
    for a, b in zip(values_of(second)[0], values_of(third)[0], strict=True):
        assert torch.equal(a, b)


@engines
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_state_under_names(name: str, way: str) -> None:
    """Mechanic and others keep a dict of their own, and scripts an epoch or a loss."""

    def script(optim: Any) -> Any:
        optimizer = optim.Adam(params(), lr=0.1)
        optimizer.state["epoch"] = 3
        optimizer.state["losses"] = [1.0, 0.5]
        optimizer.state["best"] = None
        optimizer.state["_mechanic"] = {"s": torch.ones(3), "iter": 2}
        train(optimizer)
        if way == "state_dict":
            other = optim.Adam(params(), lr=0.1)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        train(other)
        return values_of(other), {key: value for key, value in other.state.items() if isinstance(key, str)}

    assert_as_torch(name, script)


def test_a_report_and_a_dict_for_torch_with_a_state_under_a_name() -> None:
    optimizer = ours.Adam(params(), lr=0.1)
    train(optimizer)
    before = optimizer.report().bytes
    optimizer.state["epoch"] = 3
    optimizer.state[optimizer.param_groups[0]["params"][0]]["note"] = 4
    assert optimizer.report().bytes == before
    assert optimizer.torch_state_dict()["state"]["epoch"] == 3


COLLECTIONS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "tuple": tuple,
    "ParameterList": nn.ParameterList,
    "values of a dict": lambda given: dict(enumerate(given)).values(),
    "keys of a dict": dict.fromkeys,
}


@engines
@pytest.mark.parametrize("what", COLLECTIONS)
@pytest.mark.parametrize("when", ["constructor", "later"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adafactor"])
def test_parameters_in_other_collections(name: str, what: str, when: str, kind: str) -> None:
    def script(optim: Any) -> Any:
        given = params()
        start = COLLECTIONS[what](given) if when == "constructor" else given
        optimizer = getattr(optim, kind)([{"params": start}], lr=0.1)
        if when == "later":
            optimizer.param_groups[0]["params"] = COLLECTIONS[what](given)
        train(optimizer)
        optimizer.zero_grad(set_to_none=False)
        saved = optimizer.state_dict()["param_groups"][0]["params"]
        return [param.detach() for param in given], [param.grad for param in given], saved

    assert_as_torch(name, script)


@engines
def test_a_scalers_flags_in_a_dict(name: str) -> None:
    def script(optim: Any) -> Any:
        given = params()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = optim.SGD(given, lr=0.1)
        scaler.scale((given[0] * torch.inf).sum()).backward()
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        copies = [dict(found), {**found}, found.copy(), copy.deepcopy(found), pickle.loads(pickle.dumps(found))]
        return [{str(key): value for key, value in each.items()} for each in copies]

    assert_as_torch(name, script)


@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "AdamW"])
def test_a_step_in_a_whole_graph_says_what_to_do(kind: str) -> None:
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = getattr(ours, kind)([param], lr=0.1)
    param.grad = torch.ones(4, 3)
    with pytest.raises(Exception, match=r"call step\(\) outside of the function that torch.compile\(fullgraph=True\)"):
        torch.compile(lambda: optimizer.step(), fullgraph=True, backend="eager")()
    before = param.detach().clone()
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert not torch.equal(param, before)
