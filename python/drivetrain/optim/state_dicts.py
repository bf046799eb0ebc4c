"""State dicts: saves, loads and converts the states of optimizers, and stays compatible with torch's."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import pieces, precision, sharded
from .native_step import NativeStep, counter_device

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
    """Saves and loads states in torch's layout, with drivetrain's storage formats beside it."""

    _loading: dict[str, Any] | None = None  # the state dict that load_state_dict() is loading
    _reader: _C.StepReader | None = None
    _steps_as_torch: bool = False  # torch's class takes the steps (left_to_torch.py)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_max_grad_norm", "zero_grads_in_step", "_precision", "_steps_as_torch", "_left_to_torch")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accepts torch's state, whichever of its implementations wrote it, and moves step counters to their device."""
        super().__setstate__(state)
        self._reader = None  # The reader describes the states before the load.
        self._find_devices()
        for group in self.param_groups:
            # torch's own __setstate__() fills in what groups of its classes lack.
            if self._torchs_base() is torch.optim.Optimizer:
                for option in self.defaults.keys() & _MAY_BE_ABSENT - {"differentiable"}:
                    group.setdefault(option, self.defaults[option])
            for option, value in self._precision.items():
                group.setdefault(option, value)
        if self._loading is not None:
            self._keep_dtypes(self._loading)
        self._place_step_counters()

    def _torchs_base(self) -> type[torch.optim.Optimizer]:
        """Returns the torch class that this class derives from and takes its states' names from."""
        return next(each for each in type(self).__mro__ if each.__module__.partition(".")[0] == "torch")

    def _place_step_counters(self) -> None:
        """Moves step counters, and the scalars of some rules, to the device where the step reads them.

        torch's Adagrad creates them on the CPU, and its state dicts keep them there. torch's `load_state_dict()` casts
        scalars to the parameter's dtype.
        """
        for param, values in states_of_params(self.state):
            device = counter_device(param)
            for name in precision.SCALAR_NAMES & values.keys():
                value = values[name]
                if not isinstance(value, Tensor):
                    continue
                is_number = value.dtype in (torch.float32, torch.float64)
                if value.device != device or not is_number:
                    values[name] = value.detach().to(device, value.dtype if is_number else torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as torch does, but every state keeps the dtype in which it was saved.

        The next step converts states to the storage format that their group asks for, for example to 8 bits with
        state_bits=8. As in torch, the group's options are the saved ones.

        Raises:
            ValueError: The groups do not fit, as in torch, or a saved group has an option out of range. The state
            belongs to another optimizer or to a newer version of drivetrain.

            After an error the optimizer has the groups and states that it had before.
        """

        def remember(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            self._check_loaded(loaded)
            self._loading = loaded

        handle = self.register_load_state_dict_pre_hook(
            remember
        )  # It runs after the users' hooks, which may replace the dict.
        try:
            with pieces.in_place(self):
                before = self.state, self.param_groups
                try:
                    super().load_state_dict(state_dict)
                    pieces.share_states(self)
                except BaseException:
                    self.state, self.param_groups = before
                    raise
        finally:
            handle.remove()
            self._loading = None

    def _option_names(self, group: dict[str, Any]) -> set[str]:
        """Returns the names of the options that the group's rule has."""
        return {*self.defaults}

    def _check_loaded(self, loaded: dict[str, Any]) -> None:
        """Raises ValueError for state dicts that torch's loading accepts and a later step could not use."""
        name = type(self).__name__
        for index, (group, own) in enumerate(zip(loaded["param_groups"], self.param_groups, strict=False)):
            where = f"param_groups[{index}] of the state dict"
            version = group.get(precision.VERSION_NAME, 0)
            if version > precision.VERSION:
                raise ValueError(
                    f"{where} was written by a newer drivetrain: its storage formats have version {version}, and this "
                    f"drivetrain reads up to {precision.VERSION}. Upgrade it, or save torch_state_dict() there."
                )
            lacking = [key for key in self.defaults.keys() & own.keys() - group.keys() if key not in _MAY_BE_ABSENT]
            known = own.keys() | self._option_names(group)
            foreign = [keys[0] for keys in _OF_OTHERS if keys[0] not in known and group.keys() >= {*keys}]
            if lacking or foreign:
                what = f"has no {', '.join(sorted(lacking))}" if lacking else f"has {', '.join(foreign)}"
                raise ValueError(f"{where} {what}: it is the state of another optimizer than {name}")
            precision.check({key: value for key, value in group.items() if key in precision.DEFAULTS}, where)
            rule = self._rule({**self.defaults, **group})
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

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict as torch does; groups with drivetrain's options also hold the version of its formats.

        8-bit states of DTensors are float32 DTensors in it, because their blocks belong to one rank's part and another
        number of ranks has other parts. After loading, the next step converts them to 8 bits again, to the same codes
        where the parts are the same.
        """
        with pieces.in_place(self):
            result = super().state_dict()
            params = self._params_by_key(result)
            for key in params.keys() & result["state"].keys():
                result["state"][key] = sharded.portable(params[key], result["state"][key])
        result = pieces.for_files(self, result)
        for group in result["param_groups"]:
            group.pop(precision.VERSION_NAME, None)
            if precision.DEFAULTS.keys() & group.keys():
                group[precision.VERSION_NAME] = precision.VERSION
        return result

    def _keep_dtypes(self, saved: dict[str, Any]) -> None:
        left = self._ids_left
        for saved_group, group in zip(saved["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved_group["params"], group["params"], strict=True):
                for name, value in saved["state"].get(key, {}).items() if id(param) not in left else ():
                    if isinstance(value, Tensor) and name != "step":  # torch keeps that one
                        self.state[param][name] = value.to(param.device)

    def _params_by_key(self, state_dict: dict[str, Any]) -> dict[Any, Tensor]:
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        return dict(zip(keys, params, strict=True))

    def torch_state_dict(self) -> dict[str, Any]:
        """Returns state_dict() in torch's own layout, for training to continue with torch's class.

        Compressed states become float32 tensors, and drivetrain's own entries are left out. Step counters and scalars
        move to the CPU unless the group sets `fused` or `capturable`. load_state_dict() loads it back. torch's state
        has no place for the bits of a master beyond the parameter's; float32_value() returns them.
        """
        result = self.state_dict()
        params_by_key = self._params_by_key(result)
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
            {option: value for option, value in group.items() if option not in precision.NAMES}
            for group in result["param_groups"]
        ]
        return result

    def float32_value(self, param: Tensor) -> Tensor:
        """Returns a parameter's value as a new float32 tensor of its shape.

        Includes the bits of its master, remainder or compensation, if the optimizer keeps one.

        Raises:
            KeyError: The parameter is not this optimizer's.
        """
        group = self._group_of(param)
        with pieces.in_place(self):
            param = pieces.part_or_itself(param)
            values = sharded.local_values(param, self.state.get(param, {}))
            value = precision.float32_value(values, sharded.local_part(param), group)
            return sharded.as_shard_of(param, value) if sharded.is_dtensor(param) else value

    def float32_state(self, param: Tensor) -> dict[str, Any]:
        """Returns a new dict with a parameter's state, in which 8-bit entries are float32 tensors of its shape.

        Code that appends, cuts or permutes a parameter's rows may edit the tensors of its shape, and keep the dict as
        `optimizer.state[param]`. The next step converts it to the group's storage format. Other entries are as in the
        state: counters, and the `param_remainder`, `param_compensation` or `param_master` of a 16-bit parameter, which
        has the parameter's shape. The dict is empty before the parameter's first step.

        Raises:
            KeyError: The parameter is not this optimizer's.
            TypeError: An entry for 8-bit codes holds something else.
        """
        self._group_of(param)
        with pieces.in_place(self):
            param = pieces.part_or_itself(param)
            return precision.without_blocks(sharded.portable(param, self.state.get(param, {})))

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(param is other for other in group["params"]):
                return group
        raise KeyError(f"param is a tensor of shape {tuple(param.shape)} that is not in this optimizer's param_groups")
