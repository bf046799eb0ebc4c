"""Tests packed saved tensors against plain torch: lossless bits, and the error bounds of the lossy formats."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain import _C
from effort import rounds
from pack_cases import ROUNDED
from reference import formats

on_devices = pytest.mark.usefixtures("device")
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The dtypes cover every element size.
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.int16),
    *(torch.float32, torch.int32, torch.float64, torch.int64, torch.complex64),
]
# The sizes lie around one byte of bits, one block of bits, one block of codes and one piece of a thread.
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1000, 16383, 16384, 16385, 150_001]
CASES = [(packing, dtype) for packing, dtypes in ROUNDED.items() for dtype in dtypes]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8 if tensor.dtype == torch.bool else BYTES[tensor.element_size()])


def assert_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.device == want.device
    assert torch.equal(bits_of(got), bits_of(want))


def packed_bytes(tensor: Tensor, packing: str) -> int:
    """Returns the bytes that the documented layout takes."""
    if packing == "bits":
        return -(-tensor.numel() // 8) + 2 * tensor.element_size()
    numbers = tensor.numel() * (2 if tensor.is_complex() else 1)
    return 2 * numbers if packing == "bfloat16" else numbers + 4 * -(-numbers // 256)


def packed(tensor: Tensor, packing: str = "bits") -> _C.Packed:
    result = _C.pack(tensor, packing)
    assert result is not None
    assert result.nbytes == packed_bytes(tensor, packing)
    return result


def two_values(dtype: torch.dtype, size: int) -> Tensor:
    """Masks have the values 0 and 1, or 0 and the factor of dropout."""
    mask = torch.rand(size) < 0.7
    return mask if dtype == torch.bool else mask.to(torch.float32).mul(2).to(dtype)


@on_devices
@pytest.mark.parametrize("size", SIZES)
def test_bool_comes_back(size: int) -> None:
    for mask in (torch.rand(size) < 0.5, torch.zeros(size, dtype=torch.bool), torch.ones(size, dtype=torch.bool)):
        small = packed(mask)
        assert small.nbytes == -(-size // 8) + 2
        assert_bits(_C.unpack(small), mask)


@on_devices
@pytest.mark.parametrize("size", SIZES)
def test_a_bit_of_1_is_true(size: int) -> None:
    """CPU and CUDA share one format, whatever the first element is."""
    for mask in (torch.rand(size) < 0.5, torch.rand(size) < 0.99, torch.ones(size) > 0, torch.zeros(size) > 0):
        small = packed(mask)
        in_bytes = torch.nn.functional.pad(mask.cpu(), (0, -size % 8)).view(-1, 8).to(torch.uint8)
        assert torch.equal(
            small.bytes.cpu(), (in_bytes << torch.arange(8, dtype=torch.uint8, device="cpu")).sum(1, dtype=torch.uint8)
        )
        assert small.extra is not None
        assert small.extra.tolist() == [0, 1]


@on_devices
def test_any_start() -> None:
    """The memory is aligned to one element only."""
    mask = torch.rand(5000) < 0.5
    for start in (1, 3, 7, 8, 64):
        assert_bits(_C.unpack(packed(mask[start:])), mask[start:])
    for packing, dtype in CASES:
        x = torch.randn(1000).to(dtype)
        assert_bits(_C.unpack(packed(x[1:], packing)), _C.unpack(packed(x[1:].clone(), packing)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_values_come_back(dtype: torch.dtype, size: int, isa: str) -> None:
    x = two_values(dtype, size)
    for tensor in (x, x[3:], torch.zeros_like(x), torch.ones(size).to(dtype)):
        small = packed(tensor)
        assert small.nbytes == -(-tensor.numel() // 8) + 2 * tensor.element_size()
        assert_bits(_C.unpack(small), tensor)


@pytest.mark.parametrize("size", [0, 1, 65, 1000, 40_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_agree_on_bits(dtype: torch.dtype, size: int) -> None:
    x = two_values(dtype, size)
    _C.force_isa("baseline")
    want = packed(x)
    # A bit of 0 stands for the first element, or for false in bool tensors.
    reference = x if dtype == torch.bool else (bits_of(x).reshape(-1) != bits_of(x)[:1]).view(-1)
    rows = torch.nn.functional.pad(reference, (0, -size % 8)).view(-1, 8)
    assert torch.equal(want.bytes, (rows.int() << torch.arange(8)).sum(1).to(torch.uint8))
    for isa in _C.available_isas():
        _C.force_isa(isa)
        got = packed(x)
        assert torch.equal(got.bytes, want.bytes)
        assert_bits(_C.unpack(want), x)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.bool], ids=str)
def test_a_third_value_gives_nothing(dtype: torch.dtype, isa: str) -> None:
    size = 70_001
    for position in (2, 63, 64, 16383, 16384, 40_000, size - 1):
        x = torch.zeros(size).to(dtype)
        x[position] = 3
        assert_bits(_C.unpack(packed(x)), x)
        x[1] = 2
        assert _C.pack(x, "bits") is None
        assert _C.pack(x[: position + 1], "bits") is None
        assert_bits(_C.unpack(packed(x[:position])), x[:position])


def test_threads_that_find_other_second_values() -> None:
    """Each thread has seen two of the three values."""
    x = torch.zeros(20 * 16384)
    x[5 * 16384] = 1
    x[15 * 16384] = 2
    assert _C.pack(x, "bits") is None
    x[15 * 16384] = 1
    assert_bits(_C.unpack(packed(x)), x)


def test_values_count_by_their_bits(isa: str) -> None:
    zeros = torch.tensor([0.0, -0.0]).repeat(50)
    assert_bits(_C.unpack(packed(zeros)), zeros)
    assert _C.pack(torch.tensor([0.0, -0.0, 1.0]), "bits") is None
    quiet, payload = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_bits(_C.unpack(packed(torch.stack([quiet, payload] * 33))), torch.stack([quiet, payload] * 33))
    assert_bits(_C.unpack(packed(torch.stack([quiet] * 33))), torch.stack([quiet] * 33))
    assert _C.pack(torch.stack([quiet, payload, torch.tensor(1.0)]), "bits") is None


@pytest.mark.parametrize("size_of_element", BYTES)
def test_any_bits(size_of_element: int) -> None:
    bits = 8 * size_of_element
    patterns = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if bits > 8 else st.integers(0, 255)

    @given(data=st.data(), values=st.lists(patterns, min_size=1, max_size=3))
    @settings(max_examples=rounds(50, whole=150), deadline=None)
    def check(data: Any, values: list[int]) -> None:
        lengths = st.lists(st.tuples(st.sampled_from(values), st.integers(1, 90)), max_size=6)
        runs = data.draw(lengths)
        flat = [value for value, count in runs for _ in range(count)]
        x = torch.tensor(flat, dtype=BYTES[size_of_element])
        isas = {}
        for isa in _C.available_isas():
            _C.force_isa(isa)
            small = _C.pack(x, "bits")
            assert (small is None) == (len(set(flat)) > 2)
            if small is not None:
                assert_bits(_C.unpack(small), x)
                isas[isa] = small.bytes.tolist()
        assert len({tuple(found) for found in isas.values()}) <= 1

    check()


def awkward(dtype: torch.dtype, size: int) -> Tensor:
    """Returns values of many magnitudes, with infinities and NaN in some blocks."""
    values = torch.randn(size, dtype=torch.float64) * 10.0 ** torch.randint(-8, 4, (size,))
    for position, value in ((7, torch.inf), (100, -0.0), (301, torch.nan), (302, -torch.inf), (900, 0.0)):
        values[position : position + 1] = value
    return values.to(dtype)


def assert_same_numbers(got: Tensor, want: Tensor) -> None:
    """Compares bits, except that all NaNs are equal."""
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits_of(got.nan_to_num(nan=0.0)), bits_of(want.nan_to_num(nan=0.0)))


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ROUNDED["bfloat16"], ids=str)
def test_bfloat16_is_torchs(dtype: torch.dtype, size: int) -> None:
    x = awkward(dtype, size)
    small = packed(x, "bfloat16")
    assert small.nbytes == 2 * size
    y = _C.unpack(small)
    assert_same_numbers(y, x.to(torch.bfloat16).to(dtype))
    finite = x.isfinite()
    assert bool(((y - x).abs() <= 2.0**-8 * x.abs())[finite].all())


@given(values=st.lists(st.floats(width=32), max_size=40))
@settings(max_examples=rounds(50, whole=200), deadline=None)
def test_bfloat16_of_any_values(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert_same_numbers(_C.unpack(packed(x, "bfloat16")), x.to(torch.bfloat16).float())


def int8_bound(x: Tensor) -> Tensor:
    """Returns the error bound of pack.h for each value."""
    rows = formats.blocks(x.double())
    finite = rows.isfinite()
    scales = torch.where(finite, rows.abs(), 0).amax(1, keepdim=True).clamp(min=2.0**-113)
    bound = (rows.abs() * scales).sqrt() / 126 + scales / 63504
    # The result is rounded to its dtype, and the arithmetic is float32.
    eps, tiny = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    return (bound * (1 + 1e-5) + eps * (rows.abs() + bound) + tiny).flatten()[: x.numel()]


def assert_int8_holds(x: Tensor, y: Tensor) -> None:
    assert y.dtype == x.dtype
    finite = x.isfinite()
    assert torch.equal(x.isnan(), y.isnan())
    assert torch.equal(y[x.isinf()], x[x.isinf()])
    assert torch.equal(finite, y.isfinite())
    error = (y.double() - x.double()).abs()
    assert bool((error <= int8_bound(x))[finite].all())
    assert bool((y[x == 0] == 0).all())


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ROUNDED["int8"], ids=str)
def test_int8_error(dtype: torch.dtype, size: int) -> None:
    x = awkward(dtype, size)
    small = packed(x, "int8")
    assert small.nbytes == size + 4 * -(-size // 256)
    assert_int8_holds(x, _C.unpack(small))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ROUNDED["int8"], ids=str)
def test_int8_is_the_optimizers(dtype: torch.dtype, size: int, isa: str) -> None:
    """Compares 8-bit codes with a plain reference on every instruction set."""
    x = awkward(dtype, size)
    small = packed(x, "int8")
    codes, scales = formats.encode_signed(x.float()) if size else (x.to(torch.int8), x.float())
    assert small.extra is not None
    assert torch.equal(small.bytes.view(torch.int8), codes)
    assert torch.equal(small.extra, scales)
    if size:
        assert_same_numbers(_C.unpack(small), formats.decode_signed(codes, scales).to(dtype))


@given(values=st.lists(st.floats(width=32), max_size=40), repeats=st.integers(1, 20))
@settings(max_examples=rounds(50, whole=200), deadline=None)
def test_int8_of_any_values(values: list[float], repeats: int) -> None:
    for dtype in ROUNDED["int8"]:
        x = torch.tensor(values * repeats, dtype=torch.float32).to(dtype)
        assert_int8_holds(x, _C.unpack(packed(x, "int8")))


def test_int8_of_what_activations_look_like() -> None:
    """Compares the relative error of a tensor with that of linear codes with the same scale."""
    errors = {}
    for name, x in (("normal", torch.randn(1 << 18)), ("gelu", torch.nn.functional.gelu(torch.randn(1 << 18)))):
        rows = formats.blocks(x)
        steps = rows.abs().amax(1, keepdim=True) / 127
        linear = ((rows / steps).round() * steps).flatten()
        errors[name] = [float((y - x).norm() / x.norm()) for y in (_C.unpack(packed(x, "int8")), linear)]
    assert errors["normal"][0] < 0.0085
    assert errors["gelu"][0] < 0.0080
    assert all(ours < 1.2 * equal_steps for ours, equal_steps in errors.values())


@pytest.mark.parametrize(("packing", "dtype"), [("bits", torch.float32), *CASES], ids=str)
def test_ten_million(packing: str, dtype: torch.dtype) -> None:
    x = torch.randn(10_000_019).to(dtype)
    if packing == "bits":
        assert _C.pack(x, "bits") is None
        x = (x > 0).to(dtype) / 0.9
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        small = packed(x, packing)
        results.append((small, _C.unpack(small)))
    (small, y), (other, z) = results
    assert torch.equal(small.bytes, other.bytes)
    assert_bits(y, z)
    if packing == "bits":
        assert_bits(y, x)
    assert small.nbytes < x.nbytes


@pytest.mark.parametrize("packing", ROUNDED)
def test_complex_numbers_are_pairs(packing: str) -> None:
    x = torch.randn(500, dtype=torch.complex64)
    y = _C.unpack(packed(x, packing))
    assert_bits(torch.view_as_real(y).flatten(), _C.unpack(packed(torch.view_as_real(x).flatten(), packing)))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("packing", "dtype"), [("bits", torch.bool), *CASES], ids=str)
def test_cuda_gives_the_cpus_bits(packing: str, dtype: torch.dtype, size: int) -> None:
    x = torch.rand(size) < 0.5 if dtype == torch.bool else awkward(dtype, size)
    want, got = packed(x, packing), packed(x.cuda(), packing)
    assert torch.equal(got.bytes.cpu(), want.bytes)
    if packing == "int8":
        assert got.extra is not None
        assert want.extra is not None
        assert torch.equal(got.extra.cpu(), want.extra)
    compare = assert_same_numbers if dtype.is_floating_point else assert_bits
    compare(_C.unpack(got).cpu(), _C.unpack(want))


@pytest.mark.gpu
def test_the_host_does_not_wait_for_cuda() -> None:
    x = torch.randn(1 << 20, device="cuda")
    mask = x > 0
    _C.pack(x, "int8"), _C.pack(mask, "bits")  # Loads the kernels.
    torch.cuda.synchronize()
    busy, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_000_000_000)
        assert _C.pack(x, "bits") is None
        results = [_C.unpack(packed(x, "bfloat16")), _C.unpack(packed(x, "int8")), _C.unpack(packed(mask))]
        done.record()
        assert not done.query()
    busy.synchronize()
    assert_bits(results[0], x.bfloat16().float())
    assert_int8_holds(x.cpu(), results[1].cpu())
    assert_bits(results[2], mask)


def test_shapes_and_gradients_do_not_matter() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = _C.unpack(packed(x, "bfloat16"))
    assert y.shape == (15,)
    assert not y.requires_grad


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="dtype Double, expected float32, bfloat16 or float16 for packing 'int8'"):
        _C.pack(torch.zeros(3, dtype=torch.float64), "int8")
    with pytest.raises(TypeError, match="dtype BFloat16, expected float32 or float64 for packing 'bfloat16'"):
        _C.pack(torch.zeros(3, dtype=torch.bfloat16), "bfloat16")
    with pytest.raises(
        TypeError, match="dtype ComplexDouble, expected elements of 1, 2, 4 or 8 bytes for packing 'bits'"
    ):
        _C.pack(torch.zeros(3, dtype=torch.complex128), "bits")
    with pytest.raises(ValueError, match="packing is 'zip', expected 'bits', 'bfloat16' or 'int8'"):
        _C.pack(torch.zeros(3), "zip")
    with pytest.raises(ValueError, match=r"tensor has strides \[1, 4\], expected a contiguous tensor"):
        _C.pack(torch.zeros(3, 4).t(), "bits")
    with pytest.raises(NotImplementedError, match="on meta"):
        _C.pack(torch.zeros(3, device="meta"), "int8")
