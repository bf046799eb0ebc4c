"""Tests bad input to optimizers: errors name the parameter or argument, and leave every bit unchanged."""

import copy
import gc
import inspect
import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from drivetrain import _C, DistributedDataParallel, optim
from drivetrain.ddp import parameter_names
from drivetrain.optim import declaration
from drivetrain.optim.base import FusedOptimizer
from drivetrain.optim.declaration import StepOptions
from drivetrain.optim.precision import VERSION, VERSION_NAME
from optim_cases import OWN_CLASSES

CLASSES = {
    "SGD": (optim.SGD, {"momentum": 0.9}),
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {}),
    "Adagrad": (optim.Adagrad, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "RAdam": (optim.RAdam, {}),
    "NAdam": (optim.NAdam, {}),
    "ASGD": (optim.ASGD, {}),
    "Rprop": (optim.Rprop, {}),
    "ADOPT": (optim.ADOPT, {}),
    "AdamWScheduleFree": (optim.AdamWScheduleFree, {}),
    "Lion": (optim.Lion, {}),
    "LAMB": (optim.LAMB, {}),
}
classes = pytest.mark.parametrize("name", CLASSES)

# Bad values of hyper-parameters, and the expectation that the error states.
NOT_NEGATIVE = ([-1.0, math.nan, math.inf], "a finite number, 0 or above")
BELOW_ONE = ([(-0.1, 0.9), (1.0, 0.9), (math.nan, 0.9)], "a number of at least 0 and below 1")
FROM_0_TO_1 = ([-0.1, 1.1, math.nan], "a number from 0 to 1")
FINITE = ([math.nan, math.inf], "a finite number")
BELOW_AND_ABOVE_ONE = ([(0.0, 1.2), (1.0, 1.2), (math.nan, 1.2)], "a number above 0 and below 1")
TWO_FINITE = ([(math.nan, 1.0), (-math.inf, 1.0)], "a finite number")
FIRST = {name: rf"{name}\[0\] is" for name in ("betas", "etas", "step_sizes")}
BAD: list[Any] = [
    pytest.param(name, hyper, value, expected, id=f"{name}-{hyper}-{value}")
    for name, hypers in {
        "SGD": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "momentum": NOT_NEGATIVE},
        "Adam": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "betas": BELOW_ONE},
        "AdamW": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "betas": BELOW_ONE},
        "Adagrad": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "lr_decay": NOT_NEGATIVE},
        "RMSprop": {"lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "alpha": NOT_NEGATIVE, "momentum": NOT_NEGATIVE},
        "Adadelta": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "rho": FROM_0_TO_1},
        "Adamax": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "betas": BELOW_ONE},
        "RAdam": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "betas": BELOW_ONE},
        "NAdam": {"lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "betas": BELOW_ONE, "momentum_decay": NOT_NEGATIVE},
        "ASGD": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "lambd": FINITE, "alpha": FINITE, "t0": FINITE},
        "Rprop": {"lr": NOT_NEGATIVE, "etas": BELOW_AND_ABOVE_ONE, "step_sizes": TWO_FINITE},
        "ADOPT": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "betas": BELOW_ONE},
        "AdamWScheduleFree": {"lr": NOT_NEGATIVE, "warmup_steps": NOT_NEGATIVE, "r": FINITE, "betas": BELOW_ONE},
        "Lion": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "betas": BELOW_ONE},
        "LAMB": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "betas": BELOW_ONE},
    }.items()
    for hyper, (values, expected) in hypers.items()
    for value in values
]


def make(name: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, list[Tensor]]:
    """Returns an optimizer after two steps over two named groups, with gradients for a third step."""
    cls, own = CLASSES[name]
    params = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((20, 30), (7,), (5, 300))]
    groups = [{"params": [("first", params[0])]}, {"params": [("second", params[1]), ("third", params[2])]}]
    optimizer = cls(groups, **own, **options)
    for _ in range(2):
        set_grads(params)
        optimizer.step()
    set_grads(params)
    return optimizer, params


def set_grads(params: list[Tensor]) -> None:
    for param in params:
        param.grad = torch.randn_like(param)


