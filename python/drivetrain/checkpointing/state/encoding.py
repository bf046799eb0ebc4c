"""Encodes training state as JSON values and named tensors, and decodes it, without pickle.

JSON has no tuples, sets, bytes, infinities or keys other than text. An object with one key that begins with "$" stands
for such a value: {"$tuple": [1, 2]}. The table `_DECODERS` lists all of them.
"""

import base64
import collections
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...optim.sharded.dtensors import is_dtensor
from .shards import JSON, KEY, Shard, describe_mesh, part_of

_INLINE_BYTES = 64  # CPU tensors up to this size, such as step counters, are part of the JSON value
_INLINE_ARRAY_BYTES = 4096  # NumPy arrays up to this size, such as random states
_MAX_DEPTH = 100
_PLACED = ("model", "optimizer", "gradients")  # heads of paths at which sharded tensors can be restored
_INT64 = range(-(2**63), 2**63)
_ITEMS = {"$set": set, "$frozenset": frozenset, "$tuple": tuple, "$size": torch.Size}
_PAIRS = {"$dict": dict, "$ordered": collections.OrderedDict, "$counter": collections.Counter}
_ITEM_MARKS: dict[type, str] = {kind: mark for mark, kind in _ITEMS.items()}
_PAIR_MARKS: dict[type, str] = {kind: mark for mark, kind in _PAIRS.items()}


class Encoder:
    """Encodes values and collects their tensors under names that say where they come from.

    Attributes:
        tensors: The collected tensors by name, contiguous and detached. They share memory with the encoded ones where
            those are contiguous. A DTensor is represented by this rank's part, on one rank of those with replicas of
            it.
        meshes: The device meshes of DTensors, to which their descriptions refer by index.
    """

    def __init__(self, is_own: Callable[[Tensor], bool], own_prefix: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.meshes: list[JSON] = []
        self._taken: set[str] = set()
        self._is_own, self._own_prefix = is_own, own_prefix
        self._names: dict[tuple[Any, ...], str] = {}  # tied tensors are saved once
        self._owned: list[Tensor] = []  # keeps the addresses in `_names` from being used again

    def encode(self, value: Any, path: str, depth: int = 0) -> JSON:
        """Returns `value` as JSON, with references to tensors. A TypeError names the place of what has no encoding."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value in _INT64 else {"$int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if depth > _MAX_DEPTH:
            raise TypeError(f"{path} is nested more than {_MAX_DEPTH} levels deep, or contains itself")
        if isinstance(value, Tensor):
            return self._tensor(value, path)

        def inner(items: Sequence[Any]) -> list[JSON]:
            return [self.encode(item, f"{path}/{index}", depth + 1) for index, item in enumerate(items)]

        def pairs(items: Mapping[Any, Any]) -> list[JSON]:
            return [
                [self.encode(key, f"a key of {path}", depth + 1), self.encode(item, f"{path}/{key}", depth + 1)]
                for key, item in items.items()
            ]

        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}/{key}", depth + 1) for key, item in value.items()}
        if kind is list:
            return inner(value)
        if kind in _ITEM_MARKS:
            return {_ITEM_MARKS[kind]: inner(list(value))}
        if kind in _PAIR_MARKS:
            return {_PAIR_MARKS[kind]: pairs(value)}
        if kind is collections.deque:
            return {"$deque": [inner(list(value)), value.maxlen]}
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": _text(value)}
        if kind is complex:
            return {"$complex": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if kind is torch.dtype:
            return {"$dtype": _dtype_name(value)}
        if kind is torch.device:
            return {"$device": str(value)}
        if (encoded := self._array(value, path)) is not None:
            return encoded
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint has no encoding for. Expected "
            "are numbers, text, bytes, tensors, NumPy arrays, or lists, tuples, sets and dicts of them. Convert it in "
            "state_dict() and back in load_state_dict()."
        )

    def _tensor(self, value: Tensor, path: str) -> JSON:
        if value.is_nested:
            raise TypeError(
                f"{path} is a nested tensor, expected a plain one: return its values() and offsets(), or unbind(), in "
                "state_dict(), and make it again in load_state_dict()"
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            what = "quantized" if value.is_quantized else f"of layout {value.layout} on {value.device}"
            raise TypeError(f"{path} is a tensor {what}, expected a dense tensor with values")
        if is_dtensor(value):
            return self._shard(value, path)
        handles = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
        # It has no memory of its own, as after _make_wrapper_subclass.
        if handles and (is_traceable_wrapper_subclass(value) or (value.nbytes > 0 and not value.data_ptr())):
            raise TypeError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, whose values are in other tensors, "
                "expected a plain tensor: return those tensors in state_dict(), and make it again in load_state_dict()"
            )
        value = value.detach().resolve_conj().resolve_neg()
        # Files of tensors have the whole model, for readers without drivetrain.
        if value.device.type == "cpu" and value.nbytes <= _INLINE_BYTES and not path.startswith("model/"):
            raw = bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""
            return {"$small": [_dtype_name(value.dtype), list(value.shape), _text(raw)]}
        name = self._collect(value, self._own_prefix + path if self._is_own(value) else path)
        # empty_like keeps the strides of tensors without gaps and overlaps only.
        is_permuted = not value.is_contiguous() and torch.empty_like(value, device="meta").stride() == value.stride()
        return {"$tensor": name, "stride": list(value.stride())} if is_permuted else {"$tensor": name}

    def _array(self, value: Any, path: str) -> JSON:
        """Returns a NumPy scalar or array of numbers as JSON, with a tensor if it is large; None for other values."""
        numpy = sys.modules.get("numpy")
        if numpy is None or type(value).__module__ != "numpy" or not isinstance(value, numpy.generic | numpy.ndarray):
            return None
        if isinstance(value, numpy.matrix):  # it would come back as an array, whose products differ
            return None
        if value.dtype.kind not in "biufc":
            return None
        if value.nbytes <= _INLINE_ARRAY_BYTES:
            mark = "$ndarray" if isinstance(value, numpy.ndarray) else "$scalar"
            return {mark: [value.dtype.str, list(value.shape), _text(value.tobytes())]}
        data = numpy.ascontiguousarray(value)
        if not data.flags.writeable:  # which torch requires of an array that it shares
            data = data.copy()
        shared = torch.from_numpy(data.reshape(-1).view(numpy.uint8))
        return {"$array": [value.dtype.str, list(value.shape), self._tensor(shared, path)]}

    def _shard(self, value: Any, path: str) -> JSON:
        """Encodes a DTensor by this rank's part and its place in the whole."""
        if path.split("/")[0] not in _PLACED:
            raise NotImplementedError(
                f"{path} is a DTensor, expected DTensors in the model and its optimizers only: return value.to_local() "
                "in state_dict(), or the whole by value.full_tensor()"
            )
        local, offset, owner = part_of(value, path)
        if (mesh := describe_mesh(value.device_mesh)) not in self.meshes:
            self.meshes.append(mesh)
        is_saved_here = self._own_prefix in ("", f"rank{owner}/")
        name = self._collect(local, f"rank{owner}/{path}" if self._own_prefix else path, owner, is_saved_here)
        return {
            "$shard": {
                "of": path,
                "tensor": {"$tensor": name},
                "shape": list(value.shape),
                "offset": None if offset is None else list(offset),
                "local": list(local.shape),
                "mesh": self.meshes.index(mesh),
                "placements": [str(place) for place in value.placements],
            }
        }

    def _collect(self, value: Tensor, name: str, owner: int | None = None, is_saved_here: bool = True) -> str:
        """Collects a tensor under a name, or under the one that it has already, which is returned."""
        key = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), owner)
        if value.numel() and key in self._names:
            return self._names[key]
        while name in self._taken:  # A key may contain the separator.
            name += "~"
        self._taken.add(name)
        self._names[key] = name
        self._owned.append(value)
        if is_saved_here:
            self.tensors[name] = value.contiguous()
        return name


