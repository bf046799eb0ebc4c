"""Measures optimizer steps on a GPU: every layout against torch's fused and foreach steps, and against a copy."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain import optim
from drivetrain.bench.measure import Row, interleaved, ratio_row
from drivetrain.bench.optim import (
    COMPRESSED,
    MAX_NORM,
    OTHERS,
    SCALE,
    ForeachLamb,
    check_same,
    grad_of,
    models,
    our_tail,
    torch_tail,
)
from drivetrain.bench.roofline import least_bytes
from drivetrain.bench.shapes import Shape, gpt2_124m, gpt3_xl, many_small, resnet50


@dataclass(frozen=True)
class Layout:
    """The optimizer and the precision of its values, on both sides."""

    what: str
    ours: Callable[..., Any]
    theirs: dict[str, Callable[..., Any]]  # torch's implementations, the fastest first
    dtype: torch.dtype = torch.float32
    precision: dict[str, Any] = field(default_factory=dict)  # options of ours
    torch_dtype: torch.dtype = torch.float32  # of torch's parameters, gradients and states
    passes: dict[str, int] = field(default_factory=dict)  # that the algorithm must make, if not one (least_bytes)


def _ways(of: Callable[..., Any], fused: bool = True) -> dict[str, Callable[..., Any]]:
    ways = ["fused", "foreach"] if fused else ["foreach"]
    return {way: functools.partial(of, **{way: True}) for way in ways}


_ADAMW, _SGD = _ways(torch.optim.AdamW), functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
_BF16 = torch.bfloat16
LAYOUTS = (
    Layout("AdamW fp32", optim.AdamW, _ADAMW),
    Layout("AdamW fp32, 16-bit states", optim.AdamW, _ADAMW, precision={"state_bits": 16}),
    Layout("AdamW fp32, 8-bit states", optim.AdamW, _ADAMW, precision={"state_bits": 8}),
    Layout("AdamW bf16, fp32 states", optim.AdamW, _ADAMW, _BF16, {"state_bits": 32}),
    Layout("AdamW bf16, torch's too", optim.AdamW, _ADAMW, _BF16, torch_dtype=_BF16),
    Layout("AdamW bf16, Kahan, 16-bit states", optim.AdamW, _ADAMW, _BF16, {"rounding": "kahan", "state_bits": 16}),
    Layout(
        "AdamW bf16, stochastic, 8-bit states", optim.AdamW, _ADAMW, _BF16, {"rounding": "stochastic", "state_bits": 8}
    ),
    Layout(
        "AdamW bf16, 16-bit remainder, fp32 states", optim.AdamW, _ADAMW, _BF16, {"master_bits": 32, "state_bits": 32}
    ),
    Layout(
        "AdamW bf16, 16-bit remainder, 16-bit states", optim.AdamW, _ADAMW, _BF16, {"master_bits": 32, "state_bits": 16}
    ),
    Layout("AdamW bf16, 16-bit remainder, 8-bit states", optim.AdamW, _ADAMW, _BF16, COMPRESSED),
    Layout(
        "AdamW bf16, 8-bit remainder, 8-bit states", optim.AdamW, _ADAMW, _BF16, {"master_bits": 24, "state_bits": 8}
    ),
    Layout("SGD with momentum fp32", functools.partial(optim.SGD, lr=1e-3, momentum=0.9), _ways(_SGD)),
    Layout("Adagrad fp32", optim.Adagrad, _ways(torch.optim.Adagrad, fused=False)),
    Layout("RMSprop fp32", optim.RMSprop, _ways(torch.optim.RMSprop, fused=False)),
    # Norms precede the update. LAMB's first pass reads all and can write the states, whose second pass reads the rest
    # again: 40 bytes in float32. Adafactor sums squares, then measures directions, then steps: 24 bytes.
    Layout("LAMB fp32", optim.LAMB, {"foreach": ForeachLamb}, passes={"param_passes": 3, "state_passes": 3}),
    Layout(
        "Adafactor fp32",
        optim.Adafactor,
        _ways(torch.optim.Adafactor, fused=False),
        passes={"param_passes": 3, "grad_passes": 3},
    ),
    Layout("Lion fp32, against torch's AdamW", optim.Lion, _ADAMW),
)
COPIED_BYTES = 1 << 30


def run_copy(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields the bandwidth of a copy within the device's memory, in bytes read plus bytes written."""
    copy, moved = _copy(device, is_dry)
    (seconds,) = interleaved([copy], rounds, device=device)
    yield Row("copy of 1 GiB, bytes read and written", "GB/s", moved / statistics.median(seconds) / 1e9)