def bits(optimizer: Any) -> Any:
    """Copies everything that a failed call must not change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy(
        [
            [(p.detach(), p.grad) for p in params],
            [dict(optimizer.state[p]) if p in optimizer.state else None for p in params],
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
            len(optimizer.state),
        ]
    )


def same(a: Any, b: Any) -> bool:
    """Returns whether nested containers are equal, and their tensors bit by bit."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_fails(call: Callable[[], Any], optimizer: Any, error: type[Exception], match: str) -> None:
    before = bits(optimizer)
    with pytest.raises(error, match=match):
        call()
    assert same(bits(optimizer), before)


# ---- Hyper-parameters.


@pytest.mark.parametrize(("name", "hyper", "value", "expected"), BAD)
def test_in_the_constructor(name: str, hyper: str, value: Any, expected: str) -> None:
    cls, _ = CLASSES[name]
    params = [torch.zeros(3).requires_grad_()]
    with pytest.raises(ValueError, match=r"Invalid|expected"):
        cls(params, **{hyper: value})
    with pytest.raises(ValueError, match=rf"param_groups\[0\]: {hyper}.*, expected {expected}"):
        cls([{"params": params, hyper: value}])


@pytest.mark.parametrize(("name", "hyper", "value", "expected"), BAD)
def test_written_into_a_group(name: str, hyper: str, value: Any, expected: str) -> None:
    optimizer, _ = make(name)
    good = optimizer.param_groups[1][hyper]
    optimizer.param_groups[1][hyper] = value
    shown = FIRST.get(hyper, f"{hyper} is")
    assert_fails(optimizer.step, optimizer, ValueError, rf"param_groups\[1\]: {shown} .*, expected {expected}")
    optimizer.param_groups[1][hyper] = good
    optimizer.step()


@classes
def test_text_in_the_constructor(name: str) -> None:
    """YAML reads 1e-3 as text."""
    cls, _ = CLASSES[name]
    with pytest.raises(TypeError, match=r"^lr is '1e-3', expected a number$"):
        cls([torch.zeros(3).requires_grad_()], lr="1e-3")


@classes
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_bad_lr_in_a_tensor(name: str, value: float) -> None:
    cls, _ = CLASSES[name]
    with pytest.raises(ValueError, match=r"Invalid learning rate|lr is .*, expected a finite number, 0 or above"):
        cls([torch.zeros(3).requires_grad_()], lr=torch.tensor(value))
    optimizer, _ = make(name, lr=torch.tensor(0.1))
    optimizer.param_groups[1]["lr"] = torch.tensor(value)
    assert_fails(optimizer.step, optimizer, ValueError, r"param_groups\[1\]: lr is")


@pytest.mark.parametrize(
    ("hyper", "value", "error", "match"),
    [
        ("eps", "small", TypeError, r"param_groups\[1\]: eps is 'small', expected a number"),
        ("weight_decay", None, TypeError, r"param_groups\[1\]: weight_decay is None, expected a number"),
        ("lr", "0.1", TypeError, r"param_groups\[1\]: lr is '0.1', expected a number"),
        ("lr", None, TypeError, r"param_groups\[1\]: lr is None, expected a number"),
        ("lr", torch.tensor([0.1, 0.2]), ValueError, r"param_groups\[1\]: lr is a tensor of 2 elements, expected one"),
        ("betas", (0.9,), ValueError, r"param_groups\[1\]: betas is \(0.9,\), expected 2 numbers"),
        ("betas", (0.9, "0.9"), ValueError, r"param_groups\[1\]: betas is \(0.9, '0.9'\), expected 2 numbers"),
        ("betas", None, ValueError, r"param_groups\[1\]: betas is None, expected 2 numbers"),
        ("state_bits", 12, ValueError, r"param_groups\[1\]: state_bits is 12, expected one of"),
    ],
)
def test_what_is_no_number_at_all(hyper: str, value: Any, error: type[Exception], match: str) -> None:
    optimizer, _ = make()
    optimizer.param_groups[1][hyper] = value
    assert_fails(optimizer.step, optimizer, error, match)


def test_a_group_that_lacks_a_hyper_parameter() -> None:
    optimizer, _ = make()
    del optimizer.param_groups[1]["betas"]
    assert_fails(optimizer.step, optimizer, ValueError, r"param_groups\[1\] has no 'betas', which AdamW needs")


def test_a_bad_group_is_not_added() -> None:
    optimizer, _ = make()
    new = torch.zeros(3).requires_grad_()
    group = {"params": [("new", new)], "eps": -1.0}
    assert_fails(lambda: optimizer.add_param_group(group), optimizer, ValueError, r"param_groups\[2\]: eps is -1")
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [("new", new)]})


