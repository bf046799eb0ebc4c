"""Tests the storage formats of parameters and states: every format against a plain reference, and float32 steps."""

import copy
import io
import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain import _C, optim
from drivetrain.amp import GradScaler
from drivetrain.optim.precision import EXTRA_NAMES, SCALAR_NAMES
from drivetrain.optim.rule import rule_of
from drivetrain.planner.result import kept_32_bits, state_bytes
from drivetrain.planner.trace import ParameterInfo
from effort import rounds
from optim_cases import CASES, assert_same_bits_everywhere, cases, each_rule
from precision_cases import HALVES, PRECISIONS, SHAPES, everything, make_params, precisions, same_bits, set_grads
from reference import formats

STATE_SIZES = [1, 2, 255, 256, 257, 511, 512, 513, 5000]

# ---- Formats.


# The biased exponents are those of subnormals, the smallest normals, usual values, the largest ones, infinity and NaN.
@pytest.mark.parametrize("exponent", [0, 1, 127, 253, 254, 255])
@pytest.mark.parametrize("remainder_bits", [16, 8])
def test_the_split_over_all_mantissas(remainder_bits: int, exponent: int) -> None:
    dtype = {16: torch.int16, 8: torch.int8}[remainder_bits]
    parts = [bits + (sign << 31) for sign in (0, 1) for bits in range(exponent << 23, (exponent + 1) << 23, 2**18)]
    for first in parts[:: rounds(7, 1)]:  # each fits into a cache, and has all of the last 18 bits
        values = formats.float_of(torch.arange(first, first + 2**18))
        halves, remainders = (part.to(torch.int16) for part in formats.split(values, remainder_bits))
        nan = values.isnan()
        for isa in _C.available_isas():
            _C.force_isa(isa)
            param = torch.empty_like(values, dtype=torch.bfloat16)
            remainder = _C.optim_store_param(param, values, dtype)
            loaded = _C.optim_load_param(param, remainder)
            assert torch.equal(param.view(torch.int16), halves)
            assert torch.equal(remainder.short(), remainders)
            assert torch.equal(param.isnan(), nan)
            if exponent == 255:
                assert same_bits(loaded, values)
            elif remainder_bits == 16:
                assert torch.equal(loaded.view(torch.int32), values.view(torch.int32))
            else:  # 24 bits are off by at most half of their last bit, which is 256 of float32's steps.
                assert (loaded.view(torch.int32) - values.view(torch.int32)).abs().max() <= 128
        if remainder_bits == 16:  # The half is the value as bfloat16, with ties rounded away from zero.
            tie = values.view(torch.int32) & 0xFFFF == 0x8000
            assert same_bits(param[~tie], values.bfloat16()[~tie])


@pytest.mark.parametrize("remainder", [torch.int16, torch.int8])
def test_a_parameter_written_by_other_code_stays_near_its_new_value(remainder: torch.dtype) -> None:
    param = torch.empty(1000, dtype=torch.bfloat16)
    stored = _C.optim_store_param(param, torch.randn(1000), remainder)
    written = torch.cat([torch.zeros(500), -torch.zeros(100), torch.randn(400) * 1e-3]).bfloat16()
    loaded = _C.optim_load_param(written, stored)
    assert loaded.isfinite().all()
    assert ((loaded - written.float()).abs() <= written.float().abs() * 2**-8 + 1e-38).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_compensations_and_masters_count_only_for_their_parameter(dtype: torch.dtype, isa: str) -> None:
    values = torch.randn(10_000) * 10.0 ** torch.randint(-3, 3, (10_000,))
    values[:4] = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    for extra in [dtype, torch.float32] if dtype == torch.float16 else [dtype]:
        param = torch.empty(10_000, dtype=dtype)
        stored = _C.optim_store_param(param, values, extra)
        assert same_bits(param, values.to(dtype))
        loaded = _C.optim_load_param(param, stored)
        if extra == torch.float32:
            assert same_bits(loaded, values)
        else:
            finite = param.isfinite()
            bits = {torch.bfloat16: 16, torch.float16: 21}[dtype]
            assert ((loaded - values)[finite].abs() <= values[finite].abs() * 2.0**-bits + 2.0**-24).all()
            assert same_bits(loaded[~finite], param[~finite].float())
        written = torch.randn(10_000).to(dtype)
        # Compensations that are small enough count for the new value, too.
        assert ((_C.optim_load_param(written, stored) - written.float()).abs() <= written.float().abs() * 2**-8).all()


