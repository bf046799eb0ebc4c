"""Muon: torch's class with the native step, and AdamW for parameters that are not matrices."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, SupportsFloat, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from . import precision
from .base import FusedOptimizer
from .declaration import StepOptions, check_names, follows
from .element_wise import NUMBERS, adam_name
from .engine import Engine
from .kept import kept_of
from .left_to_torch import constructed
from .rule import Group, Numbers, Rule, hypers
from .sharded.dtensors import check_matrix_ranks

POLAR_EXPRESS = "polar_express"  # in place of the coefficients of all iterations
# The options of a group that AdamW steps, with the defaults of torch.optim.AdamW.
_FALLBACK: Group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False}


def _check(group: Group) -> None:
    """Checks the options that torch's constructor does not check."""
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if not group["eps"] >= 0:
        raise ValueError(f"eps is {group['eps']}, expected a number of 0 or more")
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps is {steps!r}. Number of steps must be less than 100 for computational efficiency")
    are_three = isinstance(coefficients, Sequence) and len(coefficients) == 3
    if coefficients != POLAR_EXPRESS and not (
        are_three and all(isinstance(value, SupportsFloat) and math.isfinite(value) for value in coefficients)
    ):
        raise ValueError(
            f"ns_coefficients is {coefficients!r}. Coefficients must be a tuple of exactly 3 finite values, or "
            f"{POLAR_EXPRESS!r}"
        )
    heads, beta2 = group.get("num_heads", 1), group.get("beta2")
    if beta2 is not None and not (isinstance(beta2, SupportsFloat) and 0 <= float(beta2) < 1):
        raise ValueError(f"beta2 is {beta2!r}, expected a number from 0 up to 1, or None")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise ValueError(f"num_heads is {heads!r}, expected an integer of 1 or more")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")


def _numbers(group: Group) -> Numbers:
    if group.get("fallback"):
        return hypers({**group, "decoupled_weight_decay": True, "maximize": False}, *NUMBERS)
    _check(group)
    is_polar = group["ns_coefficients"] == POLAR_EXPRESS
    a, b, c = (0.0, 0.0, 0.0) if is_polar else map(float, group["ns_coefficients"])
    return hypers(group, "weight_decay", "momentum", "nesterov", "eps", "ns_steps") | {
        **{"ns_a": a, "ns_b": b, "ns_c": c, "polar_express": is_polar},
        "match_rms_adamw": group["adjust_lr_fn"] == "match_rms_adamw",
        "num_heads": group.get("num_heads", 1),
        "beta2": group.get("beta2") or 0.0,
    }


def _name(group: Group) -> str:
    if group.get("fallback"):
        return adam_name(group)
    return "muon" if group.get("beta2") is None else "normuon"


