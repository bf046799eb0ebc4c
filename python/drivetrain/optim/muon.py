"""Muon: torch's class with the native step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from . import muon_fallback
from .adam import NUMBERS, adam_name
from .base import FusedOptimizer
from .declaration import StepOptions, check_names, follows
from .engine import Engine
from .kept import kept_of
from .left_to_torch import constructed
from .rule import Rule, hypers, learning_rate


def _check(group: dict[str, Any]) -> None:
    """Checks the options that torch's constructor does not check."""
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if not group["eps"] >= 0:
        raise ValueError(f"eps is {group['eps']}, expected a number of 0 or more")
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps is {steps!r}. Number of steps must be less than 100 for computational efficiency")
    if len(coefficients) != 3 or not all(math.isfinite(value) for value in coefficients):
        raise ValueError(f"ns_coefficients is {coefficients}. Coefficients must be a tuple of exactly 3 finite values")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")


def _gathers(param: Any, group: dict[str, Any]) -> bool:
    return not group.get("fallback")


def _also(group: dict[str, Any]) -> set[str]:
    return {*muon_fallback.DEFAULTS} if group.get("fallback") else set()


def _name(group: dict[str, Any]) -> str:
    return adam_name(group) if group.get("fallback") else "muon"


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    if group.get("fallback"):
        return hypers({**group, "decoupled_weight_decay": True, "maximize": False}, *NUMBERS)
    _check(group)
    a, b, c = group["ns_coefficients"]
    return {
        "lr": learning_rate(group),
        "weight_decay": group["weight_decay"],
        "momentum": group["momentum"],
        "nesterov": group["nesterov"],
        "eps": group["eps"],
        "ns_a": float(a),
        "ns_b": float(b),
        "ns_c": float(c),
        "ns_steps": group["ns_steps"],
        "match_rms_adamw": group["adjust_lr_fn"] == "match_rms_adamw",
    }


@follows(Rule(_name, _numbers, gathers=_gathers, also=_also))
class Muon(FusedOptimizer, torch.optim.Muon):
    """Muon: torch.optim.Muon with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. Takes real parameters of two dimensions;
    :class:`drivetrain.optim.Adam` lists the dtypes and devices.

    With `fallback`, the same optimizer steps all other parameters with AdamW. Parameters that are not matrices go to a
    group of their own, after the matrices' groups. Give embeddings and output layers, which are matrices, as groups
    with `fallback=True`. Each group of AdamW takes the options of `fallback` unless it has its own.

    A step makes one pass over gradient and momentum, which leaves the momentum in bfloat16. Newton-Schulz runs on that
    in bfloat16, as in torch, in batches of matrices of one shape. One pass updates the parameter with the result. The
    matrix products take nearly all of the time. They are torch's, so the last bits of a step may depend on threads,
    processor and device; the momentum's bits do not. On a CPU without bfloat16 products, a product runs in float32 and
    is then rounded, which takes a thirtieth of the time.

    On CUDA a step takes one launch for the step's scalars and two per batch, without torch's products. A
    skipped step still runs the products, because the host does not know of it, and writes nothing.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", as torch implements it.
    `adjust_lr_fn` follows Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2.

    Args:
        weight_decay: Decoupled weight decay.
        nesterov: Uses Nesterov's momentum.
        ns_coefficients: Coefficients of the Newton-Schulz polynomial.
        eps: Lower bound of the norm that matrices are divided by.
        ns_steps: Number of Newton-Schulz iterations.
        adjust_lr_fn: Scales the learning rate by the shape: "original" (also None) or "match_rms_adamw".
        fallback: Options of AdamW for all other parameters: `lr`, `betas`, `eps`, `weight_decay`, `amsgrad` and
            storage formats. None accepts matrices only.

    Raises:
        ValueError: A hyper-parameter is out of range or a parameter is not a matrix, as under torch. Or `eps` is
            negative, `ns_steps` is not from 0 to 99, or `ns_coefficients` is not three finite numbers.
        TypeError: `fallback` is no dict, or has an option that AdamW lacks.
        RuntimeError: A step has complex matrices or sparse gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        fallback: dict[str, Any] | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        check_names(Muon.__init__, options)
        others: list[dict[str, Any]] = []
        if fallback is not None:
            muon_fallback.check(fallback)
            # torch's constructor takes matrices only, so that the other groups come after it.
            parts = [muon_fallback.split(group, fallback) for group in muon_fallback.groups_of(params)]
            others = [other for _, other in parts if other is not None]
            params = [own for own, _ in parts if own is not None] or [{"params": [], "fallback": False}]
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            fallback=None if fallback is None else dict(fallback),
            **options,
        )
        for group in others:
            self.add_param_group(group)
        if others:
            constructed[-1] = Engine(self).description()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as every class here does. Without `fallback` it rejects parameters that are not matrices.

        With `fallback` it may add two groups: the matrices, and the other parameters for AdamW.
        """
        fallback = kept_of(self).fallback
        if fallback is None or not isinstance(param_group, dict) or "params" not in param_group:
            _add_group(self, super().add_param_group, param_group)
            return
        count = len(self.param_groups)
        try:
            for part in muon_fallback.split(param_group, fallback):
                if part is not None:
                    _add_group(self, super().add_param_group, part)
        except BaseException:
            del self.param_groups[count:]
            raise


def _add_group(optimizer: Any, torchs_add: Callable[[dict[str, Any]], None], param_group: dict[str, Any]) -> None:
    if isinstance(param_group, dict):
        if not param_group.get("fallback"):
            _check(optimizer.defaults | param_group)
        elif kept_of(optimizer).fallback is None:
            raise ValueError("a group has fallback=True, but Muon got no fallback: pass AdamW's options, or {}")
    torchs_add(param_group)
    group = optimizer.param_groups[-1]
    if group.get("fallback"):
        return
    for index, param in enumerate(group["params"]):
        if param.ndim != 2:
            name = group["param_names"][index] if "param_names" in group else index
            del optimizer.param_groups[-1]
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} "
                f"(parameter {name!r} of param_groups[{len(optimizer.param_groups)}]): use AdamW for it"
            )
