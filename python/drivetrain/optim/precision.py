"""Storage formats of parameters and states: checks a group's options, and creates and converts states."""

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _C

Group = dict[str, Any]
StateBits = Literal[32, 16, 8, "fp8"]

# The dtypes of 8-bit codes, of all kinds of states.
_BLOCK_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
EXTRA_NAMES = _C.optim_extra_names()
# Entries of a parameter's state that are tensors of one element: its step counter, and the scalars of some rules.
SCALAR_NAMES = frozenset(("step", *_C.optim_scalar_names()))
DEFAULTS: Group = {"state_bits": None, "master_bits": None, "min_8bit_size": 4096, "rounding": "nearest"}

# The version of the storage formats. Groups of state dicts that use any of these options hold it.
VERSION = 1
VERSION_NAME = "storage_version"
NAMES = {*DEFAULTS, VERSION_NAME}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "state_bits": (None, 32, 16, 8, "fp8"),
    "master_bits": (None, 32, 24),
    "rounding": ("nearest", "stochastic", "kahan"),
}


def check(group: Group, where: str = "") -> None:
    """Raises ValueError for an option that is out of range. DEFAULTS holds the options that the group omits."""
    options = DEFAULTS | group
    prefix = f"{where}: " if where else ""
    for option, choices in _CHOICES.items():
        if options[option] not in choices:
            expected = ", ".join(map(repr, choices))
            raise ValueError(f"{prefix}{option} is {options[option]!r}, expected one of {expected}")
    size = options["min_8bit_size"]
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{prefix}min_8bit_size is {size!r}, expected a whole number of elements, 0 or more")
    if options["rounding"] != "nearest" and options["master_bits"] is not None:
        raise ValueError(
            f"{prefix}rounding={options['rounding']!r} is for parameters without a master, but master_bits is "
            f"{options['master_bits']}: leave one of them out"
        )


_NOTHING_ASKED = _C.Precision(state_bits=0, float8=False, master_bits=0, min_8bit_size=0, rounding="nearest")


def of(group: Group) -> _C.Precision:
    """Converts the group's options for the native step.

    Raises:
        ValueError: An option is out of range.
    """
    if not DEFAULTS.keys() & group.keys():
        return _NOTHING_ASKED
    check(group)
    options = DEFAULTS | group
    is_float8 = options["state_bits"] == "fp8"
    return _C.Precision(
        state_bits=8 if is_float8 else options["state_bits"] or 0,
        float8=is_float8,
        master_bits=options["master_bits"] or 0,
        min_8bit_size=options["min_8bit_size"],
        rounding=options["rounding"],
    )


def state_as_asked(
    state: dict[str, Any],
    name: str,
    kind: int,
    param: Tensor,
    precision: _C.Precision,
    label: str,
    initial: float | None,
    conversions: _C.Conversions,
) -> dict[str, Tensor | None]:
    """Returns what to write into `state`, or to remove from it (None), so that its entry `name` has the group's format.

    Args:
        state: The parameter's state.
        name: The entry's name in torch's class.
        kind: The state's kind, from the native rule. It determines the shape; some parameters have no state of some
            kinds.
        param: The parameter.
        precision: The group's options.
        label: Names the parameter in errors.
        initial: The value that fills a new state. None copies the parameter.
        conversions: Fills the returned tensors when it runs.

    Raises:
        ValueError: An 8-bit entry lacks its scales.
    """
    sizes = _C.optim_state_shape(param, kind)
    if sizes is None:
        return {}
    dtype = _C.optim_state_dtype(precision, param, kind)
    codes, scales = codes_name(name), scales_name(name)
    where = codes if state.get(name) is None else name
    found = state.get(where)
    if found is None:
        if initial is None:
            stored, stored_scales = conversions.converted_state(param, param.detach(), None, dtype or param.dtype)
        else:
            stored, stored_scales = conversions.new_state(param, sizes, dtype, initial)
        if dtype is None:
            return {name: stored}
    else:
        if where == codes:
            check_codes(found, _C.optim_block_dtypes(kind), f"{label}: its state {codes!r}")
        if not isinstance(found, Tensor) or list(found.shape) != sizes or found.device != param.device:
            return {}  # The step raises for it.
        if _C.optim_is_state_as(param, found, state.get(scales), dtype):
            return {}
        try:
            stored, stored_scales = conversions.converted_state(param, found, state.get(scales), dtype or param.dtype)
        except ValueError as error:
            raise ValueError(f"{label}: its state {where!r}: {error}") from error
    if stored_scales is None:
        return {name: stored, codes: None, scales: None}
    return {name: None, codes: stored, scales: stored_scales}