@follows(
    Rule(
        _name,
        _numbers,
        gathers=lambda group: not group.get("fallback"),
        also=lambda group: set(_FALLBACK) if group.get("fallback") else {"num_heads", "beta2"},
        own_entries=("num_heads", "beta2", "fallback"),
        is_own=lambda group: (
            not {"num_heads", "beta2"}.isdisjoint(group) or group.get("ns_coefficients") == POLAR_EXPRESS
        ),
    )
)
class Muon(FusedOptimizer, torch.optim.Muon):
    """Parameters are matrices and not complex.

    With `fallback`, the same optimizer steps all other parameters with AdamW. Parameters that are not matrices go to a
    group of their own, after the matrices' groups. Give embeddings and output layers, which are matrices, as groups
    with `fallback=True`. Each group of AdamW takes the options of `fallback` unless it has its own.

    A weight that holds the matrices of several heads, such as a fused query, key and value, goes into a group with
    `num_heads`. Its rows are divided into that many matrices, each orthogonalized on its own.

    A group with `beta2`, such as 0.95, is stepped as NorMuon. Each row of the result is divided by the root of the mean
    of its squares over steps, and each head keeps its norm. The state `second_momentum_buffer`, [rows, 1], has the
    means. Ranks that hold rows gather such matrices, each rank steps them, and they take no storage formats.

    Ranks share the work where they hold rows of a matrix: under fully_shard(), HSDP, and
    DistributedDataParallel(shard=...). Each matrix is orthogonalized on one rank and travels in bfloat16. With
    `process_group`, ranks that hold whole matrices share it as well. On the CPU a step that every rank computes has
    the same bits. Copied and unpickled optimizers have no process group.

    Newton-Schulz runs in bfloat16, as in torch, in batches of matrices of one shape. The matrix products are torch's,
    so the last bits of a step may depend on threads, processor and device; the momentum's bits do not. On a CPU without
    bfloat16 products, a product runs in float32 and is then rounded. On CUDA a skipped step still runs the products,
    because the host does not know of it, and writes nothing.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", as torch implements it.
    `adjust_lr_fn` follows Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2. NorMuon: Li et al. 2025,
    "NorMuon: Making Muon more efficient and scalable", algorithm 1.

    Args:
        weight_decay: Decoupled weight decay.
        nesterov: Uses Nesterov's momentum.
        ns_coefficients: Coefficients of the Newton-Schulz polynomial, or "polar_express" for other ones in each
            iteration (Amsel et al. 2025, "The Polar Express", algorithm 1).
        eps: Lower bound of the norm that matrices are divided by.
        ns_steps: Number of Newton-Schulz iterations.
        adjust_lr_fn: Scales the learning rate by the shape: "original" (also None) or "match_rms_adamw".
        fallback: Options of AdamW for all other parameters: `lr`, `betas`, `eps`, `weight_decay`, `amsgrad` and
            storage formats. None accepts matrices only.
        process_group: Ranks with equal parameters and gradients, as under DistributedDataParallel, which share the
            work. Every rank must step the same matrices. None: each rank orthogonalizes its own.

    Raises:
        ValueError: A hyper-parameter is out of range or a parameter is not a matrix, as under torch. Or `eps` is
            negative, `ns_steps` is not from 0 to 99, or `ns_coefficients` is not one of the above. `num_heads` does not
            divide the rows, `beta2` is not from 0 up to 1, or `process_group` lacks this rank.
        TypeError: `fallback` is no dict, or has an option that AdamW lacks. `process_group` is no process group.
        RuntimeError: A step has complex matrices or sparse gradients. Or an exchange with other ranks fails; the
            parameters are then partly updated, and need the values of a checkpoint.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | str = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        fallback: dict[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        check_names(Muon.__init__, options)
        if process_group is not None:
            check_matrix_ranks(process_group)
        others: list[Group] = []
        if fallback is not None:
            _check_fallback(fallback)
            given: list[Any] = [] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)
            if given:  # or torch's error
                # torch's constructor takes matrices only, so that the other groups come after it.
                groups = given if isinstance(given[0], dict) else [{"params": given}]
                parts = [_split(group, fallback) for group in groups]
                others = [other for _, other in parts if other is not None]
                params = [own for own, _ in parts if own is not None] or [{"params": [], "fallback": False}]
        super().__init__(
            *(params, lr, weight_decay, momentum, nesterov, cast(Any, ns_coefficients), eps, ns_steps, adjust_lr_fn),
            fallback=None if fallback is None else dict(fallback),
            process_group=process_group,
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
        fallback, count, read = kept_of(self).fallback, len(getattr(self, "param_groups", [])), Engine(self).read
        parts: Iterable[Any] = [param_group]
        if fallback is not None and isinstance(param_group, dict) and "params" in param_group:
            parts = (part for part in _split(param_group, fallback) if part is not None)
        try:
            for part in parts:
                if isinstance(part, dict) and not read(part).get("fallback"):
                    _check(read(self.defaults | part))
                elif isinstance(part, dict) and fallback is None:
                    raise ValueError("a group has fallback=True, but Muon got no fallback: pass AdamW's options, or {}")
                super().add_param_group(part)
                _check_matrices(read(self.param_groups[-1]), len(self.param_groups) - 1)
        except BaseException:
            del self.param_groups[count:]
            raise


def _check_matrices(group: Group, index: int) -> None:
    heads = group.get("num_heads", 1)
    for place, param in enumerate([] if group.get("fallback") else group["params"]):
        name = group["param_names"][place] if "param_names" in group else place
        if param.ndim != 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} "
                f"(parameter {name!r} of param_groups[{index}]): use AdamW for it"
            )
        if param.shape[0] % heads:
            raise ValueError(
                f"num_heads is {heads}, but parameter {name!r} of param_groups[{index}] has {param.shape[0]} rows: "
                "expected a multiple"
            )


# ---- The fallback: which parameters AdamW steps, and with which options.


def _check_fallback(fallback: object) -> None:
    """Raises TypeError unless `fallback` is a dict of AdamW's options and drivetrain's storage options."""
    if not isinstance(fallback, dict):
        raise TypeError(f"fallback is a {type(fallback).__name__}, expected a dict of AdamW's options")
    known = _FALLBACK.keys() | precision.DEFAULTS.keys()
    for name in fallback:
        if name not in known:
            raise TypeError(
                f"fallback has {name!r}, which AdamW has no option for; it takes: {', '.join(sorted(known))}"
            )


def _split(group: Group, fallback: Group) -> tuple[Group | None, Group | None]:
    """Splits a group into Muon's part and AdamW's part; None stands for a part without parameters.

    A group with `fallback=True` is AdamW's as a whole. Else its matrices are Muon's, and the other parameters take the
    fallback's options instead of the group's.
    """
    options = _FALLBACK | fallback
    if group.get("fallback"):
        return None, options | group
    params = group["params"]
    if isinstance(params, set):  # torch's add_param_group() refuses it.
        return group, None
    entries = [params] if isinstance(params, Tensor) else list(params)
    rest = [entry for entry in entries if not _is_matrix(entry)]
    own = {**group, "params": [entry for entry in entries if _is_matrix(entry)], "fallback": False}
    return own if own["params"] or not rest else None, options | {"params": rest, "fallback": True} if rest else None


def _is_matrix(entry: Any) -> bool:
    """Returns whether an entry, a parameter or a pair of its name and it, is a matrix; torch refuses other things."""
    return getattr(entry[1] if isinstance(entry, tuple) else entry, "ndim", 2) == 2