def states_to_code(numel: int, squared: bool) -> Iterator[tuple[Tensor, int, bool]]:
    """Yields values of many magnitudes, the exponent of their largest ones, and whether some are special."""
    for exponent in (-160, -90, -30, 0, 30, 120):
        for special in (False, True):
            values = torch.ldexp(torch.randn(numel), torch.randint(-12, 2, (numel,)) + exponent)
            values[::7] = 0
            values = values.abs() if squared else values
            if special:
                values[numel // 2] = math.inf
                values[numel // 3] = math.nan
                values[0] = math.inf if squared else -math.inf
            yield values, exponent, special


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("numel", STATE_SIZES)
def test_8_bit_codes_are_the_references(squared: bool, numel: int, isa: str) -> None:
    dtype = torch.uint8 if squared else torch.int8
    encode = formats.encode_squared if squared else formats.encode_signed
    decode = formats.decode_squared if squared else formats.decode_signed
    for values, _, _ in states_to_code(numel, squared):
        codes, scales = _C.optim_store_state(torch.empty(numel), values, dtype)
        expected, expected_scales = encode(values)
        assert same_bits(scales, expected_scales)
        assert torch.equal(codes, expected)
        loaded = _C.optim_load_state(codes, scales)
        assert same_bits(loaded, decode(codes, scales))
        assert torch.equal(loaded.isnan(), values.isnan())
        assert torch.equal(loaded[values.isinf()], values[values.isinf()])


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("numel", STATE_SIZES)
def test_4_bit_codes_are_the_references(squared: bool, numel: int, isa: str) -> None:
    encode = formats.encode_squared_4 if squared else formats.encode_signed_4
    for values, exponent, special in states_to_code(numel, squared):
        codes, scales = _C.optim_store_state(torch.empty(numel), values, torch.uint4 if squared else torch.int4)
        expected, expected_scales = encode(values)
        assert same_bits(scales, expected_scales)
        assert torch.equal(codes, expected)
        if numel < 256:
            continue  # So few codes count as 8-bit ones, and parameters of that size have none.
        loaded = _C.optim_load_state(codes, scales, values)
        assert same_bits(loaded, formats.decode_4(codes, scales, numel))
        assert torch.equal(loaded.isnan(), values.isnan())
        assert torch.equal(loaded.isinf(), values.isinf())
        assert torch.equal(loaded[values.isinf()], values[values.isinf()])
        if not special and exponent >= -30:  # Smaller squares are subnormal.
            again = _C.optim_store_state(values, loaded, torch.uint4 if squared else torch.int4)
            assert torch.equal(again[0], codes)
            assert torch.equal(again[1], scales)


@pytest.mark.parametrize("squared", [False, True])
def test_4_bit_codes_next_to_every_level(squared: bool, isa: str) -> None:
    """A value next to a level has its code, whatever is drawn; vector code finds lower codes by estimated roots."""
    codes = torch.arange(1.0, 16.0 if squared else 8.0)
    levels = codes**2 if squared else codes**3
    values = (levels.view(torch.int32)[:, None] + torch.arange(-8, 9, dtype=torch.int32)).view(torch.float32)
    values = values.clamp(max=levels[-1].item())  # the factor is 1
    values = torch.cat([values, levels[-1].expand(len(levels), 128 - values.shape[1])], dim=1).flatten()
    values = values if squared else torch.cat([values, -values])
    stored, scales = _C.optim_store_state(
        values, values.double().square().float() if squared else values, torch.uint4 if squared else torch.int4
    )
    assert (scales == levels[-1]).all()
    found = torch.stack([stored.view(torch.uint8) & 15, stored.view(torch.uint8) >> 4], 1).view(-1, 128)[:, :17].int()
    expected = codes.int()[:, None].expand(-1, 17)
    assert torch.equal(found[: len(codes)], expected)
    assert squared or torch.equal(found[len(codes) :], 16 - expected)


@pytest.mark.parametrize("squared", [False, True])
def test_4_bit_rounding_has_no_bias(squared: bool, isa: str) -> None:
    """A mean whose changes are below half a step would stay as it is under rounding to the nearest code."""
    values = torch.rand(1 << 18) * torch.rand(1 << 18)
    roots = values.clamp(min=1 / 225)  # smaller ones keep a code
    stored = _C.optim_store_state(values, roots.square() if squared else values, torch.uint4 if squared else torch.int4)
    loaded = _C.optim_load_state(*stored, values)
    found, wanted = (loaded.sqrt(), roots) if squared else (loaded, values)
    for low, high in itertools.pairwise((0.01, 0.05, 0.2, 0.5, 0.9)):
        part = (wanted > low) & (wanted < high)
        spread = (found - wanted)[part].std() / part.sum().sqrt()
        assert (found - wanted)[part].mean().abs() < 5 * spread
        assert (found - wanted)[part].abs().max() > 0.01 * low


def test_8_bit_codes_next_to_every_tie(isa: str) -> None:
    """Vector code computes square roots from estimates; a root next to n + 0.5 shows any error of them."""
    ties = (torch.arange(126) + 0.5) ** 2
    offsets = torch.arange(-8, 9, dtype=torch.int32)
    near = (ties.view(torch.int32)[:, None] + offsets).view(torch.float32).flatten()
    near = torch.cat([near, -near, torch.tensor([0.0, -0.0, 1e-45, 2.0**-126, 2.0**-21, 2.0**-19])])
    blocks = torch.nn.functional.pad(near, (0, -near.numel() % 255)).reshape(-1, 255)
    values = torch.cat([blocks, torch.full((len(blocks), 1), 126.0**2)], dim=1).flatten()  # the factor is 1
    codes, scales = _C.optim_store_state(torch.empty_like(values), values, torch.int8)
    assert (scales == 126.0**2).all()
    assert torch.equal(codes, formats.encode_signed(values)[0])
    roots = values.abs().double().sqrt().float()  # correctly rounded: a double has more than twice the digits
    assert torch.equal(codes.float(), torch.copysign(roots, values).round() + 0.0)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600), st.booleans())
