"""State dicts: saves, loads and converts the states of optimizers, and stays compatible with torch's."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import precision
from .native_step import NativeStep, counter_device
from .rule import options_of, torchs_base
from .sharded import dtensors, pieces

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


class StateDicts(NativeStep):
    """Saves and loads states in torch's layout, together with drivetrain's storage formats."""

    def restore(self) -> None:
        """Follows states and groups that were loaded, copied or unpickled, and moves step counters to their device."""
        self.kept.reader = None  # The reader describes the states before the load.
        self.find_devices()
        for group in self.param_groups:
            # torch's own __setstate__() fills in what groups of its classes lack.
            if torchs_base(type(self.optimizer)) is torch.optim.Optimizer:
                for option in self.optimizer.defaults.keys() & _MAY_BE_ABSENT - {"differentiable"}:
                    group.setdefault(option, self.optimizer.defaults[option])
            for option, value in self.kept.formats.items():
                group.setdefault(option, value)
        if self.kept.loading is not None:
            self._keep_dtypes(self.kept.loading)
        self.place_step_counters()

    def place_step_counters(self) -> None:
        """Moves step counters, and the scalars of some rules, to the device where the step reads them.

        torch's Adagrad creates them on the CPU, and its state dicts keep them there. torch's `load_state_dict()` casts
        scalars to the parameter's dtype.
        """
        for param, values in states_of_params(self.optimizer.state):
            device = counter_device(param)
            for name in precision.SCALAR_NAMES & values.keys():
                value = values[name]
                if not isinstance(value, Tensor):
                    continue
                is_number = value.dtype in (torch.float32, torch.float64)
                if value.device != device or not is_number:
                    values[name] = value.detach().to(device, value.dtype if is_number else torch.float32)

    def load(self, torchs_load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
        """Loads a state dict by torch's method. After an error the optimizer is as before."""

        def remember(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            self._check_loaded(loaded)
            self.kept.loading = loaded

        handle = self.optimizer.register_load_state_dict_pre_hook(
            remember
        )  # It runs after the users' hooks, which may replace the dict.
        try:
            with pieces.in_place(self.optimizer):
                before = self.optimizer.state, self.param_groups
                try:
                    torchs_load(state_dict)
                    pieces.share_states(self.optimizer)
                except BaseException:
                    self.optimizer.state, self.optimizer.param_groups = before
                    raise
        finally:
            handle.remove()
            self.kept.loading = None

    def _check_loaded(self, loaded: dict[str, Any]) -> None:
        """Raises ValueError for state dicts that torch's loading accepts and a later step could not use."""
        name = self.class_name
        for index, (group, own) in enumerate(zip(loaded["param_groups"], self.param_groups, strict=False)):
            where = f"param_groups[{index}] of the state dict"
            version = group.get(precision.VERSION_NAME, 0)
            if version > precision.VERSION:
                raise ValueError(
                    f"{where} was written by a newer drivetrain: its storage formats have version {version}, and this "
                    f"drivetrain reads up to {precision.VERSION}. Upgrade it, or save torch_state_dict() there."
                )
            kind: Any = type(self.optimizer)
            expected = options_of(kind) & self.optimizer.defaults.keys() & own.keys()
            lacking = expected - group.keys() - _MAY_BE_ABSENT
            known = own.keys() | self.rule.also(group)
            foreign = [keys[0] for keys in _OF_OTHERS if keys[0] not in known and group.keys() >= {*keys}]
            if lacking or foreign:
                what = f"has no {', '.join(sorted(lacking))}" if lacking else f"has {', '.join(foreign)}"
                raise ValueError(f"{where} {what}: it is the state of another optimizer than {name}")
            precision.check(self.formats_of(group), where)
            rule = self.rule.name_of({**self.optimizer.defaults, **group})
            for place, key in enumerate(group["params"]):
                state = loaded["state"].get(key)
                if not state or not isinstance(state, dict):
                    continue
                needed = ["step"] if _C.optim_counts_steps(rule, precision.of({})) else []
                for entry in (*needed, *_C.optim_scalars(rule)):
                    if entry not in state:
                        raise ValueError(
                            f"parameter {place} of {where}: its state has no {entry!r}, which {name} needs"
                        )
                found = {entry for entry in _OF_ONE_CLASS if precision.has_state(state, entry)}
                if found != _OF_ONE_CLASS & {entry for entry, _ in _C.optim_states(rule)}:
                    raise ValueError(
                        f"{where} has the states {', '.join(state)}: it is the state of another optimizer than {name}"
                    )

    def save(self, torchs_save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the state dict that torch's method returns, with the version of the formats."""
        with pieces.in_place(self.optimizer):
            result: dict[str, Any] = torchs_save()
            params = pieces.params_by_key(self.optimizer, result)
            for key in params.keys() & result["state"].keys():
                result["state"][key] = dtensors.portable(params[key], result["state"][key])
        result = pieces.for_files(self.optimizer, result)
        for group in result["param_groups"]:
            has_formats = bool(self.formats_of(group))
            group.pop(precision.VERSION_NAME, None)
            if has_formats:
                group[precision.VERSION_NAME] = precision.VERSION
        return result

    def _keep_dtypes(self, saved: dict[str, Any]) -> None:
        left = self.kept.ids_left
        for saved_group, group in zip(saved["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved_group["params"], group["params"], strict=True):
                for name, value in saved["state"].get(key, {}).items() if id(param) not in left else ():
                    if isinstance(value, Tensor) and name != "step":  # torch keeps that one
                        self.optimizer.state[param][name] = value.to(param.device)

    def torch_state_dict(self) -> dict[str, Any]:
        """Returns the state dict in torch's own layout."""
        result: dict[str, Any] = self.optimizer.state_dict()
        params_by_key = pieces.params_by_key(self.optimizer, result)
        result["state"] = {
            key: precision.plain(state, params_by_key[key]) if key in params_by_key else state
            for key, state in result["state"].items()
        }
        for group in result["param_groups"]:
            if not (group.get("fused") or group.get("capturable")):
                for key in group["params"]:
                    state = result["state"].get(key, {})
                    for name in precision.SCALAR_NAMES & state.keys():
                        if isinstance(state[name], Tensor):
                            state[name] = state[name].cpu()
        result["param_groups"] = [
            {
                option: value
                for option, value in group.items()
                if option not in {*self.formats_of(group), precision.VERSION_NAME}
            }
            for group in result["param_groups"]
        ]
        return result

    def float32_value(self, param: Tensor) -> Tensor:
        """Returns a parameter's value as a new float32 tensor of its shape."""
        group = self._group_of(param)
        with pieces.in_place(self.optimizer):
            param = pieces.part_or_itself(param)
            values = dtensors.local_values(param, self.optimizer.state.get(param, {}))
            value = precision.float32_value(values, dtensors.local_part(param), self.formats_of(group))
            return dtensors.as_shard_of(param, value) if dtensors.is_dtensor(param) else value

    def float32_state(self, param: Tensor) -> dict[str, Any]:
        """Returns a new dict with a parameter's state, in which 8-bit entries are float32 tensors of its shape."""
        self._group_of(param)
        with pieces.in_place(self.optimizer):
            param = pieces.part_or_itself(param)
            return precision.without_blocks(dtensors.portable(param, self.optimizer.state.get(param, {})))

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(param is other for other in group["params"]):
                return group
        raise KeyError(f"param is a tensor of shape {tuple(param.shape)} that is not in this optimizer's param_groups")
