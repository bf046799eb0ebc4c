"""Tests our optimizers as torch's test_optim tests torch's, with the inputs that torch ships for it (optim_db).

The tests compare our class with torch's for every class that both have. Muon takes only the constructor and error
inputs, because it steps matrices alone, with bfloat16 products; see test_muon.py. The tests cover:

* every constructor input: the same parameters after several steps, the same entries in state and groups (float32,
  float64, complex64, complex128); with a closure; with transposed and strided parameters and gradients
* every error input: the same exception with the same text, or the same warning
* parameters without gradients, with gradients of zero, empty ones, and ones that get their first gradient late
* param groups with their own lr and weight decay, added later, and their defaults; lr as a tensor
* every lr_scheduler class, on the optimizers with and without momentum
* state_dict: deterministic, saved with torch.save and loaded with weights_only, from and to named parameters, older
  dicts (without newer flags, steps that are numbers), of a float32 model into a float64 one, under another default
  dtype
* deepcopy (public attributes too), pickle, printing
* foreach and fused accepted, alone and in their refused combination

test_optim_db_features.py has hooks, profiles, averages, swaps, compilation and several devices.

Where ours differ from torch's, and why:

* `capturable` changes nothing (torch's classes refuse to step on the CPU with it), and `differentiable` raises
  NotImplementedError: it would be ignored otherwise.
* Sparse gradients raise for options that torch does not have, for example state_bits=8 and max_grad_norm.
* torch.compile leaves the native step outside its graph: fullgraph=True raises, as there is nothing to trace.
* A parameter that is twice in one group raises when it is stepped, after torch's warning at construction: torch updates
  it twice, one after the other; here two threads would do so at once.
* Hyper-parameters that are NaN or infinite raise, also where torch lets them pass (see test_optim_errors.py).
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

from drivetrain.amp import GradScaler
from optim_db_cases import (
    CAPTURABLE,
    ERROR_INPUTS,
    INFOS,
    TOLERANCES,
    WITH_MUON,
    assert_same,
    assert_same_dicts,
    classes,
    every_input,
    make_params,
    names,
    options_of,
    pair,
    references,
    set_grads,
    steps,
)

# ---- Constructor inputs.


@every_input
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_same_steps(name: str, index: int, dtype: torch.dtype) -> None:
    ours, theirs = classes(name)
    if dtype.is_complex and name == "Adafactor":
        return  # test_the_same_errors
    params = make_params(dtype)
    torch_params = references(params)
    # foreach=False keeps torch from choosing foreach, which takes no tensors as lr.
    optimizer = ours(params, **options_of(name, index))
    torch_optimizer = theirs(torch_params, **options_of(name, index), foreach=False)
    steps(6, optimizer, torch_optimizer)
    assert_same(params, torch_params, TOLERANCES[dtype])
    for group in torch_optimizer.param_groups:
        group["foreach"] = None
    assert_same_dicts(optimizer.state_dict(), torch_optimizer.state_dict(), TOLERANCES[dtype])


@every_input
def test_a_closure_moves_towards_its_minimum_as_torchs(name: str, index: int) -> None:
    ours, theirs = classes(name)
    options = options_of(name, index)
    weight, data, bias = torch.randn(10, 5), torch.randn(5), torch.randn(10)
    losses: list[list[float]] = []
    for cls in (ours, theirs):
        own = [t.clone().requires_grad_() for t in (weight, bias)]
        optimizer = cls(own, **copy.deepcopy(options), foreach=False)

        def closure(own: list[Tensor] = own, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (own[0].mv(data) + own[1]).pow(2).sum()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(20)])
        assert torch.is_grad_enabled()
    assert_same(torch.tensor(losses[0]), torch.tensor(losses[1]), {"rtol": 1e-4, "atol": 1e-5})
    assert (losses[0][-1] < losses[0][0]) != bool(options.get("maximize"))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 1],
    "expanded gradient": lambda t: t[:1, :1].expand(t.shape),
}


@names
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_parameter_and_gradient(name: str, layout: str) -> None:
    ours, theirs = classes(name)
    relay = LAYOUTS[layout]
    start = make_params()
    torch_params = references(start)
    params = start if "gradient" in layout else [relay(p.detach()).requires_grad_() for p in start]
    optimizer, torch_optimizer = ours(params), theirs(torch_params)
    for _ in range(3):
        set_grads(params, torch_params)
        for param, torch_param in zip(params, torch_params, strict=True):
            param.grad = relay(param.grad)
            torch_param.grad = param.grad.clone().contiguous()
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params)


@names
@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}])
def test_foreach_and_fused_are_accepted(name: str, flags: dict[str, bool]) -> None:
    ours, theirs = classes(name)
    if next(iter(flags)) not in INFOS[name].supported_impls:
        with pytest.raises(TypeError) as expected:
            theirs(make_params(), **flags)
        with pytest.raises(TypeError, match="unexpected keyword argument") as error:
            ours(make_params(), **flags)
        assert str(error.value) == str(expected.value)
        return
    optimizer, torch_optimizer, params, torch_params = pair(name, **flags)
    assert optimizer.param_groups[0][next(iter(flags))] == next(iter(flags.values()))
    steps(3, optimizer, torch_optimizer)
    assert_same(params, torch_params)


@pytest.mark.parametrize("name", [name for name, info in INFOS.items() if "fused" in info.supported_impls])
def test_foreach_and_fused_together_are_refused_as_by_torch(name: str) -> None:
    messages = []
    for cls in classes(name):
        with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together") as error:
            cls(make_params(), foreach=True, fused=True)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


# ---- Error inputs and refusals.


@pytest.mark.parametrize(("name", "index"), ERROR_INPUTS)
def test_the_same_errors(name: str, index: int) -> None:
    error = WITH_MUON[name].optim_error_inputs_func("cpu", torch.float32)[index]
    given = error.optimizer_error_input
    raised = []
    for cls in classes(name):
        params = copy.deepcopy(given.params)
        if params is None:
            params = [nn.Parameter(torch.randn(1, 1))]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            at_construction = error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
            optimizer = None if at_construction else cls(params, **copy.deepcopy(given.kwargs))
            for param in [] if at_construction else params:
                param.grad = torch.randn_like(param)
            with pytest.raises(error.error_type, match=error.error_regex) as caught:
                cls(params, **copy.deepcopy(given.kwargs)) if optimizer is None else optimizer.step()
        raised.append((caught.type, str(caught.value)))
    (our_type, our_text), (torch_type, torch_text) = raised
    assert our_type == torch_type
    # Our errors name the parameter at a step. Muon's also do at construction, after torch's text.
    assert our_text == torch_text or not at_construction or (name == "Muon" and our_text.startswith(torch_text))


@pytest.mark.parametrize(("name", "options"), CAPTURABLE)
def test_capturable_changes_nothing(name: str, options: dict[str, Any]) -> None:
    params = make_params()
    others = references(params)
    plain = {option: value for option, value in options.items() if option != "capturable"}
    optimizers = [classes(name)[0](params, **copy.deepcopy(options)), classes(name)[0](others, **copy.deepcopy(plain))]
    for _ in range(2):
        for param, other in zip(params, others, strict=True):
            param.grad = torch.randn_like(param)
            other.grad = param.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(param, other) for param, other in zip(params, others, strict=True))


@pytest.mark.parametrize("name", [name for name, info in INFOS.items() if "differentiable" in info.supported_impls])
def test_differentiable_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"drivetrain.optim.{name} does not support differentiable=True"):
        classes(name)[0](make_params(), differentiable=True)


SPARSE = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, {"maximize": True}],
}


@names
def test_sparse_gradients_are_refused(name: str) -> None:
    if name in SPARSE:
        return
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = classes(name)[0](embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="has a sparse gradient, which this optimizer does not support"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad warns about itself.
@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(name, one, id=f"{name}-{one}") for name in SPARSE for one in SPARSE[name]]
)
def test_sparse_gradients_are_stepped_as_by_torch(name: str, options: dict[str, Any], coalesced: bool) -> None:
    """Steps a table with sparse gradients, a table with dense ones, and a layer, as a recommender has them."""
    outcomes, states = [], []
    for cls in classes(name)[:2]:
        torch.manual_seed(0)
        table, dense, layer = nn.Embedding(9, 4, sparse=True), nn.Embedding(5, 4), nn.Linear(4, 3)
        params = [*table.named_parameters("table"), *dense.named_parameters("dense"), *layer.named_parameters("layer")]
        optimizer = cls(params, lr=0.1, **options)
        for step in range(4):
            rows = torch.tensor([1, 1, 3 + step, 8])  # A row occurs twice, so that its gradients must be added up.
            (layer(table(rows)) + layer(dense(rows % 5))).square().sum().backward()
            if coalesced:
                table.weight.grad = table.weight.grad.coalesce()
            if step == 2:
                layer.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append([param.detach() for _, param in params])
        states.append({key: [*state] for key, state in optimizer.state_dict()["state"].items()})
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert states[0] == states[1]


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_gradient_that_cannot_be_stepped_changes_nothing(name: str) -> None:
    ours = classes(name)[0]
    for options, error, says in (
        (
            {"weight_decay": 0.1},
            RuntimeError,
            "parameter 'table.weight' has a sparse gradient, with which weight_decay",
        ),
        ({"state_bits": 8}, NotImplementedError, "parameter 'table.weight' has a sparse gradient, which state_bits=8"),
        ({"max_grad_norm": 1.0}, NotImplementedError, "a gradient is sparse, which neither max_grad_norm"),
    ):
        table, layer = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)
        params = [*table.named_parameters("table"), *layer.named_parameters("layer")]
        optimizer = ours(params, lr=0.1, **options)
        layer(table(torch.tensor([1, 2]))).sum().backward()
        before = [param.detach().clone() for _, param in params]
        with pytest.raises(error, match=says):
            optimizer.step()
        assert all(torch.equal(param, value) for (_, param), value in zip(params, before, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad warns about itself.
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_under_a_scaler(name: str, scaler_class: type[torch.amp.GradScaler]) -> None:
    outcomes = []
    for cls, scaler in (
        (classes(name)[0], scaler_class("cpu", 8.0)),
        (classes(name)[1], torch.amp.GradScaler("cpu", 8.0)),
    ):
        torch.manual_seed(0)
        table = nn.Embedding(9, 4, sparse=True)
        optimizer = cls(table.parameters(), lr=0.1)
        for _ in range(2):
            scaler.scale(table(torch.tensor([1, 2])).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        outcomes.append(table.weight.detach())
    torch.testing.assert_close(*outcomes)


# ---- Choice of the parameters to step.


@every_input
def test_no_gradients_no_step(name: str, index: int) -> None:
    params = make_params()
    before = references(params)
    optimizer = classes(name)[0](params, **options_of(name, index))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert_same(params, before, {"rtol": 0, "atol": 0})
    assert_same(optimizer.state_dict(), state, {"rtol": 0, "atol": 0})


@every_input
def test_zero_gradients_move_what_torch_moves(name: str, index: int) -> None:
    options = options_of(name, index)
    ours, theirs = classes(name)
    params = make_params()
    before, torch_params = references(params), references(params)
    optimizer, torch_optimizer = ours(params, **options_of(name, index)), theirs(torch_params, **options, foreach=False)
    for _ in range(2):
        for param in (*params, *torch_params):
            param.grad = torch.zeros_like(param)
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params)
    if not optimizer.param_groups[0].get("weight_decay") and name != "ASGD":  # ASGD decays by lambd, too.
        assert_same(params, before, {"rtol": 0, "atol": 0})


@names
def test_empty_parameters_and_first_gradients_that_come_late(name: str) -> None:
    ours, theirs = classes(name)
    params = [torch.empty(0, 3).requires_grad_(), *make_params()]
    if name == "Adafactor":
        del params[0]  # torch's Adafactor divides by the number of elements.
    torch_params = references(params)
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer, torch_optimizer = ours(params, **options), theirs(torch_params, **options, foreach=False)
    for step in range(5):
        set_grads(params, torch_params)
        for own in (params, torch_params):
            own[-3].grad = None if step < 2 else own[-3].grad  # The first gradient comes late.
            own[-2].grad = None if step == 3 else own[-2].grad  # One gradient is missing once.
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params)
    assert_same_dicts(
        {**optimizer.state_dict(), "param_groups": []}, {**torch_optimizer.state_dict(), "param_groups": []}
    )


# ---- Groups and learning rates.


@names
def test_groups_have_their_own_lr_and_weight_decay(name: str) -> None:
    ours, theirs = classes(name)
    params = make_params()
    torch_params = references(params)
    made = []
    for cls, (first, second, third) in ((ours, params), (theirs, torch_params)):
        optimizer = cls([{"params": [first]}, {"params": second, "lr": 0.05, "weight_decay": 0.2}], lr=0.01)
        optimizer.add_param_group({"params": third, "lr": 0.1})
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05, 0.1]
        made.append(optimizer)
    steps(4, *made)
    assert_same(params, torch_params)
    assert made[0].state_dict()["param_groups"] == made[1].state_dict()["param_groups"]
    assert made[0].defaults == made[1].defaults


@names
@pytest.mark.parametrize("lr", [torch.tensor(0.01), torch.tensor([0.01]), torch.tensor([[[0.01]]])])
def test_a_tensor_lr_is_read_in_every_step(name: str, lr: Tensor) -> None:
    ours, theirs = classes(name)
    params = make_params()
    torch_params = references(params)
    tensor = lr.clone()
    optimizer, torch_optimizer = ours(params, lr=tensor), theirs(torch_params, lr=0.01)
    for factor in (1.0, 2.0, 0.5):
        tensor.mul_(factor)
        torch_optimizer.param_groups[0]["lr"] *= factor
        steps(1, optimizer, torch_optimizer)
    assert_same(params, torch_params)
    assert optimizer.param_groups[0]["lr"] is tensor


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.1),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.3, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.5, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.5)], milestones=[2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=bool({"momentum", "betas"} & o.param_groups[0].keys())
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 1e-2, total_steps=8, cycle_momentum=bool({"momentum", "betas"} & o.param_groups[0].keys())
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=1e-3, anneal_epochs=3),
}


def test_the_table_has_every_scheduler() -> None:
    assert SCHEDULERS.keys() - {"SWALR"} == set(lr_scheduler.__all__) - {"LRScheduler"}


@names
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers(name: str, scheduler: str, tensor_lr: bool) -> None:
    ours, theirs = classes(name)
    params = make_params()
    torch_params = references(params)
    options = {"momentum": 0.5} if name in ("SGD", "RMSprop") else {}
    made = [
        cls(own, lr=torch.tensor(0.01) if tensor_lr else 0.01, **options, foreach=False)
        for cls, own in ((ours, params), (theirs, torch_params))
    ]
    schedulers = [SCHEDULERS[scheduler](each) for each in made]
    for step in range(7):
        steps(1, *made)
        for each in schedulers:
            each.step(*([1.0 + step] if scheduler == "ReduceLROnPlateau" else []))
        assert made[0].param_groups[0]["lr"] == made[1].param_groups[0]["lr"]
    assert_same(params, torch_params)


# ---- State dicts.


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_input
def test_a_saved_state_goes_on_as_if_nothing_had_been(name: str, index: int) -> None:
    ours, _ = classes(name)
    params = make_params()
    optimizer = ours(params, **options_of(name, index))
    steps(3, optimizer)
    assert_same(optimizer.state_dict(), optimizer.state_dict(), {"rtol": 0, "atol": 0})
    others = references(params)
    other = ours(others, **options_of(name, index))
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    steps(3, optimizer, other)
    assert_same(params, others, {"rtol": 0, "atol": 0})
    assert_same(optimizer.state_dict(), other.state_dict(), {"rtol": 0, "atol": 0})


@every_input
def test_older_state_dicts_load(name: str, index: int) -> None:
    """Loads dicts that lack the newer flags and have numbers as steps."""
    ours, _ = classes(name)
    params = make_params()
    options = {**options_of(name, index), "maximize": False}
    if "lr" in options:
        options["lr"] = float(options["lr"])
    optimizer = ours(params, **options)
    steps(3, optimizer)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in INFOS[name].not_og_supported_flags:
            group.pop(flag, None)
    for state in old["state"].values():
        if "step" in state:
            state["step"] = state["step"].item()
    others = references(params)
    other = ours(others, **options)
    other.load_state_dict(old)
    steps(3, optimizer, other)
    assert_same(params, others, {"rtol": 0, "atol": 0})


@names
@pytest.mark.parametrize("saved_named", [False, True])
@pytest.mark.parametrize("loaded_named", [False, True])
def test_named_parameters(name: str, saved_named: bool, loaded_named: bool) -> None:
    states = []
    for cls in classes(name):
        torch.manual_seed(1)
        model, other = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizer = cls(model.named_parameters() if saved_named else model.parameters())
        assert ("param_names" in optimizer.param_groups[0]) == saved_named
        steps(2, optimizer)
        loading = cls(other.named_parameters() if loaded_named else other.parameters())
        loading.load_state_dict(through_a_file(optimizer.state_dict()))
        steps(1, loading)
        states.append(loading.state_dict())
    assert_same_dicts(*states)


@names
def test_float32_state_into_a_float64_model(name: str) -> None:
    """Our optimizer keeps the saved dtype (see load_state_dict) and continues from the same values."""
    optimizer, torch_optimizer, params, torch_params = pair(name)
    steps(2, optimizer, torch_optimizer)
    wide, torch_wide = ([p.detach().double().requires_grad_() for p in own] for own in (params, torch_params))
    ours, theirs = classes(name)
    other, torch_other = ours(wide), theirs(torch_wide)
    other.load_state_dict(optimizer.state_dict())
    torch_other.load_state_dict(torch_optimizer.state_dict())
    steps(2, other, torch_other)
    assert_same(wide, torch_wide)


@names
def test_another_default_dtype(name: str) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        ours, theirs = classes(name)
        params = [torch.randn(5, 3).requires_grad_()]
        torch_params = references(params)
        optimizer, torch_optimizer = ours(params), theirs(torch_params)
        steps(3, optimizer, torch_optimizer)
        assert_same_dicts(optimizer.state_dict(), torch_optimizer.state_dict(), TOLERANCES[torch.float64])
    finally:
        torch.set_default_dtype(before)


@names
def test_deepcopy_and_pickle(name: str) -> None:
    optimizer, torch_optimizer, *_ = pair(name)
    steps(2, optimizer, torch_optimizer)
    public = {n for n in vars(torch_optimizer) if not n.startswith("_")}
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert public <= vars(clone).keys()
        assert_same(clone.state_dict(), optimizer.state_dict(), {"rtol": 0, "atol": 0})
        steps(1, clone)
        assert all(int(state["step"]) == 3 for state in clone.state.values() if "step" in state)
    assert repr(optimizer) == repr(torch_optimizer)
