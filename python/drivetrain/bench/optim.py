"""Measures AdamW steps and whole tails of training steps, also with fewer bits, against torch's fused AdamW."""

import functools
import importlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor

from .. import _C, optim, swap
from ..amp import GradScaler
from .measure import Row, interleaved, median_interval, ratio_row
from .ranks import meet, on_ranks
from .roofline import least_bytes, with_roofline
from .shapes import Shape, gpt2_124m, many_small, resnet50

# Name, shapes, target for the ratio, and True if the upper end of the interval must meet it.
CASES = (
    ("AdamW fp32, GPT-2 124M", gpt2_124m(), 1.03, True),
    ("AdamW fp32, ResNet-50", resnet50(), 0.85, False),
    ("AdamW fp32, 10,000 x 64", many_small(), 0.06, False),
)

# Name, shapes and target for unscaling, clipping, AdamW and zeroing together.
TAILS = (
    ("unscale, clip, AdamW, zero fp32, GPT-2 124M", gpt2_124m(), 1 / 1.6),
    ("unscale, clip, AdamW, zero fp32, ResNet-50", resnet50(), 1 / 2.1),
)
# Torch's lines after backward run unedited, on torch's classes and on those that drivetrain.install(optim=True) puts in
# their place. The columns are name, shapes, whether zero_grad() leaves zeros instead of None, and target.
STOCK_TAILS = (
    ("stock loop, --optim, GPT-2 124M", gpt2_124m(), False, 1.0),
    ("stock loop, --optim, ResNet-50", resnet50(), False, 1.0),
    ("stock loop, --optim, set_to_none=False, GPT-2 124M", gpt2_124m(), True, 1.0),
    ("stock loop, --optim, set_to_none=False, ResNet-50", resnet50(), True, 1.0),
)
OWN_TAIL_PASSES = 3  # over gradients: a read for the norm, a read and a write of the step
FP32_STEP_BYTES = 28  # per parameter: reads the value, the gradient and two states, and writes all but the gradient
MAX_NORM = 1.0
SCALE = 2.0**10


