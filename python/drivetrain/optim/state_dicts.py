"""State dicts: saves, loads and converts the states of optimizers, and stays compatible with torch's."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import precision
from .engine import Engine
from .kept import stands_for_torchs
from .native_step import counter_device
from .rule import Group, options_of, torchs_base
from .sharded import dtensors, pieces
from .twins import on_host

# Options that dicts of older versions of torch and of other packages may lack. torch fills most of them in.
_MAY_BE_ABSENT = {
    *("amsgrad", "capturable", "centered", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"),
    *("momentum", "nesterov"),
}
# Options by which groups of other classes are recognized: a group has all of a tuple, and this class lacks the first. A
# script's own key, such as `rho` or `clip`, makes no group another class's.
_OF_OTHERS = (
    *(("amsgrad",), ("momentum_decay",), ("always_adapt", "trust_clip"), ("warmup_steps", "weight_lr_power")),
    ("eps", "betas"),
)
# States that identify a class whose groups have the same options as another's.
_OF_ONE_CLASS = {"exp_inf"}


def states_of_params(state: dict[Any, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yields the states of parameters, without what a script keeps in an optimizer's state under other keys."""
    return ((key, values) for key, values in state.items() if isinstance(key, Tensor) and isinstance(values, dict))


def restore(engine: Engine) -> None:
    """Follows states and groups that were loaded, copied or unpickled, and moves step counters to their device."""
    optimizer, kept = engine.optimizer, engine.kept
    kept.reader = None  # The reader describes the states before the load.
    engine.find_devices()
    defaults: Group = {}
    if torchs_base(type(optimizer)) is torch.optim.Optimizer:  # torch's own __setstate__() fills in its classes' groups
        known = _MAY_BE_ABSENT - {"differentiable"}
        defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    for group in engine.param_groups:
        for option, value in (defaults | kept.formats).items():
            group.setdefault(option, value)
    if (saved := kept.loading) is not None:
        for saved_group, group in zip(saved["param_groups"], engine.param_groups, strict=True):
            asked, states = engine.precision_of(group), {}
            if stands_for_torchs(type(optimizer)):
                states = dict(_C.optim_states(engine.rule.name_of(engine.read(group))))
            for key, param in zip(saved_group["params"], group["params"], strict=True):
                for name, value in saved["state"].get(key, {}).items():
                    is_cast = name in states and _C.optim_state_dtype(asked, param, states[name]) is None
                    # torch casts to the parameter's dtype, except for the step counter.
                    if isinstance(value, Tensor) and name != "step" and not is_cast:
                        optimizer.state[param][name] = value.to(param.device)
    place_step_counters(engine)


def place_step_counters(engine: Engine) -> None:
    """Moves step counters, and the scalars of some rules, to the device where the step reads them.

    torch's Adagrad creates them on the CPU, and its state dicts keep them there. torch's `load_state_dict()` casts
    scalars to the parameter's dtype.
    """
    for param, values in states_of_params(engine.optimizer.state):
        device = counter_device(param)
        for name in precision.SCALAR_NAMES & values.keys():
            value = values[name]
            if isinstance(value, Tensor):
                dtype = value.dtype if value.dtype in (torch.float32, torch.float64) else torch.float32
                if (value.device, value.dtype) != (device, dtype):
                    values[name] = value.detach().to(device, dtype)


