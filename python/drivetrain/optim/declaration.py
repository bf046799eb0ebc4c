"""Completes the declarations of optimizer classes with the options that every class has."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar

import torch

from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, rules, torchs_base, unhooked

Class = TypeVar("Class", bound=type)
_WIDTH = 8  # spaces before an argument's name in a class's docstring


class StepOptions(TypedDict, total=False):
    """Lists the options of every class; `FusedOptimizer` documents them."""

    max_grad_norm: float | None
    zero_grads_in_step: bool
    state_bits: StateBits | None
    master_bits: int | None
    min_8bit_size: int
    rounding: str
    offload: Literal["cpu"] | None


class TorchsOptions(StepOptions, total=False):
    """Lists options of most of torch's classes, for type checkers. Signatures have those that torch's class has."""

    foreach: bool | None
    maximize: bool
    capturable: bool
    differentiable: bool
    fused: bool | None


_OPTIONS = [inspect.signature(FusedOptimizer.__init__).parameters[name] for name in StepOptions.__annotations__]
# Most classes describe these arguments alike. The docstring of a class has its own words for others.
_COMMON = {
    "params": "Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.",
    "lr": "Learning rate, a number or a tensor of one element.",
    "betas": "Decay rates of the means of gradients and of their squares.",
    "eps": "Added to the denominator.",
    "weight_decay": "L2 penalty.",
    "momentum": "Momentum factor.",
    "decoupled_weight_decay": "Decays weights apart from the gradients, as AdamW does.",
    "foreach": "Accepted for compatibility, without effect.",
    "capturable": "Accepted for compatibility, without effect: every step on CUDA can be captured.",
    "fused": "Accepted for compatibility, without effect: the step is always fused.",
    "maximize": "Maximize the objective instead of minimizing it.",
    "differentiable": "Must be False.",
    "max_grad_norm": (
        "Clips the 2-norm of all gradients together before the step. `inf` only measures it; None does neither."
    ),
    "zero_grads_in_step": "Leaves zeros in every `.grad` after the step.",
    "state_bits": (
        'Stores states as float32 (32), bfloat16 (16), codes of 8 or 4 bits (8, 4) or float8 ("fp8"). None keeps the '
        "dtype that torch uses."
    ),
    "master_bits": "Keeps 32 or 24 bits of 16-bit parameters, the missing ones in the state. None keeps 16.",
    "min_8bit_size": "Keeps states of parameters with fewer elements in float32 where states have 8 or 4 bits.",
    "rounding": 'Rounds 16-bit parameters without a master "nearest", "stochastic" or "kahan".',
    "offload": 'Steps parameters on a GPU on the CPU ("cpu"), with their states in host memory. None steps them there.',
}
_AS_TORCHS = "{0}: torch.optim.{0} with a native step over all parameters; arguments, state and results are torch's."
_DTYPES = """
    Takes float32, float64, bfloat16, float16 and complex parameters on the CPU and on CUDA devices. The arithmetic is
    float32, or float64 for float64 parameters. 16-bit parameters may have float32 gradients (`grad_dtype`).
"""
_RAISES = (
    "\n    Raises:\n        TypeError: A hyper-parameter is text, as YAML reads 1e-3."
    "\n        ValueError: A hyper-parameter is out of range, as under torch."
)
_RAISES_TOO = "\n        NotImplementedError: `differentiable` is True."


def follows(rule: Rule) -> Callable[[Class], Class]:
    """Completes a declared class of optimizers.

    It gets its rule, the common options, a docstring with every argument, and a step that other classes may borrow as
    torch's. A constructor without a body passes every argument to the base under its own name. Where torch has the
    class, it takes the arguments of torch's constructor.
    """

    def describe(cls: Class) -> Class:
        rules[cls] = rule
        ours: Any = cls
        declared, torchs = ours.__init__, torchs_base(cls)
        is_declaration = not declared.__code__.co_names  # its body is `...`
        source = torchs.__init__ if is_declaration and torchs is not torch.optim.Optimizer else declared
        arguments = inspect.signature(source, eval_str=True).parameters.values()
        signature = inspect.Signature([each for each in arguments if each.kind is not each.VAR_KEYWORD] + _OPTIONS)
        if is_declaration:
            ours.__init__ = _passing_on(declared, signature, rule)
        annotations = {each.name: each.annotation for each in [*signature.parameters.values()][1:]}
        ours.__init__.__signature__, ours.__init__.__annotations__ = signature, annotations | {"return": None}
        if cls.__doc__ is not None:  # python -OO
            cls.__doc__ = _documented(cls.__doc__, cls, [*annotations])
        own_step = ours.step

        @functools.wraps(own_step)
        def step(self: Any, closure: Any = None) -> Any:
            return own_step(self, closure) if isinstance(self, cls) else unhooked(torchs.step)(self, closure)

        ours.step = step
        return cls

    return describe


def check_names(constructor: Callable[..., None], options: Mapping[str, object]) -> None:
    """Raises Python's TypeError if a constructor got an option that does not exist."""
    for name in options.keys() - StepOptions.__annotations__.keys():
        raise TypeError(f"{constructor.__qualname__}() got an unexpected keyword argument {name!r}")


def _passing_on(declared: Callable[..., None], signature: inspect.Signature, rule: Rule) -> Callable[..., None]:
    @functools.wraps(declared)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{declared.__qualname__}() {error}") from None
        bound.apply_defaults()
        hypers = dict(bound.arguments)
        del hypers["self"]
        params = hypers.pop("params")
        for name, value in hypers.items():
            # As YAML reads 1e-3. torch's comparison would not name the argument.
            if isinstance(value, str) and isinstance(signature.parameters[name].default, int | float):
                raise TypeError(f"{name} is {value!r}, expected a number")
        # Past the constructor of a base with a rule of its own, as Adam's below AdamW.
        if torchs_base(type(self)) is not torch.optim.Optimizer:
            FusedOptimizer.__init__(self, params, **hypers)
            return
        options = {name: hypers.pop(name) for name in StepOptions.__annotations__}
        FusedOptimizer.__init__(self, params, {**hypers, **rule.constants}, **options)

    return constructor


def _documented(text: str, cls: type, names: list[str]) -> str:
    """Returns a class's docstring with what holds for all classes, and one entry for each argument."""
    text = textwrap.indent(inspect.cleandoc(text), "    ").lstrip()  # Python 3.13 removes the indent of docstrings
    if torchs_base(cls) is not torch.optim.Optimizer:
        text = f"{_AS_TORCHS.format(cls.__name__)}\n\n    {text}"
    text, separator, raises = text.partition("\n    Raises:")
    head, _, own = text.partition("\n    Args:\n")
    summary, _, more = head.rstrip().partition("\n\n")
    starts = [*re.finditer(rf"^ {{{_WIDTH}}}(\w+): ", own, re.MULTILINE)]
    ends = [*(each.start() for each in starts[1:]), len(own)]
    described = {each[1]: own[each.end() : end].strip() for each, end in zip(starts, ends, strict=True)}
    entries = [f"{' ' * _WIDTH}{name}: {described[name]}" if name in described else _entry(name) for name in names]
    end = separator + raises if separator else f"{_RAISES}{_RAISES_TOO if 'differentiable' in names else ''}\n    "
    return "\n".join([summary, _DTYPES, *([more, ""] if more else []), "    Args:", *entries, end])


@functools.cache
def _entry(name: str) -> str:
    indent = " " * _WIDTH
    return textwrap.fill(f"{name}: {_COMMON[name]}", 120, initial_indent=indent, subsequent_indent=indent + "    ")