def run(threads: int, rounds: int) -> list[Row]:
    """Returns one row per case. Raises AssertionError if the two optimizers' parameters disagree."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [
            _measure(what, shapes, target, strict_end, rounds)
            for what, shapes, target, strict_end in track(CASES, description="optimizers", transient=True)
        ]
        for what, shapes, target in track(TAILS, description="tails of a step", transient=True):
            rows.append(_measure_tail(what, shapes, target, rounds))
        for what, shapes, zeroes, target in track(STOCK_TAILS, description="stock loops", transient=True):
            rows.append(_measure_stock_tail(what, shapes, zeroes, target, rounds))
        for measure in track(PRECISION_ROWS, description="fewer bits", transient=True):
            rows += measure(rounds)
        return rows + _measure_family(rounds)
    finally:
        torch.set_num_threads(before)


def _measure(what: str, shapes: list[Shape], target: float, strict_end: bool, rounds: int) -> Row:
    theirs, ours = models(shapes)
    optimizer = optim.AdamW(ours)
    torch_s, ours_s = interleaved((torch.optim.AdamW(theirs, fused=True).step, optimizer.step), rounds)
    check_same(theirs, ours)
    row = ratio_row(what, torch_s, ours_s, target, strict_end=strict_end)
    return with_roofline(row, least_bytes(ours, optimizer))


def _measure_tail(what: str, shapes: list[Shape], target: float, rounds: int) -> Row:
    theirs, ours = models(shapes)
    optimizer = optim.AdamW(ours, max_grad_norm=MAX_NORM, zero_grads_in_step=True)
    torch_s, ours_s = _timed_tails(theirs, ours, (torch_tail(theirs), our_tail(optimizer)), rounds)
    check_same(theirs, ours)
    row = ratio_row(what, torch_s, ours_s, target)
    return with_roofline(row, least_bytes(ours, optimizer, grad_passes=OWN_TAIL_PASSES))


def _measure_stock_tail(what: str, shapes: list[Shape], zeroes: bool, target: float, rounds: int) -> Row:
    theirs, ours = models(shapes)
    torchs_tail = torch_tail(theirs, zeroes=zeroes)
    swap.install(optim=True)
    try:
        swapped_tail = torch_tail(ours, zeroes=zeroes)
    finally:
        swap.uninstall()
    torch_s, ours_s = _timed_tails(theirs, ours, (torchs_tail, swapped_tail), rounds)
    check_same(theirs, ours)
    # Bytes: unscaling and clipping read and write each gradient, the norm reads it, and zero_grad() writes it.
    beyond_step = 24 if zeroes else 20
    numel = sum(p.numel() for p in ours)
    return with_roofline(ratio_row(what, torch_s, ours_s, target), (FP32_STEP_BYTES + beyond_step) * numel)


def _timed_tails(
    theirs: list[Tensor], ours: list[Tensor], tails: tuple[Callable[[], None], Callable[[], None]], rounds: int
) -> list[list[float]]:
    """Times two tails, each on the scaled gradients of its parameters."""
    scaled = [[grad_of(p) * SCALE for p in params] for params in (theirs, ours)]

    def fill(which: int) -> None:
        for param, grad in zip((theirs, ours)[which], scaled[which], strict=True):
            if param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad.copy_(grad)

    return interleaved(tails, rounds, prepare=fill)


# ---- Bandwidth, host time, and fewer bits; all on the shapes of GPT-2 124M.


def _measure_bandwidth(rounds: int) -> list[Row]:
    """Compares the bandwidth of the fp32 step (28 bytes per parameter) with an in-place triad (12 bytes per
    element)."""
    _, ours = models(gpt2_124m())
    numel = sum(p.numel() for p in ours)
    a, b = torch.randn(numel), torch.randn(numel)
    triad_s, ours_s = interleaved((lambda: a.add_(b, alpha=1e-9), optim.AdamW(ours).step), rounds)
    shares = [FP32_STEP_BYTES / 12 * t / o for t, o in zip(triad_s, ours_s, strict=True)]
    share, low, high = median_interval(shares)
    triad = 12 * numel / statistics.median(triad_s) / 1e9
    step = FP32_STEP_BYTES * numel / statistics.median(ours_s) / 1e9
    what = "AdamW fp32: bandwidth, against a.add_(b, alpha=s)"
    return [Row(what, "GB/s", triad, step, share, low, high, ">= 0.95", share >= 0.95)]


def _measure_host_time(rounds: int) -> list[Row]:
    """Measures how much longer 300 tensors take than one of as many elements, both in one block of memory."""
    count, numel = 300, 4096
    beyond = []
    for make in (functools.partial(torch.optim.AdamW, fused=True), optim.AdamW):
        whole, (cut,) = models([(count * numel,)])
        pieces = [piece.requires_grad_() for piece in cut.detach().chunk(count)]
        for piece, grad in zip(pieces, grad_of(cut).chunk(count), strict=True):
            piece.grad = grad
        one, many = make(whole), make(pieces)
        many.step()
        for name in ("exp_avg", "exp_avg_sq"):
            block = torch.cat([many.state[piece][name] for piece in pieces])
            for piece, state in zip(pieces, block.chunk(count), strict=True):
                many.state[piece][name] = state
        many_s, one_s = interleaved([many.step, one.step], 10 * rounds)
        beyond.append(statistics.median(m - o for m, o in zip(many_s, one_s, strict=True)) * 1e6)
    what = "AdamW fp32, 300 x 4096: host time beyond one tensor"
    return [Row(what, "us", beyond[0], beyond[1], target="<= 100 us", met=beyond[1] <= 100)]


def _measure_compressed_tail(rounds: int) -> list[Row]:
    """Compares torch's fp32 tail with ours on bfloat16 parameters, 16-bit remainders and 8-bit states."""
    theirs, ours = models(gpt2_124m(), torch.bfloat16)
    start = [p.detach().clone() for p in theirs]
    optimizer = optim.AdamW(ours, **COMPRESSED, max_grad_norm=MAX_NORM, zero_grads_in_step=True)
    torch_s, ours_s = _timed_tails(theirs, ours, (torch_tail(theirs), our_tail(optimizer)), rounds)
    for before, a, b in zip(start, theirs, ours, strict=True):
        moved, apart = a.detach() - before, optimizer.float32_value(b) - a.detach()
        if apart.norm() > 0.1 * moved.norm():  # 8-bit codes round states by a few percent
            raise AssertionError(
                f"8-bit states changed the update by {apart.norm() / moved.norm():.1%}, expected 10 % at most"
            )
    what = "the tail with bf16, 16-bit remainder, 8-bit states"
    row = ratio_row(what, torch_s, ours_s, 0.45)
    return [with_roofline(row, least_bytes(ours, optimizer, grad_passes=OWN_TAIL_PASSES))]