@settings(deadline=None, max_examples=rounds(50, whole=200))
def test_8_bit_errors_are_bounded(numbers: list[float], squared: bool) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    values = values.abs() if squared else values
    loaded = _C.optim_load_state(*_C.optim_store_state(values, values, torch.uint8 if squared else torch.int8))
    largest = formats.blocks(values).abs().amax(1).repeat_interleave(formats.BLOCK)[: len(values)].double()
    # Codes are equal steps of the root. A value is half a step off, and a small mean of squares up to a whole step.
    steps = 253 if squared else 126
    root, loaded_root = values.abs().double().sqrt(), loaded.abs().double().sqrt()
    bound = (1 if squared else 0.5) * largest.sqrt() / steps
    # The constants allow for float32's own rounding, also among its smallest numbers.
    assert ((loaded_root - root).abs() <= bound * (1 + 1e-5) + 1e-17).all()
    if squared:
        assert torch.equal(loaded[values > 1e-40] > 0, torch.ones_like(loaded[values > 1e-40]).bool())
    else:
        assert ((loaded * values) >= 0).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_is_unbiased_and_goes_to_a_neighbor(dtype: torch.dtype, isa: str) -> None:
    tiny = 2.0**-24 if dtype == torch.float16 else 2.0**-133  # the smallest subnormal
    for value in [1.0 + 2**-13, -1.0 - 2**-12, 3.14159, 0.3 * tiny, -2.7 * tiny, 1e-5, -65500.0]:
        count = 400_000
        params = torch.full((1, count), value, dtype=torch.float32)
        rounded = step_of_nothing(params.to(dtype), params).double()
        below, above = neighbors(torch.tensor(value), dtype)
        assert set(rounded.flatten().tolist()) <= {below, above}
        if math.isfinite(above - below) and above > below:
            share = (value - below) / (above - below)
            expected = count * share
            assert abs((rounded == above).sum().item() - expected) <= 6 * math.sqrt(count * share * (1 - share)) + 1