@classes
def test_a_step_without_groups_does_nothing(name: str) -> None:
    """A script that swaps its parameters may clear the groups and add others later."""
    optimizer = make(name)[0]
    optimizer.param_groups.clear()
    optimizer.step()
    param = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones(3)
    for _ in range(2):  # ADOPT's first one moves nothing
        optimizer.step()
    assert param.count_nonzero() == 3


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_a_bad_grad_scale(scale: float) -> None:
    optimizer, _ = make()
    optimizer.grad_scale = torch.tensor(scale)
    assert_fails(optimizer.step, optimizer, ValueError, "grad_scale is .*, expected a number above 0")


# ---- Memory that parameters share.


def test_a_parameter_twice_in_a_group() -> None:
    param = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = optim.AdamW([param, torch.ones(3, requires_grad=True), param])
    param.grad = torch.ones(3)
    match = r"parameter 2 of .*\(shape \[3\]\) is in its group twice \(it is parameter 0 of"
    assert_fails(optimizer.step, optimizer, ValueError, match)
    assert not optimizer.state


def test_a_parameter_in_two_groups() -> None:
    param = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optim.AdamW([{"params": [param]}, {"params": [param]}])
    optimizer, params = make()
    group = {"params": [("again", params[0])]}
    assert_fails(lambda: optimizer.add_param_group(group), optimizer, ValueError, "in more than one parameter group")


@pytest.mark.parametrize("overlap", ["whole", "part"])
def test_parameters_that_share_memory(overlap: str) -> None:
    optimizer, params = make("SGD")
    new = params[2].detach().flatten()
    new = (new if overlap == "whole" else new[-20:]).requires_grad_()
    optimizer.add_param_group({"params": [("tied", new)]})
    new.grad = torch.ones_like(new)
    assert_fails(optimizer.step, optimizer, ValueError, "parameter 'third' and parameter 'tied' share memory")
    new.grad = None  # A step skips it without a gradient.
    optimizer.step()


def test_neighbors_and_interleaved_parameters_are_apart() -> None:
    flat = torch.zeros(40)
    params = [flat[:10], flat[10:20], flat[20::2], flat[21::2], flat[40:]]
    params = [p.detach().requires_grad_() for p in params]
    optimizer = optim.SGD(params, lr=1.0, max_grad_norm=math.inf, zero_grads_in_step=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(flat, torch.full((40,), -3.0))


@classes
@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 1.0}, {"zero_grads_in_step": True}, {"grad_scale": 2.0}, {}], ids=str
)
def test_two_parameters_with_one_gradient(name: str, options: dict[str, Any]) -> None:
    options = dict(options)
    scale = options.pop("grad_scale", None)
    optimizer, params = make(name, **options)
    optimizer.add_param_group({"params": [("fourth", torch.zeros(20, 30).requires_grad_())]})
    fourth = optimizer.param_groups[2]["params"][0]
    fourth.grad = params[0].grad
    if scale:
        optimizer.grad_scale = torch.tensor(scale)
    if not options and not scale:  # The step only reads gradients.
        optimizer.step()
        return
    match = "parameter 'first' and parameter 'fourth' share the memory of a gradient"
    assert_fails(optimizer.step, optimizer, ValueError, match)
    fourth.grad = params[0].grad.clone()
    optimizer.step()


def test_a_gradient_that_is_its_parameter() -> None:
    optimizer, params = make(zero_grads_in_step=True)
    params[1].grad = params[1].detach()
    assert_fails(optimizer.step, optimizer, ValueError, "parameter 'second' and its gradient share memory")


# ---- Changes between steps.


@classes
@pytest.mark.parametrize("precision", [{}, {"state_bits": 8, "min_8bit_size": 0}], ids=["float", "8 bits"])
@pytest.mark.parametrize("shape", [(20, 31), (400, 400), (1, 2), (600,)])
def test_another_shape(name: str, precision: dict[str, Any], shape: tuple[int, ...]) -> None:
    optimizer, params = make(name, **precision)
    params[0].data = torch.zeros(shape)
    params[0].grad = torch.ones(shape)
    match = r"parameter 'first': its state '\w+' is .* of shape \[20, 30\].*expected .* of shape"
    assert_fails(optimizer.step, optimizer, TypeError, match)