def _measure_bf16(rounds: int) -> list[Row]:
    """Compares steps with parameters, gradients and states in bfloat16 on both sides."""
    theirs, ours = (models(gpt2_124m(), torch.bfloat16)[1] for _ in range(2))
    optimizer = optim.AdamW(ours)
    torch_s, ours_s = interleaved((torch.optim.AdamW(theirs, fused=True).step, optimizer.step), rounds)
    return [with_roofline(ratio_row("AdamW pure bf16", torch_s, ours_s, 0.65), least_bytes(ours, optimizer))]


def _measure_others_8_bit(rounds: int) -> list[Row]:
    """Compares with the 8-bit AdamW of installed packages on fp32 parameters; their figures replace torch's."""
    rows = []
    for package, module, name in (
        ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
        ("torchao", "torchao.optim", "AdamW8bit"),
    ):
        try:
            other_class = getattr(importlib.import_module(module), name)
        except ImportError:
            print(
                f"bench optim: {package} is not installed, so its row is omitted (pip install {package})",
                file=sys.stderr,
            )
            continue
        theirs, ours = models(gpt2_124m())
        optimizer = optim.AdamW(ours, state_bits=8)
        steps = other_class(theirs, lr=1e-3).step, optimizer.step
        theirs_s, ours_s = interleaved(steps, min(rounds, 5), warm_up=1)
        row = ratio_row(f"AdamW 8-bit, against {package} on the CPU", theirs_s, ours_s, 0.05)
        rows.append(with_roofline(row, least_bytes(ours, optimizer)))
    return rows


def _measure_float8(rounds: int) -> list[Row]:
    """Compares float8 states with block codes, whose figures replace torch's. No target: they are alternatives."""
    rows = []
    cases: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
        ("AdamW fp32: float8 states against block codes", torch.float32, {}),
        ("AdamW bf16, 16-bit remainder: float8 against block codes", torch.bfloat16, {"master_bits": 32}),
    )
    for what, dtype, options in cases:
        codes, float8 = (models(gpt2_124m(), dtype)[1] for _ in range(2))
        optimizers = optim.AdamW(codes, state_bits=8, **options), optim.AdamW(float8, state_bits="fp8", **options)
        codes_s, float8_s = interleaved((optimizers[0].step, optimizers[1].step), rounds)
        rows.append(with_roofline(ratio_row(what, codes_s, float8_s), least_bytes(float8, optimizers[1])))
    return rows


def _measure_instruction_sets(rounds: int) -> list[Row]:
    """Compares AVX2 with AVX-512, whose figures replace torch's."""
    if not {"avx2", "avx512"} <= set(_C.available_isas()):
        print("bench optim: this processor lacks AVX-512, so the rows against AVX2 are omitted", file=sys.stderr)
        return []
    rows = []
    for what, dtype, options, target in (
        ("AdamW fp32: AVX2 against AVX-512", torch.float32, {}, 1 / 0.9),
        ("AdamW bf16, 16-bit remainder, 8 bits: AVX2 against AVX-512", torch.bfloat16, COMPRESSED, 1.15),
    ):
        params = [models(gpt2_124m(), dtype)[1] for _ in range(2)]
        optimizers = [optim.AdamW(each, **options) for each in params]

        def step(which: int, optimizers: list[optim.AdamW] = optimizers) -> None:
            _C.force_isa(("avx512", "avx2")[which])
            try:
                optimizers[which].step()
            finally:
                _C.force_isa("")

        wide_s, narrow_s = interleaved((functools.partial(step, 0), functools.partial(step, 1)), rounds)
        row = ratio_row(what, wide_s, narrow_s, target)
        rows.append(with_roofline(row, least_bytes(params[1], optimizers[1])))
    return rows