def neighbors(value: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    nearest = value.to(dtype)
    other = torch.nextafter(nearest, torch.tensor(math.inf if nearest < value else -math.inf, dtype=dtype))
    low, high = sorted([nearest.item(), value.item() if nearest == value else other.item()])
    return low, high


def step_of_nothing(param: Tensor, target: Tensor) -> Tensor:
    """Returns the parameter after a step of SGD that leads exactly to `target`, with stochastic rounding."""
    param = torch.zeros_like(param).requires_grad_()
    param.grad = None
    param.grad_dtype = torch.float32
    param.grad = -target
    optim.SGD([param], lr=1.0, rounding="stochastic").step()
    return param.detach()


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_leaves_exact_values_and_infinities(dtype: torch.dtype, isa: str) -> None:
    exact = torch.randn(1, 3000).to(dtype)
    exact[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    assert same_bits(step_of_nothing(exact, exact.float()), exact)


def test_stochastic_bits_differ_between_steps_parameters_and_elements() -> None:
    params = [torch.full((4096,), 1.0, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    optimizer = optim.SGD(params, lr=1.0, rounding="stochastic")
    seen = []
    for _ in range(3):
        for param in params:
            param.detach().fill_(1.0)
            param.grad = torch.full_like(param, -(2.0**-8))  # halfway to the next value
        optimizer.step()
        seen += [p.detach() > 1.0 for p in params]
    for i, a in enumerate(seen):
        assert 1850 < a.sum() < 2250
        assert 0.4 < (a[1:] == a[:-1]).double().mean() < 0.6
        for b in seen[:i]:
            assert 0.4 < (a == b).double().mean() < 0.6
    assert optimizer.state[params[0]]["step"] == 3


# ---- Steps.


def values_of(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    """Returns one parameter and its states as float32."""
    state = optimizer.state[param]
    values = {"param": optimizer.float32_value(param)}
    for name, value in state.items():
        if name not in (*SCALAR_NAMES, *EXTRA_NAMES) and not name.endswith("_scales"):
            name = name.removesuffix("_codes")
            values[name] = _C.optim_load_state(value, state.get(f"{name}_scales"), param)
    return values


def mark(state: dict[str, Any], name: str) -> torch.dtype:
    """Returns the dtype that marks the format of a state."""
    codes = state.get(f"{name}_codes")
    if codes is None:
        return state[name].dtype
    is_packed = _C.optim_is_packed(codes, state[f"{name}_scales"])
    return {torch.int8: torch.int4, torch.uint8: torch.uint4}[codes.dtype] if is_packed else codes.dtype


def stored(dtype: torch.dtype, extra: Tensor | None, values: Tensor) -> Tensor:
    """Returns a parameter's new values after rounding to its storage format."""
    if extra is None:
        return values.to(dtype).float()
    param = torch.empty_like(values, dtype=dtype)
    return _C.optim_load_param(param, _C.optim_store_param(param, values, extra.dtype))


def fits(precision: str, dtype: torch.dtype) -> bool:
    return dtype != torch.float16 or PRECISIONS[precision].get("master_bits") != 24


ROWS = [row for row in each_rule(PRECISIONS, [torch.float32, *HALVES]) if fits(*row[1:])]


@pytest.mark.parametrize(("case", "precision", "dtype"), ROWS)
def test_a_step_is_the_float32_step_between_load_and_store(case: str, precision: str, dtype: torch.dtype) -> None:
    ours, _, options = CASES[case]
    params = make_params(dtype)
    optimizer = ours(params, **options, **PRECISIONS[precision], min_8bit_size=1000)
    for step in range(3):
        before = [values_of(optimizer, p) if optimizer.state[p] else None for p in params]
        references = [
            (p if b is None else b["param"]).detach().float().requires_grad_()
            for p, b in zip(params, before, strict=True)
        ]
        reference = ours([t.detach().clone().requires_grad_() for t in references], **options)
        own = reference.param_groups[0]["params"]
        set_grads(params, own)
        if step > 0:
            for param, other, values in zip(params, own, before, strict=True):
                for name in SCALAR_NAMES & optimizer.state[param].keys():
                    reference.state[other][name] = optimizer.state[param][name].clone()
                for name in (values or {}).keys() - {"param"}:
                    reference.state[other][name] = values[name].clone()
        optimizer.step()
        if step == 0:  # A step also stores the initial states.
            for param, other in zip(params, own, strict=True):
                (group,), rule = reference.param_groups, rule_of(type(reference))
                for name, kind in _C.optim_states(rule.name_of(group)):
                    if _C.optim_state_shape(param, kind) is None:
                        continue
                    if name in reference.state[other]:
                        values = reference.state[other][name].to(dtype)  # torch's constructor makes it in this dtype.
                    elif name == rule.copies:
                        values = other.detach()
                    elif rule.initial(group, name) != 0:
                        values = torch.full_like(other, rule.initial(group, name)).detach()
                    else:
                        continue
                    reference.state[other].setdefault("step", torch.zeros(()))
                    start = _C.optim_store_state(param, values, mark(optimizer.state[param], name))
                    reference.state[other][name] = _C.optim_load_state(*start, param)
        reference.step()
        for param, other in zip(params, own, strict=True):
            state, after = optimizer.state[param], values_of(optimizer, param)
            extra = next((state[name] for name in EXTRA_NAMES if name in state), None)
            if PRECISIONS[precision].get("rounding") == "stochastic" and dtype in HALVES:
                apart, step_size = (
                    (after["param"] - other.detach()).abs(),
                    {torch.bfloat16: 2**-7, torch.float16: 2**-10},
                )
                assert (apart <= other.detach().abs() * step_size[dtype] + 2**-24).all()
            else:
                assert same_bits(after["param"], stored(dtype, extra, other.detach()))
            for name, value in reference.state[other].items():
                if name == "step":
                    continue
                if name in SCALAR_NAMES:
                    assert torch.equal(value, state[name])
                    continue
                dtype_kept = mark(state, name)
                again = _C.optim_load_state(*_C.optim_store_state(param, value, dtype_kept), param)
                assert same_bits(after[name], again), name
                is_small = param.dim() < 2 or param.numel() < 1000
                bits = PRECISIONS[precision].get("state_bits")
                wanted = {
                    None: [torch.float32 if dtype == torch.float16 else dtype],
                    32: [torch.float32],
                    16: [torch.bfloat16],
                    8: [torch.int8, torch.uint8],
                    4: [torch.int4, torch.uint4],
                    "fp8": [torch.float8_e4m3fn, torch.float8_e5m2],
                }[bits]
                assert dtype_kept in ([torch.float32] if is_small and bits in (8, 4, "fp8") else wanted)


@pytest.mark.parametrize(("precision", "dtype"), sorted({row[1:] for row in ROWS}, key=str))
def test_neither_instruction_sets_nor_threads_change_the_bits(precision: str, dtype: torch.dtype) -> None:
    # The parameters have many blocks, do not end with a block, and are cut between threads.
    start = make_params(dtype, [(37, 4111), (3, 5), (129, 257), (300_001, 1), (2, 2)])
    options = {**PRECISIONS[precision], "min_8bit_size": 0, "max_grad_norm": 1.0}
    assert_same_bits_everywhere(start, lambda params: optim.AdamW(params, **options))


@pytest.mark.parametrize("rule", [optim.AdamW, optim.SGD])
@pytest.mark.parametrize("tail", [{}, {"max_grad_norm": 0.5}, {"max_grad_norm": 0.5, "zero_grads_in_step": True}])
def test_bfloat16_keeps_special_values_on_every_instruction_set(rule: type, tail: dict[str, Any]) -> None:
    # 1e-39 and 3e-40 are subnormal, 1e-30 squares to zero, and 3e38 overflows when it is squared.
    special = torch.tensor([0.0, -0.0, 1e-39, -3e-40, 1e-30, 3e38, -1.5, 2.0**-126, math.inf, -math.inf, math.nan])
    sizes = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000]
    finite = special[special.isfinite()] if tail else special  # a norm that is not finite makes every value NaN
    values = [special[torch.randint(len(special), (size,))].bfloat16() for size in sizes]
    grads = [[finite[torch.randint(len(finite), (size,))].bfloat16() for size in sizes] for _ in range(3)]
    options = {"momentum": 0.5} if rule is optim.SGD else {}
    found = []
    for isa in _C.available_isas():
        _C.force_isa(isa)
        params = [value.clone().requires_grad_() for value in values]
        optimizer = rule(params, lr=1e-40, **options, **tail)
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        state = [v for p in params for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        found.append([p.detach() for p in params] + [p.grad for p in params] + state)
    assert any((v.abs() < 2.0**-126).logical_and(v != 0).any() for v in found[0] if v.dtype == torch.bfloat16)
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("master_bits", [None, 24, 32])
def test_codes_of_special_values_are_those_of_every_instruction_set(master_bits: int | None) -> None:
    # Vector code steps whole blocks of finite states, and the baseline's code everything. The square of 3e38 is
    # infinite in a block of finite means.
    special = torch.tensor([math.inf, -math.inf, math.nan, 3e38, 1e-30, 1e-39, -0.0])
    starts = [torch.randn(1, size).bfloat16() for size in STATE_SIZES for _ in special]
    grads = [[torch.randn_like(start) for start in starts] for _ in range(4)]
    for index, grad in enumerate(grads[1]):
        grad[0, torch.randint(grad.numel(), (1,))] = special[index % len(special)].bfloat16()
    found = []
    for isa in _C.available_isas():
        _C.force_isa(isa)
        params = [start.clone().requires_grad_() for start in starts]
        optimizer = optim.AdamW(params, lr=0.01, state_bits=8, master_bits=master_bits, min_8bit_size=0)
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        states = [(k, v) for p in params for k, v in optimizer.state[p].items() if isinstance(v, Tensor)]
        found.append([p.detach() for p in params] + [v for _, v in states])
        signs = {(k, bool((v < 0).any())) for k, v in states if k.endswith("_scales")}  # negative: special codes
        assert len(signs) == 4
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))


@precisions
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "holes"])
def test_any_layout(precision: str, layout: str) -> None:
    """Blocks follow the parameter's memory layout: codes differ from a contiguous parameter's, values hardly do."""

    def laid_out(values: Tensor) -> Tensor:
        if layout == "transposed":
            return values.t().contiguous().t()
        if layout == "channels_last":
            return values.view(8, 8, 16, 16).to(memory_format=torch.channels_last)
        return torch.stack([values, values], dim=-1)[..., 0]

    values = torch.randn(128, 128).bfloat16()
    params = [laid_out(values).requires_grad_(), values.clone().requires_grad_()]
    optimizers = [optim.AdamW([p], lr=1e-2, **PRECISIONS[precision]) for p in params]
    for _ in range(4):
        grad = torch.randn(128, 128).bfloat16()
        params[0].grad, params[1].grad = grad.view(params[0].shape), grad
        for optimizer in optimizers:
            optimizer.step()
    apart = (params[0].detach().float().reshape(128, 128) - params[1].detach().float()).abs()
    is_exact = not {8, 4, "fp8", "stochastic"} & set(PRECISIONS[precision].values())
    assert apart.max() == 0 if is_exact else apart.max() < 0.1
    for name, value in optimizers[0].state[params[0]].items():
        is_packed = name.endswith("_codes") and PRECISIONS[precision].get("state_bits") == 4
        assert value.shape == params[0].shape or name == "step" or name.endswith("_scales") or is_packed


@given(st.integers(0, 2**32 - 1), st.floats(0, 3), st.sampled_from([0.9, 0.99, 0.999]), st.sampled_from([1e-8, 1e-16]))
@settings(deadline=None, max_examples=40)
def test_8_bit_updates_stay_near_those_of_float32(seed: int, decades: float, beta2: float, eps: float) -> None:
    """The sizes of gradients differ by up to three decades within a block, as those of embeddings do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** (-decades * torch.rand(64, 256, generator=generator))
    params = [torch.zeros(64, 256).requires_grad_() for _ in range(2)]
    optimizers = [
        optim.AdamW([p], lr=1.0, betas=(0.9, beta2), eps=eps, weight_decay=0.0, state_bits=bits)
        for p, bits in zip(params, (8, 32), strict=True)
    ]
    for _ in range(10):
        grad = torch.randn(64, 256, generator=generator) * sizes
        for param, optimizer in zip(params, optimizers, strict=True):
            param.detach().zero_()
            param.grad = grad.clone()
            optimizer.step()
        ours, theirs = (p.detach().abs() for p in params)
        # torch's update is at most 1 / sqrt(1 - beta2) in theory, and near 1 here.
        assert ours.max() <= 2.5 * max(theirs.max().item(), 1.0)


def test_compensated_sums_follow_float32_where_rounding_loses_everything() -> None:
    start = torch.rand(100, 100).bfloat16() + 1
    lost = {}
    for name, options in {
        "nearest": {},
        "kahan": {"rounding": "kahan"},
        "stochastic": {"rounding": "stochastic"},
        "master": {"master_bits": 32},
        "master_24": {"master_bits": 24},
    }.items():
        param = start.clone().requires_grad_()
        optimizer = optim.SGD([param], lr=1e-4, **options)
        for _ in range(200):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved = start.float() - optimizer.float32_value(param)
        lost[name] = (moved.mean() / (200 * 1e-4) - 1).abs().item()
    assert lost.pop("nearest") == 1.0  # Every update was lost.
    assert lost.pop("stochastic") < 0.02
    # 24 bits, and bfloat16 with a compensation, have steps of about 2^-15 there, so that an update is 3.3 steps.
    assert lost.pop("master") < 1e-3
    assert all(share < 0.1 for share in lost.values()), lost


# ---- Saving, loading and changing options.


def steps(optimizer: Any, params: list[Tensor], count: int = 2) -> None:
    for _ in range(count):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()


def saved(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def unpickled(optimizer: Any, precision: str) -> Any:
    if PRECISIONS[precision].get("state_bits") != "fp8":
        return pickle.loads(pickle.dumps(optimizer))
    file = io.BytesIO()  # torch 2.13 pickles float8 tensors only in torch.save()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@precisions
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_what_was_saved_goes_on_with_the_same_bits(precision: str, way: str) -> None:
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params, **PRECISIONS[precision], min_8bit_size=100)
    steps(optimizer, params)
    if way == "state_dict":
        others = [p.detach().clone().requires_grad_() for p in params]
        other = optim.AdamW(others)  # The saved groups contain their options.
        other.load_state_dict(saved(optimizer))
    else:
        other = copy.deepcopy(optimizer) if way == "deepcopy" else unpickled(optimizer, precision)
        others = other.param_groups[0]["params"]
    dtypes = [v.dtype for v in everything(optimizer)]
    assert [v.dtype for v in everything(other)] == dtypes
    torch.manual_seed(1)
    steps(optimizer, params)
    torch.manual_seed(1)
    steps(other, others)
    assert all(same_bits(a, b) for a, b in zip(everything(optimizer), everything(other), strict=True))


def test_state_keeps_its_dtype_where_torch_casts_it() -> None:
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params)
    steps(optimizer, params)
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].float() + 2**-20
    other = optim.AdamW(params)
    other.load_state_dict(state)
    assert all(other.state[p]["exp_avg"].dtype == torch.float32 for p in params)
    assert same_bits(other.state[params[0]]["exp_avg"], state["state"][0]["exp_avg"])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [{}, {"state_bits": 32}])
def test_states_loaded_after_install_have_the_dtype_of_fresh_ones(options: dict[str, Any]) -> None:
    params = make_params(torch.float32)
    optimizer = torch.optim.AdamW(params, **options)
    steps(optimizer, params)
    params = make_params(torch.bfloat16)
    other = torch.optim.AdamW(params, **options)
    other.load_state_dict(optimizer.state_dict())
    expected = torch.float32 if options else torch.bfloat16  # torch's
    assert {other.state[param]["exp_avg_sq"].dtype for param in params} == {expected}
    assert {other.state[param]["step"].dtype for param in params} == {torch.float32}


def test_a_users_hook_may_replace_what_is_loaded() -> None:
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params, state_bits=8, min_8bit_size=0)
    steps(optimizer, params)
    other = optim.AdamW(params, state_bits=8)
    other.register_load_state_dict_pre_hook(lambda _, __: saved(optimizer))
    seen = []
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]]["exp_avg_codes"].dtype))
    other.load_state_dict({})
    assert seen == [torch.int8]


@pytest.mark.parametrize("master_bits", [None, 32])
def test_to_torch_and_back(master_bits: int | None) -> None:
    dtype = torch.bfloat16 if master_bits else torch.float32
    params = make_params(dtype)
    optimizer = optim.AdamW(params, state_bits=8, master_bits=master_bits, min_8bit_size=100, lr=1e-3)
    steps(optimizer, params)
    theirs = [optimizer.float32_value(p).requires_grad_() for p in params]
    torchs = torch.optim.AdamW(theirs, lr=1e-3)
    torchs.load_state_dict(optimizer.torch_state_dict())
    for param, other in zip(params, theirs, strict=True):
        assert set(torchs.state[other]) == {"step", "exp_avg", "exp_avg_sq"}
        assert torchs.state[other]["exp_avg"].dtype == torch.float32
        assert same_bits(torchs.state[other]["exp_avg"], values_of(optimizer, param)["exp_avg"])
    for other in theirs:
        other.grad = torch.randn_like(other)
    torchs.step()
    # On the way back the constructor's options hold, because torch's groups have none of ours.
    again = [p.detach().clone().requires_grad_() for p in theirs]
    back = optim.AdamW(again, state_bits=8, min_8bit_size=100)
    back.load_state_dict(torchs.state_dict())
    steps(back, again, 1)
    assert back.state[again[0]]["exp_avg_codes"].dtype == torch.int8
    assert back.state[again[1]]["exp_avg"].dtype == torch.float32
    assert back.state[again[0]]["step"] == 4


@pytest.mark.parametrize("shape", [(5, 3, 7, 9), (301, 17), (70_001,)])
def test_4_bit_states_follow_the_memory_order(shape: tuple[int, ...]) -> None:
    """Two codes share a byte of a vector, also where a parameter is not contiguous or its size is odd."""
    layouts = [torch.contiguous_format] + [torch.channels_last] * (len(shape) == 4)
    values = torch.randn(shape)
    for layout in layouts:
        param = values.clone(memory_format=layout).requires_grad_()
        optimizer = optim.AdamW([param], state_bits=4, min_8bit_size=0)
        param.grad = torch.randn(shape).clone(memory_format=layout)
        optimizer.step()
        state, found = optimizer.state[param], optimizer.float32_state(param)
        assert state["exp_avg_codes"].shape == ((param.numel() + 1) // 2,)
        assert state["exp_avg_scales"].shape == (-(-param.numel() // 128),)
        assert found["exp_avg"].shape == param.shape
        assert found["exp_avg"].stride() == param.stride()
        apart = (found["exp_avg"] - 0.1 * param.grad).abs()
        assert apart.max() <= 0.4 * (0.1 * param.grad).abs().max()  # a step
        assert apart.mean() <= 0.1 * (0.1 * param.grad).abs().max()
        again = optim.AdamW([param], state_bits=4, min_8bit_size=0)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(same_bits(a, b) for a, b in zip(everything(again), everything(optimizer), strict=True))
        edited = optim.AdamW([param], state_bits=4, min_8bit_size=0)  # from values in float32
        edited.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        edited.state[param] = copy.deepcopy(found)
        for one in (again, edited, optimizer):
            before = param.detach().clone()
            one.step()
            if one is again:
                stepped = param.detach().clone()
            torch.testing.assert_close(param.detach(), stepped, rtol=0, atol=1e-6)
            param.detach().copy_(before)
        assert torch.equal(again.state[param]["exp_avg_codes"], edited.state[param]["exp_avg_codes"])


def test_torchs_class_does_not_take_codes_for_values() -> None:
    params = make_params(torch.float32)
    optimizer = optim.AdamW(params, state_bits=8, min_8bit_size=0)
    steps(optimizer, params)
    torchs = torch.optim.AdamW(params)
    torchs.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        torchs.step()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("then", ["state_32", "state_16", "master_32_state_8", "kahan_state_8", "state_4"])
def test_options_may_change_between_steps(then: str, bits: Literal[8, 4]) -> None:
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params, state_bits=bits, master_bits=24, min_8bit_size=0, lr=1e-3)
    steps(optimizer, params)
    before = [values_of(optimizer, p) for p in params]
    group = optimizer.param_groups[0]
    group.update({"state_bits": None, "master_bits": None} | PRECISIONS[then])
    group["lr"] = 0.0
    group["betas"] = (1.0 - 1e-16, 1.0 - 1e-16)
    steps(optimizer, params, 1)
    for param, values in zip(params, before, strict=True):
        after = values_of(optimizer, param)
        assert optimizer.state[param]["step"] == 3
        fresh = make_params(torch.bfloat16, [param.shape])
        other = optim.AdamW(fresh, **PRECISIONS[then], min_8bit_size=0)
        steps(other, fresh, 1)
        assert optimizer.state[param].keys() == other.state[fresh[0]].keys()  # The old format's states are gone.
        # A 4-bit mean is a step off at most, (343 - 216) / 343, and a mean of squares as well.
        tolerance = {"state_16": 2**-8, "state_4": 2**-6 if bits == 4 else 0.4}.get(then, 2**-6)
        for name, value in values.items():
            scale = value.abs().max().item() if value.numel() else 0.0
            assert ((after[name] - value).abs() <= tolerance * scale + 1e-30).all(), name


def test_groups_have_options_of_their_own() -> None:
    embedding, matrix, bias = make_params(torch.bfloat16, [(100, 64), (64, 100), (100,)])
    optimizer = optim.AdamW(
        [{"params": [embedding], "state_bits": 32, "master_bits": None}, {"params": [matrix, bias]}],
        state_bits=8,
        master_bits=24,
    )
    steps(optimizer, [embedding, matrix, bias])
    assert optimizer.state[embedding]["exp_avg"].dtype == torch.float32
    assert "param_remainder" not in optimizer.state[embedding]
    assert optimizer.state[matrix]["exp_avg_sq_codes"].dtype == torch.uint8
    assert optimizer.state[matrix]["param_remainder"].dtype == torch.int8
    assert optimizer.state[bias]["exp_avg"].dtype == torch.float32
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "min_8bit_size": 7})
    assert optimizer.param_groups[-1]["min_8bit_size"] == 7
    assert optimizer.param_groups[-1]["master_bits"] == 24


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_an_overflow_under_a_scaler_changes_nothing(scaler_class: type) -> None:
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params, state_bits=8, master_bits=24, min_8bit_size=0, max_grad_norm=1.0)
    steps(optimizer, params)
    before = copy.deepcopy(everything(optimizer))
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for param in params:
        param.grad = torch.randn_like(param)
    params[0].grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert all(same_bits(a, b) for a, b in zip(before, everything(optimizer), strict=True))
    assert scaler.get_scale() == 2.0


def test_memory_of_states() -> None:
    param = torch.randn(1024, 1024).bfloat16().requires_grad_()
    for master_bits, limit in ((32, 8.2), (24, 7.2)):
        optimizer = optim.AdamW([param], state_bits=8, master_bits=master_bits)
        steps(optimizer, [param], 1)
        tensors = [param, param.grad, *optimizer.state[param].values()]
        assert sum(t.untyped_storage().nbytes() for t in tensors) / param.numel() <= limit


@pytest.mark.parametrize("options", [{"master_bits": 32}, {"rounding": "kahan"}, {"rounding": "stochastic"}])
@pytest.mark.parametrize("grad", [3e-3, 1e-5])
def test_squares_of_small_float16_gradients_do_not_vanish(options: dict[str, Any], grad: float) -> None:
    param, reference = torch.ones(300, dtype=torch.float16).requires_grad_(), torch.ones(300).requires_grad_()
    optimizer = optim.AdamW([param], lr=1e-3, weight_decay=0.0, eps=1e-10, **options)
    torch_optimizer = torch.optim.AdamW([reference], lr=1e-3, weight_decay=0.0, eps=1e-10)
    for _ in range(5):
        param.grad = torch.full_like(param, grad)
        reference.grad = param.grad.float()
        optimizer.step()
        torch_optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].dtype == torch.float32
    # A float16 number next to 1 is off by up to 2^-10 under stochastic rounding, in each step.
    tolerance = 5 * 2**-10 if "stochastic" in options.values() else 1e-6
    torch.testing.assert_close(optimizer.float32_value(param), reference.detach(), rtol=0, atol=tolerance)


def test_float16_states_of_older_checkpoints_are_widened() -> None:
    param = torch.ones(300, dtype=torch.float16).requires_grad_()
    optimizer = optim.AdamW([param], master_bits=32)
    steps(optimizer, [param], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] |= {name: saved["state"][0][name].half() for name in ("exp_avg", "exp_avg_sq")}
    optimizer.load_state_dict(saved)
    steps(optimizer, [param], 1)
    assert {optimizer.state[param][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize(("numel", "is_small"), [(65_536, True), (65_537, False)])
def test_long_vectors_have_8_bit_states(numel: int, is_small: bool) -> None:
    param, matrix = torch.randn(numel).requires_grad_(), torch.randn(64, 64).requires_grad_()
    optimizer = optim.AdamW([("flat", param), ("matrix", matrix)], state_bits=8)
    steps(optimizer, [param, matrix], 2)
    assert ("exp_avg" in optimizer.state[param]) == is_small
    assert optimizer.report().kept_32_bits == ({"flat": numel} if is_small else {})
    assert ("'flat'" in str(optimizer.report())) == is_small
    infos = [
        ParameterInfo(name, tuple(each.shape), each.dtype, True, each.nbytes)
        for name, each in (("flat", param), ("matrix", matrix))
    ]
    held = [
        sum(value.nbytes for name, value in optimizer.state[each].items() if name != "step") for each in (param, matrix)
    ]
    assert [sum(each) for each in state_bytes(infos, "AdamW", state_bits=8)] == held
    assert kept_32_bits(infos) == optimizer.report().kept_32_bits


# ---- Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_bits": 2}, "state_bits is 2, expected one of None, 32, 16, 8, 4, 'fp8'"),
        ({"state_bits": "fp4"}, "state_bits is 'fp4', expected one of None, 32, 16, 8, 4, 'fp8'"),
        ({"master_bits": 16}, "master_bits is 16, expected one of None, 32, 24"),
        ({"rounding": "up"}, "rounding is 'up', expected one of 'nearest', 'stochastic', 'kahan'"),
        ({"min_8bit_size": -1}, "min_8bit_size is -1, expected a whole number"),
        ({"min_8bit_size": 1.5}, "min_8bit_size is 1.5, expected a whole number"),
        ({"rounding": "kahan", "master_bits": 32}, "rounding='kahan' is for parameters without a master"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    param = torch.zeros(3).requires_grad_()
    with pytest.raises(ValueError, match=message):
        optim.AdamW([param], **options)
    with pytest.raises(ValueError, match=message):
        optim.AdamW([{"params": [param], **options}])
    optimizer = optim.AdamW([param])
    optimizer.param_groups[0].update(options)
    param.grad = torch.zeros(3)
    with pytest.raises(ValueError, match=message):
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float16, {"master_bits": 24}, "'w': master_bits=24 needs a bfloat16 parameter, this is Half"),
        (torch.float64, {"state_bits": 8}, "'w': state_bits=8 is not for Double parameters"),
        (torch.float64, {"state_bits": "fp8"}, "'w': state_bits='fp8' is not for Double parameters"),
        (torch.complex64, {"state_bits": 16}, "'w': state_bits=16 needs real parameters, this is ComplexFloat"),
    ],
)
def test_options_that_do_not_fit_a_parameter(dtype: torch.dtype, options: dict[str, Any], message: str) -> None:
    good, bad = torch.zeros(3).requires_grad_(), torch.zeros(3, dtype=dtype).requires_grad_()
    with pytest.raises(ValueError, match=message):
        optim.AdamW([("good", good), ("w", bad)], **options)
    optimizer = optim.AdamW([("good", good)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("w", bad)], **options})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=message):
        optim.AdamW([("good", good)], **options).add_param_group({"params": [("w", bad)]})
    optimizer.add_param_group({"params": [("w", bad)]})
    optimizer.param_groups[1].update(options)
    good.grad, bad.grad = torch.ones_like(good), torch.ones_like(bad)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(good, torch.zeros(3))
    assert not optimizer.state


def test_frozen_parameters_may_have_any_dtype() -> None:
    params = [torch.zeros(3).requires_grad_(), torch.zeros(3, dtype=torch.float64)]
    optimizer = optim.AdamW(params, state_bits=8)
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert list(optimizer.state) == [params[0]]


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [SHAPES, [(3, 171), (5, 67), (300, 17)]], ids=["mixed", "matrices"])
@precisions
@cases
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_cuda_gives_the_cpus_bits(case: str, precision: str, dtype: torch.dtype, shapes: list[Any]) -> None:
    """Vectors keep float32 states, so that matrices alone reach the kernels of 8-bit ones by themselves."""
    if not fits(precision, dtype):
        pytest.skip("24 bits are for bfloat16 parameters")
    ours, _, options = CASES[case]
    params = make_params(dtype, shapes)
    on_gpu = [p.detach().cuda().requires_grad_() for p in params]
    optimizers = [ours(own, **options, **PRECISIONS[precision], min_8bit_size=0) for own in (params, on_gpu)]
    for _ in range(3):
        set_grads(params, on_gpu)
        for param, other in zip(params, on_gpu, strict=True):
            other.grad = param.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(everything(optimizers[0]), everything(optimizers[1]), strict=True):
        assert same_bits(a, b.cpu())
