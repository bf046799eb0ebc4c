"""Cases and helpers that the tests of optimizers share: classes, options, tolerances, parameters and comparisons."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain import _C, optim
from drivetrain.optim.precision import SCALAR_NAMES
from effort import IS_WHOLE
from precision_cases import same_bits
from reference.adamw_schedule_free import AdamWScheduleFree
from reference.adan import Adan
from reference.adopt import ADOPT
from reference.lamb import LAMB
from reference.lion import Lion


class Case(NamedTuple):
    """Holds one optimizer with one set of options."""

    ours: type
    theirs: type  # torch's class, or the reference where torch has none
    options: dict[str, Any]


# The optimizers in optim that are not torch's own.
OWN_CLASSES = [
    name
    for name, value in vars(optim).items()
    if isinstance(value, type) and value.__module__.startswith(optim.__name__)
]
# torch's own classes and scaler, under whatever names drivetrain.install() puts in their place.
TORCHS = {name: getattr(torch.optim, name) for name in OWN_CLASSES if hasattr(torch.optim, name)}
TORCHS_SCALER = torch.amp.GradScaler


class Scaled(Tensor):
    """Stands for a quantized weight: float8 codes and a scale. Other operations see its float32 value."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> "Scaled":
        return Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)  # type: ignore[attr-defined]

    def __init__(self, value: Tensor) -> None:
        self.quantize(value)

    def quantize(self, value: Tensor) -> None:
        self.scale = value.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
        self.codes = (value / self.scale).to(torch.float8_e4m3fn)

    def value(self) -> Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        result = func(*tree_map_only(Scaled, Scaled.value, args), **tree_map_only(Scaled, Scaled.value, kwargs or {}))
        if not func._schema.is_mutable or not isinstance(args[0], Scaled):
            return result
        args[0].quantize(result)
        return args[0]


def scaled() -> nn.Parameter:
    """Returns a parameter without memory of its own."""
    return nn.Parameter(Scaled(torch.linspace(-1, 1, 12).view(3, 4)))


CASES: dict[str, Case] = {
    "adamw": Case(optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw_amsgrad": Case(optim.AdamW, torch.optim.AdamW, {"amsgrad": True, "lr": 0.02}),
    "adamw_maximize": Case(optim.AdamW, torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.9)}),
    "adam": Case(optim.Adam, torch.optim.Adam, {}),
    "adam_l2": Case(optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-4}),
    "adam_amsgrad_l2": Case(optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "sgd": Case(optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "sgd_l2": Case(optim.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "sgd_momentum": Case(optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd_nesterov": Case(optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": Case(optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adagrad_l2": Case(
        optim.Adagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True, "eps": 1e-3},
    ),
    "rmsprop": Case(optim.RMSprop, torch.optim.RMSprop, {"alpha": 0.9, "maximize": True}),
    "rmsprop_momentum": Case(
        optim.RMSprop,
        torch.optim.RMSprop,
        {"momentum": 0.5, "weight_decay": 0.1, "eps": 1e-2},
    ),
    "rmsprop_centered": Case(optim.RMSprop, torch.optim.RMSprop, {"centered": True, "eps": 1e-2}),
    "rmsprop_centered_momentum": Case(
        optim.RMSprop,
        torch.optim.RMSprop,
        {"centered": True, "momentum": 0.5, "eps": 1e-2},
    ),
    "adadelta": Case(optim.Adadelta, torch.optim.Adadelta, {"rho": 0.8, "eps": 1e-4}),
    "adadelta_l2": Case(optim.Adadelta, torch.optim.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    "adamax": Case(optim.Adamax, torch.optim.Adamax, {"betas": (0.8, 0.9), "maximize": True}),
    "adamax_l2": Case(optim.Adamax, torch.optim.Adamax, {"weight_decay": 0.1, "eps": 1e-3}),
    "radam": Case(optim.RAdam, torch.optim.RAdam, {"weight_decay": 0.1}),
    "radam_decoupled": Case(
        optim.RAdam,
        torch.optim.RAdam,
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True, "betas": (0.8, 0.9)},
    ),
    "nadam": Case(optim.NAdam, torch.optim.NAdam, {"weight_decay": 0.1, "maximize": True}),
    "nadam_decoupled": Case(
        optim.NAdam,
        torch.optim.NAdam,
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1, "betas": (0.8, 0.9)},
    ),
    "asgd": Case(optim.ASGD, torch.optim.ASGD, {"weight_decay": 0.1}),
    "asgd_averaged": Case(
        optim.ASGD, torch.optim.ASGD, {"lr": 0.05, "lambd": 0.1, "alpha": 0.6, "t0": 1.0, "maximize": True}
    ),
    "rprop": Case(optim.Rprop, torch.optim.Rprop, {}),
    "rprop_bounds": Case(
        optim.Rprop,
        torch.optim.Rprop,
        {"lr": 0.02, "etas": (0.7, 1.5), "step_sizes": (0.015, 0.03), "maximize": True},
    ),
    "adopt": Case(optim.ADOPT, ADOPT, {"weight_decay": 0.1, "betas": (0.9, 0.99)}),
    "adopt_decoupled": Case(
        optim.ADOPT,
        ADOPT,
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "clip": False, "eps": 0.3, "maximize": True},
    ),
    "adamw_schedule_free": Case(
        optim.AdamWScheduleFree,
        AdamWScheduleFree,
        {"weight_decay": 0.1, "warmup_steps": 2, "lr": 0.01},
    ),
    "adamw_schedule_free_weights": Case(
        optim.AdamWScheduleFree,
        AdamWScheduleFree,
        {"r": 0.5, "weight_lr_power": 1.0, "betas": (0.8, 0.9), "maximize": True, "lr": 0.01},
    ),
    "adan": Case(optim.Adan, Adan, {"weight_decay": 0.1}),
    "adan_no_prox": Case(
        optim.Adan,
        Adan,
        {"weight_decay": 0.1, "betas": (0.8, 0.7, 0.9), "eps": 1e-3, "no_prox": True, "maximize": True},
    ),
    # The steps are small, because rounding may flip an update where momentum and gradient nearly cancel out.
    "lion": Case(optim.Lion, Lion, {"lr": 4e-4, "weight_decay": 0.1}),
    "lion_maximize": Case(optim.Lion, Lion, {"lr": 4e-4, "betas": (0.8, 0.95), "maximize": True}),
    "lamb": Case(optim.LAMB, LAMB, {"lr": 1e-2, "weight_decay": 0.1}),
    "lamb_plain": Case(optim.LAMB, LAMB, {"weight_decay": 0.0, "bias_correction": False, "grad_averaging": False}),
    "lamb_clipped": Case(
        optim.LAMB,
        LAMB,
        {"weight_decay": 0.0, "always_adapt": True, "trust_clip": True, "maximize": True, "betas": (0.8, 0.9)},
    ),
}
cases = pytest.mark.parametrize("case", CASES)