def _measure_bytes(rounds: int) -> list[Row]:
    """Measures the bytes of parameters, gradients and states, per parameter."""
    rows = []
    theirs = models(gpt2_124m())[0]
    reference = torch.optim.AdamW(theirs, fused=True)
    reference.step()
    torch_bytes = _bytes_per_parameter(reference, theirs)
    for master_bits, target in ((32, 8.2), (24, 7.2)):
        params = models(gpt2_124m(), torch.bfloat16)[1]
        optimizer = optim.AdamW(params, **COMPRESSED | {"master_bits": master_bits})
        optimizer.step()
        compressed = [p for p in params if "exp_avg_codes" in optimizer.state[p]]
        ours = _bytes_per_parameter(optimizer, compressed)
        what = f"bytes per parameter: bf16, master_bits={master_bits}, 8-bit states"
        rows.append(Row(what, "B", torch_bytes, ours, target=f"<= {target}", met=ours <= target))
        rows.append(Row("  of the whole model", "B", torch_bytes, _bytes_per_parameter(optimizer, params)))
    return rows


def _bytes_per_parameter(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> float:
    tensors = [t for p in params for t in (p, grad_of(p), *optimizer.state[p].values())]
    num_bytes: int = sum(t.untyped_storage().nbytes() for t in tensors)
    return num_bytes / sum(p.numel() for p in params)


COMPRESSED: dict[str, Any] = {"master_bits": 32, "state_bits": 8}
PRECISION_ROWS = (
    _measure_bandwidth,
    _measure_host_time,
    _measure_compressed_tail,
    _measure_bf16,
    _measure_others_8_bit,
    _measure_float8,
    _measure_instruction_sets,
    _measure_bytes,
)


# ---- Optimizers that need several passes.


GPT2_LAYER: list[Shape] = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
# 48 matrices of a small model, which Muon batches.
SMALL_LAYERS: list[Shape] = [(128, 384), (128, 128), (128, 512), (512, 128)] * 12


class ForeachLamb:
    """LAMB written with torch's foreach functions and the defaults of optim.LAMB."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.count = params, 0
        self.mean = [torch.zeros_like(p) for p in params]
        self.mean_sq = [torch.zeros_like(p) for p in params]
        states = zip(params, self.mean, self.mean_sq, strict=True)
        self.state = {p: {"exp_avg": mean, "exp_avg_sq": mean_sq} for p, mean, mean_sq in states}

    @torch.no_grad()
    def step(self) -> None:
        """Takes a step with lr 1e-3, betas 0.9 and 0.999, eps 1e-6 and weight decay 0.01."""
        self.count += 1
        grads = [p.grad for p in self.params if p.grad is not None]
        torch._foreach_lerp_(self.mean, grads, 1 - 0.9)
        torch._foreach_mul_(self.mean_sq, 0.999)
        torch._foreach_addcmul_(self.mean_sq, grads, grads, 1 - 0.999)
        directions = torch._foreach_sqrt(self.mean_sq)
        torch._foreach_div_(directions, (1 - 0.999**self.count) ** 0.5)
        torch._foreach_add_(directions, 1e-6)
        torch._foreach_reciprocal_(directions)
        torch._foreach_mul_(directions, self.mean)
        torch._foreach_div_(directions, 1 - 0.9**self.count)
        torch._foreach_add_(directions, self.params, alpha=0.01)
        param_norms, norms = torch._foreach_norm(self.params), torch._foreach_norm(directions)
        ratios = [torch.where((p > 0) & (n > 0), p / n, 1.0) for p, n in zip(param_norms, norms, strict=True)]
        torch._foreach_mul_(directions, ratios)
        torch._foreach_add_(self.params, directions, alpha=-1e-3)


# Name, shapes, torch's side, ours, target for the ratio, most rounds, and the tolerated difference relative to the
# update. torch sums norms in float32, which is 0.3 % too small over 38 M elements; Muon iterates in bfloat16.
OTHERS: tuple[tuple[str, list[Shape], Callable[..., Any], Callable[..., Any], float, int, float], ...] = (
    ("LAMB fp32, GPT-2 124M (torch: foreach calls)", gpt2_124m(), ForeachLamb, optim.LAMB, 0.5, 31, 0.01),
    ("Adafactor fp32, GPT-2 124M", gpt2_124m(), torch.optim.Adafactor, optim.Adafactor, 0.5, 15, 0.01),
    ("Muon fp32, a layer of GPT-2 124M", GPT2_LAYER, torch.optim.Muon, optim.Muon, 1.05, 7, 0.1),
    ("Muon fp32, 48 matrices of 128 x 128 to 512", SMALL_LAYERS, torch.optim.Muon, optim.Muon, 0.8, 15, 0.1),
)


def _measure_family(rounds: int) -> list[Row]:
    """Returns one row per optimizer. Raises AssertionError if the two sides' parameters disagree."""
    rows = []
    for what, shapes, theirs, ours, target, most, share in track(OTHERS, description="several passes", transient=True):
        torch.manual_seed(0)
        start = [torch.randn(shape).mul_(0.02) for shape in shapes]
        models = [[p.clone().requires_grad_() for p in start] for _ in range(2)]
        for a, b in zip(*models, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer = ours(models[1])
        torch_s, ours_s = interleaved((theirs(models[0]).step, optimizer.step), min(rounds, most), warm_up=2)
        for before, a, b in zip(start, *models, strict=True):
            if not (a - b).norm() <= share * (a - before).norm():
                raise AssertionError(f"{what}: a parameter of shape {tuple(a.shape)} differs by more than {share:g}")
        row = ratio_row(what, torch_s, ours_s, target)
        # Muon is bound by matrix products.
        rows.append(row if ours is optim.Muon else with_roofline(row, least_bytes(models[1], optimizer)))
    alone_s, shared_s = on_ranks(functools.partial(_on_a_rank, min(rounds, 7)))
    rows.append(ratio_row("Muon fp32, 3 layers of GPT-2 124M, on 2 ranks: alone; shared", alone_s, shared_s, 0.6))
    return rows


def _on_a_rank(rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of steps that every rank computes, and of steps whose matrices ranks share."""
    steps = []
    for group in (None, dist.group.WORLD):
        params = [torch.randn(shape).mul_(0.02).requires_grad_() for shape in GPT2_LAYER * 3]
        for param in params:
            param.grad = torch.randn_like(param)
        steps.append(optim.Muon(params, process_group=group).step)
    alone_s, shared_s = interleaved(steps, rounds, warm_up=2, prepare=lambda which: meet())
    return alone_s, shared_s


# ---- Shared helpers.


def torch_tail(params: list[Tensor], *, zeroes: bool = True) -> Callable[[], None]:
    """Returns a function that runs unscaling, clipping, AdamW and zeroing by what torch's names mean now."""
    clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    optimizer = torch.optim.AdamW(params, fused=True)
    scaler = _ready(torch.amp.GradScaler(params[0].device.type, SCALE), params)

    def tail() -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not zeroes)

    return tail


def our_tail(optimizer: optim.AdamW) -> Callable[[], None]:
    """Returns a function that runs our scaler's step, which includes clipping and zeroing."""
    params = optimizer.param_groups[0]["params"]
    scaler = _ready(GradScaler(params[0].device.type, SCALE), params)

    def tail() -> None:
        scaler.step(optimizer)
        scaler.update()

    return tail


def _ready(scaler: torch.amp.GradScaler, params: list[Tensor]) -> torch.amp.GradScaler:
    scaler.scale(params[0].new_zeros(()))  # creates the scaler's tensors
    return scaler


def grad_of(param: Tensor) -> Tensor:
    """Returns the gradient of a parameter that has one."""
    assert param.grad is not None
    return param.grad


def models(
    shapes: list[Shape], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns equal parameters and gradients twice: in float32, and in `dtype`, which represents them exactly."""
    torch.manual_seed(0)
    ours = [torch.randn(shape, device=device).mul_(0.02).to(dtype).requires_grad_() for shape in shapes]
    theirs = [p.detach().float().clone().requires_grad_() for p in ours]
    for a, b in zip(theirs, ours, strict=True):
        b.grad = torch.randn_like(b)
        a.grad = b.grad.float().clone()
    return theirs, ours


def check_same(theirs: list[Tensor], ours: list[Tensor]) -> None:
    """Raises AssertionError unless the parameters agree up to rounding."""
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