@classes
@pytest.mark.parametrize("precision", [{}, {"state_bits": 8, "min_8bit_size": 0}], ids=["float", "8 bits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype(name: str, precision: dict[str, Any], dtype: torch.dtype) -> None:
    optimizer, params = make(name, **precision)
    was = params[1].detach().clone()
    params[1].grad = None
    params[1].data = params[1].data.to(dtype)
    params[1].grad = torch.ones(7, dtype=dtype)
    shown = {torch.bfloat16: "BFloat16", torch.float64: "Double"}[dtype]
    match = f"parameter 'second' is {shown} but was Float in the step before"
    assert_fails(optimizer.step, optimizer, TypeError, match)
    params[1].grad = None
    params[1].data = was
    params[1].grad = torch.ones(7)
    optimizer.step()


def test_a_remainder_is_not_left_behind_by_a_cast() -> None:
    optimizer, params = make(dtype=torch.bfloat16, master_bits=32)
    params[0].grad = None
    params[0].data = params[0].data.float()
    params[0].grad = torch.ones_like(params[0])
    assert_fails(optimizer.step, optimizer, TypeError, "parameter 'first' is Float but was BFloat16")


def test_a_gradient_of_another_shape() -> None:
    optimizer, params = make()
    params[1].data = torch.zeros(8)
    match = r"parameter 'second' has a gradient of shape \[7\], expected \[8\]"
    assert_fails(optimizer.step, optimizer, ValueError, match)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int32])
def test_a_gradient_of_another_dtype(dtype: torch.dtype) -> None:
    optimizer, params = make()
    params[1].grad_dtype = None
    params[1].grad = torch.ones(7).to(dtype)
    if dtype == torch.bfloat16:  # A narrower float loses nothing.
        optimizer.step()
        return
    assert_fails(optimizer.step, optimizer, TypeError, "parameter 'second' is Float but its gradient is")


@pytest.mark.gpu
def test_a_gradient_on_another_device() -> None:
    optimizer, params = make()
    params[1].data = params[1].data.cuda()
    match = "parameter 'second' is on cuda:0 but its gradient is on cpu"
    assert_fails(optimizer.step, optimizer, ValueError, match)


# ---- State that does not fit.


def compressed() -> tuple[Any, list[Tensor]]:
    return make(dtype=torch.bfloat16, state_bits=8, master_bits=24, min_8bit_size=0)


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "short scales": (
        lambda s: s.update(exp_avg_scales=torch.zeros(2)),
        ValueError,
        r"'exp_avg_codes': an 8-bit state of shape \[5, 300\] needs 6 float32 scales.*got Float of shape \[2\]",
    ),
    "long scales": (
        lambda s: s.update(exp_avg_sq_scales=torch.zeros(7)),
        ValueError,
        "'exp_avg_sq_codes'.* got Float of",
    ),
    "scales of another dtype": (
        lambda s: s.update(exp_avg_scales=s["exp_avg_scales"].double()),
        ValueError,
        "'exp_avg_codes'.*got Double of shape",
    ),
    "no scales": (lambda s: s.pop("exp_avg_scales"), ValueError, "'exp_avg_codes'.*got none"),
    "codes of another shape": (
        lambda s: s.update(exp_avg_codes=torch.zeros(5, 200, dtype=torch.int8)),
        TypeError,
        r"its state 'exp_avg' is Char of shape \[5, 200\]",
    ),
    "larger codes": (
        lambda s: s.update(exp_avg_sq_codes=torch.zeros(500, 300, dtype=torch.uint8)),
        TypeError,
        r"its state 'exp_avg_sq' is Byte of shape \[500, 300\]",
    ),
    "remainder of another shape": (
        lambda s: s.update(param_remainder=torch.zeros(300, 5, dtype=torch.int8)),
        ValueError,
        r"its state 'param_remainder' has shape \(300, 5\), expected \(5, 300\)",
    ),
    "smaller remainder": (
        lambda s: s.update(param_remainder=torch.zeros(5, dtype=torch.int8)),
        ValueError,
        r"'param_remainder' has shape \(5,\)",
    ),
    "remainder of a dtype that none has": (
        lambda s: s.update(param_remainder=s["param_remainder"].double()),
        TypeError,
        "extra is Double, which no storage format of a BFloat16 parameter uses",
    ),
    "no step": (lambda s: s.pop("step"), TypeError, "its state has no tensor 'step'"),
    "a step of two": (lambda s: s.update(step=torch.zeros(2)), TypeError, "its state 'step' is Float of 2 elements"),
    "a state that is no tensor": (lambda s: s.update(exp_avg=3), TypeError, "its state 'exp_avg' is not a tensor"),
}