def run_steps(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields rows per layout. Raises AssertionError if both sides compute in float32 and disagree."""
    gpt2 = _shapes(gpt2_124m(), is_dry)
    for layout in LAYOUTS:
        yield from _layout_rows(layout, ", GPT-2 124M", gpt2, device, rounds, is_dry)
    for what, shapes in ((", ResNet-50", resnet50()), (", 10,000 x 64", many_small())):
        yield from _layout_rows(LAYOUTS[0], what, _shapes(shapes, is_dry), device, rounds, is_dry)
    for what, shapes, theirs, ours, _, most, share in OTHERS:
        if ours is optim.Muon:
            yield _muon_row(
                what, shapes if not is_dry else [(16, 48), (48, 16)], theirs, device, min(rounds, most), share
            )


def run_tails(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Compares torch's four calls in float32 (unscaling, clipping, AdamW and zeroing) with our step."""
    tail = "unscale, clip, AdamW, zero"
    for what, shapes, dtype, precision in (
        (f"{tail} fp32, GPT-2 124M", gpt2_124m(), torch.float32, {}),
        (f"{tail} fp32, ResNet-50", resnet50(), torch.float32, {}),
        (f"{tail} bf16, 16-bit remainder, 8-bit states, GPT-2 124M", gpt2_124m(), _BF16, COMPRESSED),
    ):
        theirs, ours = sides = models(_shapes(shapes, is_dry), dtype, device)
        scaled = [[grad_of(p) * SCALE for p in side] for side in sides]
        optimizer = optim.AdamW(ours, **precision, max_grad_norm=MAX_NORM, zero_grads_in_step=True)

        def fill(which: int, sides: Any = sides, scaled: list[list[Tensor]] = scaled) -> None:
            torch._foreach_copy_([grad_of(p) for p in sides[which]], scaled[which])

        torch_s, ours_s = interleaved((torch_tail(theirs), our_tail(optimizer)), rounds, prepare=fill, device=device)
        if not precision:
            check_same(theirs, ours)
        yield ratio_row(what, torch_s, ours_s)


def run_rivals(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Compares our AdamW with FlashAdamW of the package flashoptim on 1.3 B parameters, both with 24-bit master
    weights.

    FlashAdamW runs on CUDA only, so a dry run uses torch's AdamW instead.

    Raises:
        ImportError: flashoptim is not installed.
    """
    name, rival = "torch's AdamW", functools.partial(torch.optim.AdamW)
    if not is_dry:
        from flashoptim import FlashAdamW  # type: ignore[import-not-found]

        name, rival = "FlashAdamW", functools.partial(FlashAdamW, master_weight_bits=24)
    shapes = _shapes(gpt3_xl(), is_dry)
    what = f"{_count(shapes) / 1e9:.1f} B parameters, 24-bit masters, 8-bit states, against {name}"
    starts = models(shapes, _BF16, device)[1]
    theirs, ours = _copies(starts), _copies(starts)
    hypers: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
    optimizers = [rival(theirs, **hypers), optim.AdamW(ours, master_bits=24, state_bits=8, **hypers)]
    theirs_s, ours_s = interleaved([each.step for each in optimizers], rounds, device=device)
    _check_like(theirs, ours, starts)
    yield ratio_row(what, theirs_s, ours_s)
    at_rest = [_bytes_at_rest(*side) / _count(shapes) for side in zip((theirs, ours), optimizers, strict=True)]
    yield Row(f"  bytes per parameter at rest, {name} | ours", "", at_rest[0], at_rest[1])


def _copies(params: list[Tensor]) -> list[Tensor]:
    copies = [param.detach().clone().requires_grad_() for param in params]
    for copy, param in zip(copies, params, strict=True):
        copy.grad = grad_of(param).clone()
    return copies


def _check_like(theirs: list[Tensor], ours: list[Tensor], starts: list[Tensor]) -> None:
    """Raises AssertionError unless both sides' updates agree up to the rounding of their 8-bit codes."""
    for a, b, start in zip(theirs, ours, starts, strict=True):
        theirs_moved, ours_moved = a.detach().float() - start.float(), b.detach().float() - start.float()
        if not (theirs_moved - ours_moved).norm() <= 0.1 * theirs_moved.norm():
            raise AssertionError(f"updates of a parameter of shape {tuple(a.shape)} differ by more than 10 %")


def _bytes_at_rest(params: list[Tensor], optimizer: Any) -> int:
    """Returns the bytes of parameters and states, including the parts of flashoptim's quantized tensors."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(_num_bytes(each) for each in [*params, *states])


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(each.nbytes for each in getattr(value, "__dict__", {}).values() if isinstance(each, Tensor))


def _count(shapes: list[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _layout_rows(
    layout: Layout, what: str, shapes: list[Shape], device: torch.device, rounds: int, is_dry: bool
) -> Iterator[Row]:
    ours = models(shapes, layout.dtype, device)[1]
    theirs = [models(shapes, layout.torch_dtype, device)[1] for _ in layout.theirs]
    optimizers = [make(params) for make, params in zip(layout.theirs.values(), theirs, strict=True)]
    optimizers.append(layout.ours(ours, **layout.precision))
    copy, moved = _copy(device, is_dry)
    *torch_s, ours_s, copy_s = interleaved([*(each.step for each in optimizers), copy], rounds, device=device)
    if layout.ours is optim.AdamW and layout.dtype == torch.float32 and not layout.precision:
        check_same(theirs[0], ours)
    best, *others = layout.theirs
    yield ratio_row(f"{layout.what}{what}, against {best}", torch_s[0], ours_s)
    for other, other_s in zip(others, torch_s[1:], strict=True):
        yield ratio_row(f"  against {other}", other_s, ours_s)
    rates, shares = [], []
    for params, optimizer, times in ((theirs[0], optimizers[0], torch_s[0]), (ours, optimizers[-1], ours_s)):
        least = least_bytes(params, optimizer, **layout.passes)
        rates.append(least / statistics.median(times) / 1e9)
        shares.append(100 * statistics.median(least / s * c / moved for s, c in zip(times, copy_s, strict=True)))
    yield Row("  bandwidth, on the bytes that a step must move", "GB/s", rates[0], rates[1])
    yield Row("  share of a copy's bandwidth", "%", shares[0], shares[1])


def _muon_row(what: str, shapes: list[Shape], theirs: Any, device: torch.device, rounds: int, share: float) -> Row:
    """Returns a row of times only, because Muon is bound by matrix products and not by memory."""
    sides = models(shapes, device=device)
    starts = [p.detach().clone() for p in sides[0]]
    torch_s, ours_s = interleaved([theirs(sides[0]).step, optim.Muon(sides[1]).step], rounds, device=device)
    for before, a, b in zip(starts, *sides, strict=True):
        if not (a - b).norm() <= share * (a - before).norm():
            raise AssertionError(f"{what}: a parameter of shape {tuple(a.shape)} differs by more than {share:g}")
    return ratio_row(what, torch_s, ours_s)


def _copy(device: torch.device, is_dry: bool) -> tuple[Callable[[], object], int]:
    """Returns a function that copies, and the bytes that it reads and writes."""
    source = torch.randn((1 << 16 if is_dry else COPIED_BYTES) // 4, device=device)
    target = torch.empty_like(source)
    return functools.partial(target.copy_, source), 2 * source.nbytes


def _shapes(shapes: list[Shape], is_dry: bool) -> list[Shape]:
    return [(33, 8), (8,), (1,)] if is_dry else shapes