def each_rule(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns rows of a case and a value of each of the choices.

    Every class has all combinations of the choices, with its cases in turn; with WHOLE=1, every case has them.
    """
    indexes = list(itertools.product(*(range(len(values)) for values in map(list, choices))))
    of_class: dict[type, list[str]] = {}
    for name, case in CASES.items():
        of_class.setdefault(case.ours, []).append(name)
    rows = []
    for row, values in zip(indexes, itertools.product(*choices), strict=True):
        for names in of_class.values():
            rows += [(name, *values) for name in (names if IS_WHOLE else [names[sum(row) % len(names)]])]
    return rows


# The largest relative and absolute differences after several steps, for values and updates of size about 1. The
# reference computes in float64 and rounds the values that it stores.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}
SHAPES = [(0,), (), (1,), (15,), (17,), (511,), (513,), (3, 700)]


def make_params(dtype: torch.dtype = torch.float32, shapes: list[Any] = SHAPES) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def copies(params: list[Tensor]) -> list[Tensor]:
    """Returns independent copies with the same layout."""
    return [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in params]


def set_grads(*param_lists: list[Tensor]) -> None:
    """Gives the parameters at one position of all lists the same new random gradient."""
    for params in zip(*param_lists, strict=True):
        grad = torch.randn(params[0].shape, dtype=params[0].dtype)
        for param in params:
            param.grad = torch.empty_like(param, memory_format=torch.preserve_format).copy_(grad)


def round_stored(reference: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Rounds the parameters and states of a float64 optimizer to another dtype."""
    for group in reference.param_groups:
        for param in group["params"]:
            states = [value for name, value in reference.state[param].items() if name not in SCALAR_NAMES]
            for value in (param.detach(), *(state for state in states if state is not None)):
                value.copy_(value.to(dtype))


def assert_same(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **tolerance)


def assert_same_bits_everywhere(
    start: list[Tensor], make: Callable[[list[Tensor]], torch.optim.Optimizer], steps: int = 2
) -> None:
    """Checks that parameters and states after a few steps depend on neither instruction set nor number of threads."""
    results = []
    for isa in _C.available_isas():
        for count in (1, 2, 3):
            _C.force_isa(isa)
            torch.set_num_threads(count)
            torch.manual_seed(1)
            params = copies(start)
            optimizer = make(params)
            for _ in range(steps):
                set_grads(params)
                optimizer.step()
            results.append([p.detach() for p in params] + [v for p in params for v in optimizer.state[p].values()])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def moved(params: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    return [(p.detach().double() - b.detach().double()) for p, b in zip(params, before, strict=True)]


def assert_updates_agree(params: list[Tensor], others: list[Tensor], before: list[Tensor], share: float) -> None:
    """Checks that the updates differ by no more than `share` of the norm of `others`' updates."""
    for a, b in zip(moved(params, before), moved(others, before), strict=True):
        assert (a - b).norm() <= share * b.norm() + 1e-12


# The shapes are vectors, and matrices smaller than a tile, wider than a tile or a block, and higher than a block. Some
# put several matrices into one block, and some take several blocks per matrix.
ADAFACTOR_SHAPES: list[Any] = [
    (),
    (1,),
    (700,),
    (20_000,),
    (1, 1),
    (3, 700),
    (700, 3),
    (9, 5000),
    (1000, 70),
    (5, 40, 3, 3),
]
ADAFACTOR_SHAPES += [(3, 200, 301), (1, 40_000), (40_000, 1), (70, 1000)]
ADAFACTOR_PRECISIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "state_8": {"state_bits": 8, "min_8bit_size": 0},
    "state_16": {"state_bits": 16},
    "master_24": {"master_bits": 24, "state_bits": 32},
    "kahan": {"rounding": "kahan"},
    "stochastic": {"rounding": "stochastic"},
}