@pytest.mark.parametrize("what", STATES)
@pytest.mark.parametrize("others", ["as before", "to be converted"])
def test_state_that_does_not_fit(what: str, others: str) -> None:
    spoil, error, match = STATES[what]
    optimizer, params = compressed()
    spoil(optimizer.state[params[2]])
    if others == "to be converted":  # The step has begun to convert when it finds the error.
        optimizer.param_groups[0].update(state_bits=32, master_bits=32)
    assert_fails(optimizer.step, optimizer, error, f"parameter 'third'.*{match}")


def test_a_step_that_is_left_out_converts_nothing() -> None:
    """A shorter remainder may change a parameter's bits, but only in a step that is made."""
    optimizer, params = make(dtype=torch.bfloat16, master_bits=32, state_bits=32)
    remainder = optimizer.state[params[0]]["param_remainder"]
    remainder.copy_(torch.where(torch.arange(30) % 2 == 0, 32767, -32768).to(torch.int16))
    optimizer.param_groups[0]["master_bits"] = 24
    before = bits(optimizer)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert same(bits(optimizer), before)
    assert optimizer.last_step_skipped


@pytest.mark.parametrize("given", CLASSES)
@pytest.mark.parametrize("taken", CLASSES)
def test_state_of_another_optimizer(given: str, taken: str) -> None:
    saved = make(given)[0].state_dict()
    optimizer, _ = make(taken)
    # These classes have the same states, and torch fills in an amsgrad that their dicts lack.
    is_alike = given in ("Adam", "AdamW", "RAdam", "ADOPT") and taken in ("Adam", "AdamW")
    if given == taken or is_alike or (given, taken) == ("ADOPT", "RAdam"):
        optimizer.load_state_dict(saved)
        optimizer.step()
        return
    match = rf"param_groups\[0\] of the state dict has .*it is the state of another optimizer than {taken}"
    assert_fails(lambda: optimizer.load_state_dict(saved), optimizer, ValueError, match)
    optimizer.step()


def test_a_loaded_state_without_its_step() -> None:
    optimizer, _ = make()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][2]["step"]
    match = r"parameter 1 of param_groups\[1\] of the state dict: its state has no 'step', which AdamW needs"
    assert_fails(lambda: optimizer.load_state_dict(saved), optimizer, ValueError, match)


def test_a_load_that_fails_late_changes_nothing() -> None:
    optimizer, _ = make()
    saved = make()[0].state_dict()

    def fail(_: torch.optim.Optimizer) -> None:
        raise RuntimeError("a hook's own")

    optimizer.register_load_state_dict_post_hook(fail)
    assert_fails(lambda: optimizer.load_state_dict(saved), optimizer, RuntimeError, "a hook's own")
    saved["param_groups"].pop()
    assert_fails(
        lambda: optimizer.load_state_dict(saved), optimizer, ValueError, "different number of parameter groups"
    )


def test_options_out_of_range_in_a_loaded_group() -> None:
    optimizer, _ = compressed()
    saved = optimizer.state_dict()
    saved["param_groups"][1]["state_bits"] = 2
    match = r"param_groups\[1\] of the state dict: state_bits is 2"
    assert_fails(lambda: optimizer.load_state_dict(saved), optimizer, ValueError, match)


def test_state_of_a_newer_version() -> None:
    optimizer, _ = compressed()
    saved = optimizer.state_dict()
    assert [group[VERSION_NAME] for group in saved["param_groups"]] == [VERSION, VERSION]
    saved["param_groups"][1][VERSION_NAME] = VERSION + 1
    match = rf"param_groups\[1\] of the state dict was written by a newer drivetrain.*version {VERSION + 1}.*Upgrade"
    assert_fails(lambda: optimizer.load_state_dict(saved), optimizer, ValueError, match)


def test_the_version_is_there_with_options_of_ours_only() -> None:
    assert all(VERSION_NAME not in group for group in make()[0].state_dict()["param_groups"])
    optimizer, params = compressed()
    assert all(VERSION_NAME not in group for group in optimizer.torch_state_dict()["param_groups"])
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        for option in ("state_bits", "master_bits", "min_8bit_size"):
            del group[option]
    assert all(VERSION_NAME not in group for group in optimizer.state_dict()["param_groups"])
    del saved["param_groups"][0][VERSION_NAME]  # The first state dicts had no version.
    optimizer.load_state_dict(saved)
    set_grads(params)
    optimizer.step()