def decode(value: JSON, tensors: Mapping[str, Tensor]) -> Any:
    """Returns what `Encoder.encode` was given. Tensors are on the CPU; a name may occur twice and is then shared."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    if mark not in {**_DECODERS, **_ITEMS, **_PAIRS}:
        raise ValueError(f"the state has the mark {mark!r}, which this drivetrain does not know: upgrade drivetrain")
    found = _DECODERS.get(mark, decode)(value[mark], tensors)
    if mark in _ITEMS:
        return _ITEMS[mark](found)
    if mark in _PAIRS:
        return _PAIRS[mark](dict(found))
    if "stride" not in value:
        return found
    return torch.empty_strided(found.shape, value["stride"], dtype=found.dtype, device="cpu").copy_(found)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _small(content: JSON) -> Tensor:
    name, shape, text = content
    raw, dtype = bytearray(base64.b64decode(text)), getattr(torch, name)
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _decode_numpy(content: JSON) -> Any:
    import numpy

    dtype, shape, text = content
    return numpy.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape).copy()


_DECODERS: dict[str, Callable[[JSON, Mapping[str, Tensor]], Any]] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$shard": lambda part, tensors: Shard(tensors[KEY + part["of"]], tuple(part["shape"]), part["of"]),
    "$array": lambda parts, tensors: decode(parts[2], tensors).numpy().view(parts[0]).reshape(parts[1]),
    "$deque": lambda parts, tensors: collections.deque(decode(parts[0], tensors), parts[1]),
    "$complex": lambda parts, tensors: complex(*decode(parts, tensors)),
    "$int": lambda text, _: int(text),
    "$float": lambda text, _: float(text),
    "$bytes": lambda text, _: base64.b64decode(text),
    "$bytearray": lambda text, _: bytearray(base64.b64decode(text)),
    "$dtype": lambda name, _: getattr(torch, name),
    "$device": lambda name, _: torch.device(name),
    "$small": lambda content, _: _small(content),
    "$ndarray": lambda content, _: _decode_numpy(content),
    "$scalar": lambda content, _: _decode_numpy(content)[()],
}