def check_codes(found: Any, dtypes: Collection[torch.dtype], what: str) -> None:
    """Raises TypeError if a state's 8-bit codes are none, as after torch.cat() of codes and values."""
    if isinstance(found, Tensor) and found.dtype not in dtypes:
        expected = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise TypeError(
            f"{what} is {found.dtype}, expected 8-bit codes ({expected}): edit the values that "
            "optimizer.float32_state(param) returns, and keep the result as optimizer.state[param]."
        )


def has_state(state: dict[str, Any], name: str) -> bool:
    """Returns whether there is an entry `name` in any storage format."""
    return state.get(name) is not None or state.get(codes_name(name)) is not None


def extra_as_asked(
    state: dict[str, Any], param: Tensor, precision: _C.Precision, label: str, conversions: _C.Conversions
) -> dict[str, Tensor | None]:
    """Returns what to write into `state` so that a 16-bit parameter has the remainder, compensation or master asked
    for.

    May round the parameter again, from its value in the earlier format.
    """
    extra = _C.optim_param_extra(precision, param)
    if extra is None:
        return dict.fromkeys(EXTRA_NAMES)
    name, dtype = extra
    found = state.get(name)
    if (
        isinstance(found, Tensor)
        and found.dtype == dtype
        and found.shape == param.shape
        and found.device == param.device
    ):
        return {}
    before = next((state[key] for key in EXTRA_NAMES if isinstance(state.get(key), Tensor)), None)
    if before is not None and before.shape != param.shape:
        raise ValueError(f"{label}: its state {name!r} has shape {tuple(before.shape)}, expected {tuple(param.shape)}")
    try:
        return dict.fromkeys(EXTRA_NAMES) | {name: conversions.new_extra(param, before, dtype)}
    except TypeError as error:
        raise TypeError(f"{label}: {error}") from error


def codes_name(name: str) -> str:
    """Returns the key of a state's 8-bit codes."""
    return f"{name}_codes"


def scales_name(name: str) -> str:
    """Returns the key of the scales of a state's 8-bit codes."""
    return f"{name}_scales"


def float32_value(state: dict[str, Any], param: Tensor, group: Group) -> Tensor:
    """Returns the parameter's value, including its remainder, compensation or master, as a new float32 tensor."""
    extra = _C.optim_param_extra(of(group), param)
    return _C.optim_load_param(param, None if extra is None else state.get(extra[0])).clone()


def is_of_blocks(name: str) -> bool:
    """Returns whether a state's entry holds 8-bit codes or their scales."""
    return name.endswith(("_codes", "_scales"))


def without_blocks(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state with its 8-bit entries as float32 tensors under their plain names."""
    result = {}
    for name, value in state.items():
        if name.endswith("_codes"):
            check_codes(value, _BLOCK_DTYPES, f"the state {name!r}")
            name = name.removesuffix("_codes")
            value = _C.optim_load_state(value, state.get(scales_name(name)))
        if not name.endswith("_scales"):
            result[name] = value
    return result


def plain(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Returns the state in torch's layout for a float32 parameter: compressed entries as float32, without masters."""
    result = {}
    for name, value in without_blocks(state).items():
        if name in EXTRA_NAMES:
            continue
        is_values = isinstance(value, Tensor) and name not in SCALAR_NAMES and value.is_floating_point()
        if is_values and value.dtype != param.dtype:
            value = value.float()
        result[name] = value
    return result