# ---- Names.


def spoiled(params: list[Tensor]) -> Any:
    optimizer = optim.AdamW(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    params[1].data = torch.zeros(9, 9)
    return optimizer


def names_from_ddp() -> str:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ddp = DistributedDataParallel(model)
    optimizer = spoiled(list(ddp.parameters()))
    with pytest.raises(ValueError, match="has a gradient of shape") as error:
        optimizer.step()
    return str(error.value)


def test_names_come_from_our_ddp(on_ranks: Callable[..., list[Any]]) -> None:
    for message in on_ranks(names_from_ddp):
        assert message.startswith("parameter '0.bias' has a gradient of shape [4], expected [9, 9]")


def test_without_names_the_place_is_named() -> None:
    optimizer = spoiled([torch.zeros(2).requires_grad_(), torch.zeros(4).requires_grad_()])
    with pytest.raises(ValueError, match=r"parameter 1 of param_groups\[0\] \(shape \[9, 9\]\) has a gradient"):
        optimizer.step()


def test_remembered_names_keep_no_parameter_alive() -> None:
    model = nn.Linear(2, 2)
    parameter_names.remember(model)
    weight = weakref.ref(model.weight)
    assert parameter_names.name_of(model.weight) == "weight"
    # Another parameter of equal values has no name.
    assert parameter_names.name_of(nn.Parameter(model.weight.detach())) is None
    del model
    gc.collect()
    assert weight() is None


def test_ranges_are_checked_natively() -> None:
    _C.optim_check_hypers({"lr": 0.1, "beta1": 0.0, "dampening": -3.0}, 0)
    with pytest.raises(ValueError, match=r"param_groups\[4\]: dampening is inf, expected a finite number\."):
        _C.optim_check_hypers({"dampening": math.inf}, 4)


@classes
def test_good_input_warns_of_nothing(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer, _ = make(name, max_grad_norm=1.0)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_constructor_is_explicit(name: str) -> None:
    """The signature, which LightningCLI and Hydra read, has torch's arguments in torch's order, followed by ours."""
    ours = inspect.signature(getattr(optim, name)).parameters
    assert all(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in ours.values())
    assert [*ours][-7:] == [
        "max_grad_norm",
        "zero_grads_in_step",
        "state_bits",
        "master_bits",
        "min_8bit_size",
        "rounding",
        "offload",
    ]
    if hasattr(torch.optim, name):
        torchs = inspect.signature(getattr(torch.optim, name)).parameters
        assert [*ours][:-7] == [*torchs, *(["fallback", "process_group"] if name == "Muon" else [])]
        for argument, parameter in torchs.items():
            assert (ours[argument].default, ours[argument].kind) == (parameter.default, parameter.kind), argument
    arguments = re.search(r"\nArgs:\n(.*?)\n\nRaises:\n", inspect.cleandoc(getattr(optim, name).__doc__), re.DOTALL)
    assert arguments
    assert re.findall(r"^    (\w+): \S", arguments[1], re.MULTILINE) == [*ours]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'unknown'"):
        getattr(optim, name)([nn.Parameter(torch.ones(2, 2))], unknown=1)


def test_options_are_declared_once() -> None:
    """Type checkers read `StepOptions`, and everything else reads the signatures."""
    base = get_type_hints(FusedOptimizer.__init__)
    assert get_type_hints(StepOptions) == {name: base[name] for name in StepOptions.__annotations__}


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_group_that_is_no_dict(name: str) -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(optim, name)([param])
    with pytest.raises(TypeError, match="param_group must be a dict, but got <class 'list'>"):
        optimizer.add_param_group([nn.Parameter(torch.ones(2, 2))])
    assert len(optimizer.param_groups) == 1


def test_docstrings_are_the_same_without_their_indent() -> None:
    """Python 3.13 and later remove the indent when they compile a class."""
    text = """A rule.

    More of it.

    Args:
        lr: Learning rate
            of the rule.

    Raises:
        ValueError: It is wrong.
    """
    shown = declaration._documented(text, optim.AdamW, ["lr", "eps"])
    assert declaration._documented(inspect.cleandoc(text), optim.AdamW, ["lr", "eps"]) == shown
    assert "\n        lr: Learning rate\n            of the rule.\n        eps: Added to the denominator.\n" in shown
