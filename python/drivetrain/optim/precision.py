"""Storage formats of parameters and states: checks a group's options, and creates and converts states."""

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _C

Group = dict[str, Any]
StateBits = Literal[32, 16, 8, 4, "fp8"]

# The dtypes of codes, of all kinds of states.
_BLOCK_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
EXTRA_NAMES = _C.optim_extra_names()
# Entries of a parameter's state that are tensors of one element: its step counter, and the scalars of some rules.
SCALAR_NAMES = frozenset(("step", *_C.optim_scalar_names()))
DEFAULTS: Group = {"state_bits": None, "master_bits": None, "min_8bit_size": 4096, "rounding": "nearest"}

# The version of the storage formats. Groups of state dicts that use any of these options hold it.
VERSION = 1
VERSION_NAME = "storage_version"

_CHOICES: dict[str, tuple[Any, ...]] = {
    "state_bits": (None, 32, 16, 8, 4, "fp8"),
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


def make_state(
    state: dict[str, Any],
    name: str,
    kind: int,
    param: Tensor,
    precision: _C.Precision,
    label: str,
    initial: float | None,
    conversions: _C.Conversions,
) -> bool:
    """Creates the entry `name` of a parameter's state, or converts it to the group's format.

    The kind, from the native rule, determines the shape; some parameters have no state of some kinds. `initial` fills a
    new state; None copies the parameter. Tensors are filled when `conversions` runs.

    Returns:
        True if there was no such entry in any format.

    Raises:
        ValueError: An entry with codes lacks its scales.
    """
    sizes = _C.optim_state_shape(param, kind)
    if sizes is None:
        return False
    dtype = _C.optim_state_dtype(precision, param, kind)
    codes, scales = f"{name}_codes", f"{name}_scales"
    where = codes if state.get(name) is None else name
    found = state.get(where)
    if found is None:
        if initial is None:
            stored, stored_scales = conversions.converted_state(param, param.detach(), None, dtype or param.dtype)
        else:
            stored, stored_scales = conversions.new_state(param, sizes, dtype, initial)
    else:
        if where == codes:
            check_codes(found, _C.optim_block_dtypes(kind), f"{label}: its state {codes!r}")
        is_whole = isinstance(found, Tensor) and (list(found.shape) == sizes or is_packed(found, state.get(scales)))
        if not is_whole or found.device != param.device:
            return False  # The step raises for it.
        if _C.optim_is_state_as(param, found, state.get(scales), dtype):
            return False
        try:
            stored, stored_scales = conversions.converted_state(param, found, state.get(scales), dtype or param.dtype)
        except ValueError as error:
            raise ValueError(f"{label}: its state {where!r}: {error}") from error
    is_coded = stored_scales is not None
    _write(
        state,
        {name: None, codes: stored, scales: stored_scales} if is_coded else {name: stored, codes: None, scales: None},
    )
    return found is None


def _write(state: dict[str, Any], entries: dict[str, Tensor | None]) -> None:
    """Writes entries into a state; None removes one."""
    for name, value in entries.items():
        if value is None:
            state.pop(name, None)
        else:
            state[name] = value


def check_codes(found: Any, dtypes: Collection[torch.dtype], what: str) -> None:
    """Raises TypeError if a state's codes are none, as after torch.cat() of codes and values."""
    if isinstance(found, Tensor) and found.dtype not in dtypes:
        expected = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise TypeError(
            f"{what} is {found.dtype}, expected codes ({expected}): edit the values that "
            "optimizer.float32_state(param) returns, and keep the result as optimizer.state[param]."
        )


def has_state(state: dict[str, Any], name: str) -> bool:
    """Returns whether there is an entry `name` in any storage format."""
    return state.get(name) is not None or state.get(f"{name}_codes") is not None


def make_extra(
    state: dict[str, Any], param: Tensor, precision: _C.Precision, label: str, conversions: _C.Conversions
) -> None:
    """Gives the state of a 16-bit parameter the remainder, compensation or master asked for, and removes others.

    May round the parameter again, from its value in the earlier format.
    """
    extra = _C.optim_param_extra(precision, param)
    if extra is None:
        _write(state, dict.fromkeys(EXTRA_NAMES))
        return
    name, dtype = extra
    found = state.get(name)
    wanted = (dtype, param.shape, param.device)
    if isinstance(found, Tensor) and (found.dtype, found.shape, found.device) == wanted:
        return
    before = next((state[key] for key in EXTRA_NAMES if isinstance(state.get(key), Tensor)), None)
    if before is not None and before.shape != param.shape:
        raise ValueError(f"{label}: its state {name!r} has shape {tuple(before.shape)}, expected {tuple(param.shape)}")
    try:
        _write(state, dict.fromkeys(EXTRA_NAMES) | {name: conversions.new_extra(param, before, dtype)})
    except TypeError as error:
        raise TypeError(f"{label}: {error}") from error


def is_of_blocks(name: str) -> bool:
    """Returns whether a state's entry holds codes or their scales."""
    return name.endswith(("_codes", "_scales"))


def is_packed(codes: Tensor, scales: Any) -> bool:
    """Returns whether an entry holds 4-bit codes: two of them in each byte of a vector, in memory order."""
    return isinstance(scales, Tensor) and _C.optim_is_packed(codes, scales)


def without_blocks(state: dict[str, Any], param: Tensor | None = None) -> dict[str, Any]:
    """Returns a state with its coded entries as float32 tensors under their plain names.

    4-bit entries get the shape of `param`, or are vectors in memory order without it.
    """
    result = {}
    for name, value in state.items():
        if name.endswith("_codes"):
            check_codes(value, _BLOCK_DTYPES, f"the state {name!r}")
            name = name.removesuffix("_codes")
            value = _C.optim_load_state(value, state.get(f"{name}_scales"), param)
        if not name.endswith("_scales"):
            result[name] = value
    return result


def plain(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Returns the state in torch's layout for a float32 parameter: compressed entries as float32, without masters."""

    def converted(name: str, value: Any) -> Any:
        is_values = isinstance(value, Tensor) and name not in SCALAR_NAMES and value.is_floating_point()
        return value.float() if is_values and value.dtype != param.dtype else value

    return {
        name: converted(name, value) for name, value in without_blocks(state, param).items() if name not in EXTRA_NAMES
    }
