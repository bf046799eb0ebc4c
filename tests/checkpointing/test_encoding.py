"""Tests the encoding of training state: every value comes back with its type and bits, and others are refused."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from drivetrain.checkpointing.state.encoding import Encoder, decode
from drivetrain.checkpointing.state.training_state import names_of

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner)
    | st.lists(inner).map(tuple)
    | st.lists(inner).map(collections.deque)
    | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
    | st.sets(st.integers() | st.text())
    | st.frozensets(st.binary()),
    max_leaves=20,
)
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn),
)


class Wrapper(torch.Tensor):
    """Has no values of its own, and does not tell torch where they are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def there_and_back(value: Any) -> Any:
    encoder = Encoder(lambda _: False, "")
    text = json.dumps(encoder.encode(value, "value"), allow_nan=False)
    return decode(json.loads(text), {name: tensor.clone() for name, tensor in encoder.tensors.items()})


def same(a: Any, b: Any) -> bool:
    """Compares values and all types inside of them."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(VALUES)
def test_values_keep_their_types(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, complex(math.inf, 1), -0.0, 2**200, -(2**64)])
def test_numbers_that_json_lacks(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert str(found) == str(value)


def test_nan_and_a_deque_with_a_limit() -> None:
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back(collections.deque([1, 2], 3)).maxlen == 3


@pytest.mark.parametrize(
    "value",
    [
        torch.float8_e5m2,
        torch.device("cpu"),
        torch.Size([1, 2]),
        collections.Counter({3: 2, "a": 1}),
        {"$tensor": "no reference"},
        {"a": {1: (2, {3})}},
    ],
    ids=str,
)
def test_other_kinds(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0), (33, 5)], ids=str)
def test_tensors_keep_their_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    found = there_and_back([tensor])[0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bytes(found.reshape(-1).view(torch.uint8).tolist()) == bytes(raw.tolist())


@pytest.mark.parametrize(
    "value",
    [np.float32(1.5), np.int64(-3), np.bool_(True), np.arange(6.0).reshape(2, 3), np.zeros((0, 2), np.uint32)],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_numpy_values_keep_their_dtype(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


def test_bytes_that_can_be_written_stay_so() -> None:
    assert [type(there_and_back(kind(b"ab"))) for kind in (bytes, bytearray)] == [bytes, bytearray]


def test_a_large_array_is_saved_as_a_tensor_that_shares_its_memory() -> None:
    columns = np.random.default_rng(0).standard_normal((500, 40))
    fixed = np.arange(5000, dtype=">i8")
    fixed.flags.writeable = False
    given = {"columns": columns, "transposed": columns.T, "strided": columns[::2, ::3], "fixed": fixed}
    encoder = Encoder(lambda _: False, "")
    encoded = encoder.encode(given, "extra")
    assert len(json.dumps(encoded)) < 500
    assert encoder.tensors["extra/columns"].data_ptr() == columns.ctypes.data
    found = decode(json.loads(json.dumps(encoded)), encoder.tensors)
    for name, value in given.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_layouts_and_ties_are_kept() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = there_and_back({"image": image, "tied": image})
    assert found["image"].stride() == image.stride()
    torch.testing.assert_close(found["image"], image, rtol=0, atol=0)
    encoder = Encoder(lambda _: False, "")
    encoder.encode({"image": image, "tied": image}, "value")
    assert list(encoder.tensors) == ["value/image"]


def test_names_say_where_tensors_come_from_and_whose_they_are() -> None:
    ours, mine = torch.randn(50), torch.randn(50)
    encoder = Encoder(lambda tensor: tensor.data_ptr() == mine.data_ptr(), "rank3/")
    encoded = encoder.encode({"a/b": ours, "a": {"b": mine.clone(), "c": mine}}, "state")
    assert list(encoder.tensors) == ["state/a/b", "state/a/b~", "rank3/state/a/c"]
    assert sorted(names_of(encoded)) == sorted(encoder.tensors)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lr_lambdas": [1, len]}, "state/lr_lambdas/1 is a builtins.builtin_function_or_method"),
        ({"rows": np.array([object()])}, "state/rows is a numpy.ndarray"),
        ({"matrix": np.ones((1, 1)).view(np.matrix)}, "state/matrix is a numpy.matrix"),
        ({"module": torch.nn.Linear(1, 1)}, "state/module is a torch.nn.modules.linear.Linear"),
        ({"sparse": torch.eye(2).to_sparse()}, "state/sparse is a tensor of layout torch.sparse_coo"),
        ({"meta": torch.empty(3, device="meta")}, "state/meta is a tensor of layout torch.strided on meta"),
        (
            {"rows": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            "state/rows is a nested tensor, expected a plain one",
        ),
        ({"halves": TwoTensor(torch.ones(9, 9), torch.ones(9, 9))}, "TwoTensor, whose values are in other tensors"),
        ({"outer": Wrapper(torch.ones(9, 9))}, "state/outer is a test_encoding.Wrapper, whose values are in other"),
    ],
)
def test_what_has_no_encoding_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        Encoder(lambda _: False, "").encode(value, "state")
    assert message in str(raised.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_nested_tensor_of_the_old_layout_is_named() -> None:
    value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match="state/rows is a nested tensor"):
        Encoder(lambda _: False, "").encode({"rows": value}, "state")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="contains itself"):
        Encoder(lambda _: False, "").encode(value, "state")


def test_a_mark_of_a_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\$later"):
        decode({"$later": 1}, {})


@pytest.mark.parametrize("kind", ["negative", "conjugate"])
def test_lazy_tensors_of_one_shape_stay_apart(kind: str) -> None:
    """Their values are temporaries, and the allocator gives the next one the address of the last."""

    def made() -> torch.Tensor:
        values = torch.randn(32, 16, dtype=torch.complex64)
        return values.conj().imag.t() if kind == "negative" else values.t().conj()

    given = {str(index): made() for index in range(8)}
    encoder = Encoder(lambda _: False, "")
    found = decode(encoder.encode(given, "extra"), encoder.tensors)
    assert len(encoder.tensors) == len(given)
    for name, value in given.items():
        torch.testing.assert_close(found[name], value.resolve_conj().resolve_neg(), rtol=0, atol=0)