def load(engine: Engine, torchs_load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Loads a state dict by torch's method. After an error the optimizer is as before."""
    optimizer, kept = engine.optimizer, engine.kept

    def remember(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
        _check_loaded(engine, loaded)
        kept.loading = loaded

    # It runs after the users' hooks, which may replace the dict.
    handle = optimizer.register_load_state_dict_pre_hook(remember)
    try:
        with on_host(optimizer, with_values=False), pieces.in_place(optimizer):
            before = optimizer.state, engine.param_groups
            try:
                torchs_load(state_dict)
                pieces.share_states(optimizer)
            except BaseException:
                optimizer.state, optimizer.param_groups = before
                raise
    finally:
        handle.remove()
        kept.loading = None


def _check_loaded(engine: Engine, loaded: dict[str, Any]) -> None:
    """Raises ValueError for state dicts that torch's loading accepts and a later step could not use."""
    name, defaults = engine.class_name, engine.optimizer.defaults
    kind: Any = type(engine.optimizer)
    for index, (group, own) in enumerate(zip(loaded["param_groups"], engine.param_groups, strict=False)):
        where = f"param_groups[{index}] of the state dict"
        version = group.get(precision.VERSION_NAME, 0)
        if version > precision.VERSION:
            raise ValueError(
                f"{where} was written by a newer drivetrain: its storage formats have version {version}, and this "
                f"drivetrain reads up to {precision.VERSION}. Upgrade it, or save torch_state_dict() there."
            )
        lacking = (options_of(kind) & defaults.keys() & own.keys()) - group.keys() - _MAY_BE_ABSENT
        known = own.keys() | engine.rule.also(group)
        # torch's classes load what has the entries that they need.
        others = () if stands_for_torchs(kind) else _OF_OTHERS
        foreign = [keys[0] for keys in others if keys[0] not in known and group.keys() >= {*keys}]
        if lacking or foreign:
            what = f"has no {', '.join(sorted(lacking))}" if lacking else f"has {', '.join(foreign)}"
            raise ValueError(f"{where} {what}: it is the state of another optimizer than {name}")
        precision.check(engine.formats_of(group), where)
        rule = engine.rule.name_of(defaults | group)
        needed = ["step"] * _C.optim_counts_steps(rule, precision.of({})) + _C.optim_scalars(rule)
        own_states = _OF_ONE_CLASS & {entry for entry, _ in _C.optim_states(rule)}
        for place, key in enumerate(group["params"]):
            state = loaded["state"].get(key)
            if not state or not isinstance(state, dict):
                continue
            if absent := [entry for entry in needed if entry not in state]:
                raise ValueError(f"parameter {place} of {where}: its state has no {absent[0]!r}, which {name} needs")
            if {entry for entry in _OF_ONE_CLASS if precision.has_state(state, entry)} != own_states:
                raise ValueError(
                    f"{where} has the states {', '.join(state)}: it is the state of another optimizer than {name}"
                )


def save(engine: Engine, torchs_save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the state dict that torch's method returns, with the version of the formats."""
    with on_host(engine.optimizer, with_values=False), pieces.in_place(engine.optimizer):
        result: dict[str, Any] = torchs_save()
        params = pieces.params_by_key(engine.optimizer, result)
        for key in params.keys() & result["state"].keys():
            result["state"][key] = dtensors.portable(params[key], result["state"][key])
    result = pieces.for_files(engine.optimizer, result)
    for group in result["param_groups"]:
        has_formats = bool(engine.formats_of(group))
        group.pop(precision.VERSION_NAME, None)
        if has_formats:
            group[precision.VERSION_NAME] = precision.VERSION
    return result


def torch_state_dict(engine: Engine) -> dict[str, Any]:
    """Returns the state dict in torch's own layout."""
    result: dict[str, Any] = engine.optimizer.state_dict()
    params_by_key = pieces.params_by_key(engine.optimizer, result)
    result["state"] = {
        key: precision.plain(state, params_by_key[key]) if key in params_by_key else state
        for key, state in result["state"].items()
    }
    for group in result["param_groups"]:
        on_cpu = () if group.get("fused") or group.get("capturable") else group["params"]
        for state in (result["state"].get(key, {}) for key in on_cpu):
            for name in precision.SCALAR_NAMES & state.keys():
                if isinstance(state[name], Tensor):
                    state[name] = state[name].cpu()
        for option in (*engine.formats_of(group), precision.VERSION_NAME):
            group.pop(option, None)
    return result


def full_state_dict(optimizer: torch.optim.Optimizer, rank: int | None = 0) -> dict[str, Any]:
    """Returns an optimizer's state dict with whole tensors in place of DTensors, which one process can load.

    All ranks gather one state at a time, so that no rank but `rank` has more than one whole state. Every rank must
    call it. It takes any optimizer with DTensor states, such as DistributedDataParallel(shard=...) gives.

    Args:
        optimizer: The optimizer.
        rank: The global rank that keeps the result. None keeps it on every rank.

    Returns:
        The state dict on that rank, with tensors on the CPU; an empty dict on the others.
    """
    keeps = rank is None or not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank
    state_dict = optimizer.state_dict()
    states: dict[Any, Any] = {}
    for key, values in state_dict["state"].items():
        states[key] = {}
        for name, value in values.items():
            found = value.full_tensor() if dtensors.is_dtensor(value) else value
            if keeps:
                states[key][name] = found.cpu() if isinstance(found, Tensor) else found
    return {**state_dict, "state": states} if keeps else {}


def float32_value(engine: Engine, param: Tensor) -> Tensor:
    """Returns a parameter's value as a new float32 tensor of its shape."""
    asked = engine.precision_of(_group_of(engine, param))
    with on_host(engine.optimizer) as host, pieces.in_place(engine.optimizer):
        param = pieces.part_or_itself(param if host is None else host.of(param))
        local = dtensors.local_part(param)
        values = dtensors.local_values(param, engine.optimizer.state.get(param, {}))
        extra = _C.optim_param_extra(asked, local)
        value = _C.optim_load_param(local, None if extra is None else values.get(extra[0])).clone()
        return dtensors.as_shard_of(param, value) if dtensors.is_dtensor(param) else value


def float32_state(engine: Engine, param: Tensor) -> dict[str, Any]:
    """Returns a new dict with a parameter's state, in which coded entries are float32 tensors of its shape."""
    _group_of(engine, param)
    with on_host(engine.optimizer) as host, pieces.in_place(engine.optimizer):
        param = pieces.part_or_itself(param if host is None else host.of(param))
        values = dtensors.portable(param, engine.optimizer.state.get(param, {}))
        return precision.without_blocks(values, dtensors.local_part(param))


def _group_of(engine: Engine, param: Tensor) -> Group:
    for group in engine.param_groups:
        if any(param is other for other in group["params"]):
            return group
    raise KeyError(f"param is a tensor of shape {tuple(param.shape)} that is not in this optimizer's param_groups")
