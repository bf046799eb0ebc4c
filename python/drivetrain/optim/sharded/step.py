"""Steps each rank's own part of DTensor parameters, as plain tensors that the native step takes."""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import _C
from .. import precision
from . import wrappers
from .dtensors import (
    Gathers,
    Group,
    is_dtensor,
    label_of,
    local_part,
    local_value,
    local_values,
    part_of,
    replicated,
    settle_gradient,
    shared_value,
    split_dims,
    sum_of_squares,
    why_not,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Share = Callable[[str, bool, list[Tensor], list[Tensor]], None]  # see csrc/optim/run_shared.h


@dataclass
class Part:
    """A split parameter, this rank's part as a plain tensor, and the parameter's group."""

    param: "DTensor"
    plain: Tensor
    group: Group


@dataclass
class Measured:
    """The result of a step whose norm was measured over the mesh beforehand."""

    native: _C.StepResult
    norm: Tensor

    @property
    def is_on_device(self) -> bool:
        """True if only the device knows the result."""
        return self.native.is_on_device

    @property
    def skipped(self) -> bool:
        """True if the step was skipped."""
        return self.native.skipped

    @property
    def grad_norm(self) -> float:
        """The 2-norm of all gradients on all ranks."""
        return float(self.norm)


@dataclass
class _Alias:
    """A DTensor parameter and the plain tensor that shares its memory and stands for it in the native step."""

    param: "DTensor"
    local: Tensor
    plain: Tensor


class Shards:
    """The parameters of one optimizer as plain tensors, kept between steps because the native reader caches them."""

    def __init__(self) -> None:
        self._aliases: dict[int, _Alias] = {}  # by the id of the parameter

    def step(
        self,
        groups: list[Group],
        state: dict[Tensor, Any],
        left: set[int],
        options: _C.StepOptions,
        gathers: Gathers,
        sums: Callable[[list[Part], dict[Tensor, Any]], Share],
        run: Callable[[list[Group], dict[Tensor, Any], _C.StepOptions], tuple[_C.StepResult, bool]],
    ) -> "_C.StepResult | Measured":
        """Steps this rank's part of every parameter, and leaves new states as DTensors in `state`.

        Args:
            left: The ids of parameters that `run` leaves out.
            gathers: Returns whether a parameter is gathered; every rank then steps the whole, one parameter at a time.
            sums: Creates the callback that shares the step's sums over whole parameters with the other ranks.
            run: Steps plain tensors; also returns whether it created or removed states.
        """
        aliases: dict[int, _Alias] = {}
        local_state: dict[Tensor, Any] = defaultdict(dict)
        local_groups: list[Group] = []
        parts: list[Part] = []
        gathered: list[tuple[Group, int, DTensor]] = []
        try:
            for index, group in enumerate(groups):
                plain = []
                for place, param in enumerate(group["params"]):
                    plain.append(param)
                    if id(param) in left:
                        continue
                    if is_dtensor(param):
                        label = functools.partial(label_of, group, index, place)
                        alias = aliases[id(param)] = self._alias(param, group, state, gathers, label)
                        plain[-1] = alias.plain
                        settle_gradient(param, label)
                        is_split = param.grad is not None and bool(split_dims(param))
                        if is_split and gathers(param, group):
                            gathered.append((group, place, param))
                            plain.pop()
                            continue
                        _set_grad(alias.plain, param.grad)
                        if is_split:
                            parts.append(Part(param, alias.plain, group))
                    if param in state:
                        local_state[plain[-1]] = local_values(param, state[param])
                local_groups.append({**group, "params": plain})
            self._aliases = aliases
            norm, options = self._treated(groups, options)
            stepped = [
                param
                for group in groups
                for param in group["params"]
                if param.grad is not None and id(param) not in left
            ]
            share = sums(parts, local_state) if parts else None
            result, has_new_states = run(local_groups, local_state, _with_share(options, share))
            if result.has_wrappers:
                _refuse_wrappers(local_groups)
            if has_new_states:
                self._write_back(state, local_state, aliases, groups)
            for group, place, param in gathered:
                of_whole = _step_whole(group, place, param, state, options, run)
                if not any(local_group["params"] for local_group in local_groups):
                    result = of_whole
            if not result.is_on_device and result.skipped:
                return result if norm is None else Measured(result, norm)
            torch.autograd.graph.increment_version([param for param in stepped if is_dtensor(param)])
            return result if norm is None else Measured(result, norm)
        finally:
            for alias in aliases.values():
                alias.plain.grad = None

    def whole_of(self, plain: Tensor) -> Tensor:
        """Returns the parameter that a plain tensor stood for in the last step, or the tensor itself."""
        found: Tensor | None = next((each.param for each in self._aliases.values() if each.plain is plain), None)
        return plain if found is None else found

    def _alias(
        self, param: "DTensor", group: Group, state: dict[Tensor, Any], gathers: Gathers, label: Callable[[], str]
    ) -> _Alias:
        """Returns the alias of the step before if it is still valid, else a new one."""
        local, before = local_part(param), self._aliases.get(id(param))
        if before is not None and before.param is param:
            if before.local is local:
                return before
            if before.local.dtype != local.dtype and state.get(param):
                raise TypeError(
                    f"{label()} is {local.dtype} but was {before.local.dtype} in the step before. Cast it back, or "
                    "make a new optimizer for it (the state can be taken along with load_state_dict)."
                )
        if (reason := why_not(param, group, gathers)) is not None:
            raise NotImplementedError(f"{label()} {reason}.")
        return _Alias(param, local, local.detach())

    @staticmethod
    def _treated(groups: list[Group], options: _C.StepOptions) -> tuple[Tensor | None, _C.StepOptions]:
        """Returns the norm of all gradients on all ranks, if it is needed, and the options that clip by it."""
        if options.max_grad_norm is None and not options.check_finite:
            return None, options
        params = [param for group in groups for param in group["params"]]
        scale: Any = options.grad_scale
        norm = sum_of_squares(params).sqrt() / scale
        is_bad = ~norm.isfinite()
        if options.max_grad_norm is not None:
            scale = scale / (options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        found: Any = is_bad.float()
        if isinstance(options.found_inf, Tensor):
            found = torch.maximum(found, options.found_inf.to(found))
        else:
            found = found.clamp(min=options.found_inf)
        if options.overflow is not None:
            options.overflow.copy_(is_bad)
        if not norm.is_cuda:
            scale, found = float(scale), float(found)
        return norm, _C.StepOptions(grad_scale=scale, found_inf=found, zero_grads=options.zero_grads)

    @staticmethod
    def _write_back(
        state: dict[Tensor, Any],
        local_state: dict[Tensor, Any],
        aliases: dict[int, _Alias],
        groups: list[Group],
    ) -> None:
        """Copies the states that the step created or removed back to the optimizer's state."""
        for group in groups:
            for param in group["params"]:
                plain = aliases[id(param)].plain if id(param) in aliases else param
                if plain not in local_state:
                    continue
                local_values = local_state[plain]
                if not is_dtensor(param):
                    state[param] = local_values
                    continue
                values = state[param]
                for name in [name for name in values if name not in local_values]:
                    del values[name]
                for name, value in local_values.items():
                    if name not in values or local_value(values[name]) is not value:
                        values[name] = shared_value(param, name, value)


def _with_share(options: _C.StepOptions, share: "Share | None") -> _C.StepOptions:
    return _C.StepOptions(
        grad_scale=options.grad_scale,
        found_inf=options.found_inf,
        max_grad_norm=options.max_grad_norm,
        check_finite=options.check_finite,
        zero_grads=options.zero_grads,
        overflow=options.overflow,
        share=share,
    )


def _step_whole(
    group: Group,
    place: int,
    param: "DTensor",
    state: dict[Tensor, Any],
    options: _C.StepOptions,
    run: Callable[[list[Group], dict[Tensor, Any], _C.StepOptions], tuple[_C.StepResult, bool]],
) -> _C.StepResult:
    """Steps a parameter that every rank gathers; each rank keeps its part of parameter, gradient and state."""
    assert is_dtensor(param.grad)
    detached: Any = param.detach()
    whole: Tensor = detached.full_tensor()
    _set_grad(whole, param.grad.full_tensor())
    values = {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.get(param, {}).items()}
    wholes: dict[Tensor, Any] = defaultdict(dict, {whole: values} if values else {})
    alone = {**group, "params": [whole]}
    if "param_names" in group:
        alone["param_names"] = [group["param_names"][place]]
    result, _ = run([alone], wholes, options)
    if not result.is_on_device and result.skipped:
        if options.zero_grads:
            param.grad.zero_()
        return result
    local_part(param).copy_(local_part(part_of(whole, param)))
    assert whole.grad is not None
    local_part(param.grad).copy_(local_part(part_of(whole.grad, param)))
    for name, value in wholes[whole].items():
        if isinstance(value, Tensor) and name not in precision.SCALAR_NAMES:
            # A view would keep the whole tensor alive.
            value = part_of(value, param).clone() if value.shape == whole.shape else replicated(value, param)
        state[param][name] = value
    return result


def _refuse_wrappers(groups: list[Group]) -> None:
    for index, group in enumerate(groups):
        for place, param in enumerate(group["params"]):
            if param.grad is not None and wrappers.wraps_others(param):
                raise NotImplementedError(f"{label_of(group, index, place)} {wrappers.why_not(param, param)}.")


def _set_grad(plain: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        plain.grad = None
        return
    local = local_part(grad)
    if local.dtype != plain.dtype:
        plain.grad_dtype = local.dtype
    plain.grad = local
