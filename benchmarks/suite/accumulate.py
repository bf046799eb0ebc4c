"""Measures the time, memory and error of accumulating a bfloat16 model's gradients in more bits."""

import copy
import ctypes
import functools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn

from drivetrain.bench.measure import Row, interleaved, median_interval, ratio_of_medians
from drivetrain.grad.fuse_wgrad import fuse_wgrad
from drivetrain.grad.main_grads import float32_grad, main_grads
from drivetrain.optim import AdamW

MICRO_STEPS = 8
BUCKET_MB = 8.0  # of step_in_backward(); holds a few of the largest gradients
TOKENS = 32  # per micro-step; few, so that accumulation dominates backward
Accumulator = Callable[[nn.Module], Callable[[Tensor], None]]
_WIDTHS = ((768, 2304), (768, 768), (768, 3072), (3072, 768))


class Stack(nn.Module):
    """The linear layers of GPT-2 124M in parallel: 85 M parameters."""

    def __init__(self, num_layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(i, o) for _ in range(num_layers) for i, o in _WIDTHS])

    def forward(self, x: Tensor) -> Tensor:
        """Takes x of shape [tokens, 768] and returns a scalar."""
        wide = x.repeat(1, 4)
        outputs = [layer(x if layer.in_features == 768 else wide) for layer in self.layers]
        return torch.stack([output.float().square().mean() for output in outputs]).sum()


def run(threads: int, rounds: int) -> list[Row]:
    """Returns rows of time, memory and error. torch's column is its own accumulation in as many bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = _measure_time(MICRO_STEPS * max(rounds // 4, 5))
        for what, theirs, ours in track(MEMORY, description="memory", transient=True):
            rows.append(_measure_memory(what, theirs, ours))
        for what, theirs, ours, target in track(TRAINING, description="memory", transient=True):
            rows.append(_measure_training(what, theirs, ours, target))
        return rows + _measure_error()
    finally:
        torch.set_num_threads(before)


def run_gpu(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields the rows of time on a GPU, with enough tokens to fill it."""
    size = {"num_layers": 1, "tokens": 2} if is_dry else {"tokens": 4096}
    yield from _measure_time(MICRO_STEPS * max(rounds // 4, 1), device, **size)


# ---- Accumulators. Each takes a model in bfloat16 and returns a function that runs a micro-step from a loss.


def _plain(model: nn.Module) -> Callable[[Tensor], None]:
    """Runs backward into new gradients, then frees them."""

    def micro_step(loss: Tensor) -> None:
        loss.backward()
        model.zero_grad()

    return micro_step


def _dropped(model: nn.Module) -> Callable[[Tensor], None]:
    """Runs a backward that frees every gradient as soon as it exists."""

    def drop(param: Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    return _in_bfloat16(model)


def _in_bfloat16(model: nn.Module) -> Callable[[Tensor], None]:
    return lambda loss: loss.backward()


def _in_float32(model: nn.Module) -> Callable[[Tensor], None]:
    """Accumulates in torch's `.grad` of float32, to which autograd adds a converted copy."""
    for param in model.parameters():
        param.grad_dtype = torch.float32
    return _in_bfloat16(model)


def _in_copies(model: nn.Module) -> Callable[[Tensor], None]:
    """Accumulates the usual way: a hook adds each gradient to a float32 tensor and frees `.grad`."""
    copies = {param: torch.zeros_like(param, dtype=torch.float32) for param in model.parameters()}

    def add(param: Tensor) -> None:
        copies[param].add_(param.grad)  # type: ignore[arg-type, index]
        param.grad = None

    for param in copies:
        param.register_post_accumulate_grad_hook(add)
    return _in_bfloat16(model)


def _in_main_grads(model: nn.Module, bits: int) -> Callable[[Tensor], None]:
    main_grads(model, bits)
    return _in_bfloat16(model)


def _fused(model: nn.Module, bits: int) -> Callable[[Tensor], None]:
    fuse_wgrad(model)
    return _in_main_grads(model, bits)


_IN_32_BITS = functools.partial(_in_main_grads, bits=32)
_IN_24_BITS = functools.partial(_in_main_grads, bits=24)
_FUSED_32_BITS = functools.partial(_fused, bits=32)
_FUSED_24_BITS = functools.partial(_fused, bits=24)


# ---- Time.


def _measure_time(
    rounds: int, device: torch.device | None = None, num_layers: int = 12, tokens: int = TOKENS
) -> list[Row]:
    """Measures a micro-step's backward in full, and beyond two backwards that accumulate nothing. Plain backward holds
    all gradients at a time in new memory; a backward that frees each gradient is the fastest possible."""
    torch.manual_seed(0)
    base, x = Stack(num_layers).bfloat16().to(device), torch.randn(tokens, 768).bfloat16().to(device)
    ours = {
        "float32": _IN_32_BITS,
        "bfloat16 and a byte": _IN_24_BITS,
        "float32, fused": _FUSED_32_BITS,
        "bfloat16 and a byte, fused": _FUSED_24_BITS,
    }
    accumulators: tuple[Accumulator, ...] = (_plain, _dropped, _in_float32, _in_copies, *ours.values())
    models = [copy.deepcopy(base) for _ in accumulators]
    steps = [make(model) for make, model in zip(accumulators, models, strict=True)]
    losses = [torch.zeros(()) for _ in models]
    numel = sum(param.numel() for param in base.parameters())
    done = [0 for _ in models]

    def prepare(which: int) -> None:
        if done[which] % MICRO_STEPS == 0:
            models[which].zero_grad()
        done[which] += 1
        losses[which] = models[which](x)

    calls = [functools.partial(lambda which: steps[which](losses[which]), which) for which in range(len(models))]
    plain, dropped, *others = interleaved(calls, rounds, prepare=prepare, device=device)
    theirs = min(others[:2], key=statistics.median)
    rows = []
    for what, times in zip(ours, others[2:], strict=True):
        ratio, low, high = median_interval([b / a for a, b in zip(theirs, times, strict=True)])
        whole = statistics.median(theirs) * 1e3, statistics.median(times) * 1e3
        name = f"backward of {numel / 1e6:.0f} M bf16 into {what} (torch: float32)"
        rows.append(Row(name, "ms", *whole, ratio, low, high))
        rows.append(Row("  beyond plain backward", "ms", _beyond(theirs, plain), _beyond(times, plain)))
        beyond = [[a - b for a, b in zip(each, dropped, strict=True)] for each in (theirs, times)]
        ratio, low, high = ratio_of_medians(beyond[0], beyond[1])
        name = "  beyond a backward that frees each gradient"
        least = _beyond(theirs, dropped), _beyond(times, dropped)
        rows.append(Row(name, "ms", *least, ratio, low, high, "<= 0.333", ratio <= 1 / 3))
    return rows


def _beyond(times: list[float], base: list[float]) -> float:
    """Returns the median of the paired differences in milliseconds."""
    return 1e3 * statistics.median(time - of_base for time, of_base in zip(times, base, strict=True))


# ---- Trainers, with the same interface.


def _stepped_by_torch(model: nn.Module, micro_steps: int) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    done = 0

    def micro_step(loss: Tensor) -> None:
        nonlocal done
        loss.backward()
        done += 1
        if done % micro_steps == 0:
            optimizer.step()
            optimizer.zero_grad()

    return micro_step


def _stepped_in_backward(model: nn.Module, micro_steps: int, bits: int = 16) -> Callable[[Tensor], None]:
    if bits > 16:
        main_grads(model, bits)
        fuse_wgrad(model)
    steps = AdamW(model.parameters(), master_bits=24, state_bits=8).step_in_backward(model, bucket_cap_mb=BUCKET_MB)
    done = 0

    def micro_step(loss: Tensor) -> None:
        nonlocal done
        done += 1
        with steps.no_step() if done % micro_steps else nullcontext():
            loss.backward()

    return micro_step


# ---- Memory. Each accumulator runs in its own process.

MEMORY = (
    ("accumulated in float32: peak bytes per parameter", _in_float32, _IN_32_BITS),
    ("accumulated in bfloat16 and a byte (torch: bfloat16): peak", _in_bfloat16, _IN_24_BITS),
    ("accumulated in float32, fused: peak", _in_float32, _FUSED_32_BITS),
    ("accumulated in bfloat16 and a byte, fused (torch: bfloat16): peak", _in_bfloat16, _FUSED_24_BITS),
)
# Parameters and states take 5 bytes per parameter: bfloat16, 8 bits of remainder and two 8-bit states. torch takes 6.
TRAINING = tuple(
    (
        f"AdamW in backward, {what}: peak with the parameters",
        functools.partial(_stepped_by_torch, micro_steps=micro_steps),
        functools.partial(_stepped_in_backward, micro_steps=micro_steps, bits=bits),
        5.2 + accumulator,
    )
    for what, micro_steps, bits, accumulator in (
        ("1 micro-step", 1, 16, 0),
        ("8 in bfloat16", MICRO_STEPS, 16, 2),
        ("8 in bfloat16 and a byte, fused", MICRO_STEPS, 24, 3),
    )
)


def _measure_memory(what: str, *accumulators: Accumulator) -> Row:
    """Returns the peak of a window of backwards beyond parameters and inputs, in bytes per parameter."""
    torch_bytes, our_bytes = _peaks(accumulators)
    return Row(what, "B", torch_bytes, our_bytes)


def _measure_training(what: str, theirs: Accumulator, ours: Accumulator, target: float) -> Row:
    """Returns the peak of two windows of backwards and steps beyond the inputs, in bytes per parameter."""
    torch_bytes, our_bytes = [peak + 2 for peak in _peaks((theirs, ours))]
    target += BUCKET_MB * 2**20 / sum(param.numel() for param in Stack().parameters())
    return Row(what, "B", torch_bytes, our_bytes, target=f"<= {target:.2f} B", met=our_bytes <= target)


def _peaks(accumulators: Sequence[Accumulator]) -> list[float]:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(_peak_bytes, (accumulator,)) for accumulator in accumulators]


def _peak_bytes(accumulator: Accumulator) -> float:
    model = Stack().bfloat16()
    numel = sum(param.numel() for param in model.parameters())
    x = torch.randn(4, 768).bfloat16()  # few, so that activations are negligible
    model(x).backward()  # allocates the libraries' own memory
    model.zero_grad()
    small = nn.Linear(768, 1).bfloat16()
    accumulator(small)(small(x).float().sum())  # imports Python modules
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    micro_step = accumulator(model)
    for _ in range(2 * MICRO_STEPS):
        micro_step(model(x))
    return (_status("VmHWM") - before) / numel


def _status(key: str) -> int:
    """Returns a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))


# ---- Error.


def _measure_error() -> list[Row]:
    """Measures the error of the sum of 64 micro-gradients, relative to float64, in parts per million."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 768)).bfloat16()
    models = [copy.deepcopy(base) for _ in range(4)]
    main_grads(models[1], 32)
    main_grads(models[2], 24)
    alone = models[3]
    exact = [torch.zeros(param.shape, dtype=torch.float64) for param in base.parameters()]
    for _ in range(64):
        x = torch.randn(TOKENS, 768).bfloat16()
        for model in models:
            model(x).float().square().mean().backward()
        for total, param in zip(exact, alone.parameters(), strict=True):
            assert param.grad is not None
            total += param.grad.double()
        alone.zero_grad()

    def error(values: list[Tensor]) -> float:
        pairs = list(zip(values, exact, strict=True))
        return 1e6 * float(
            (sum((v.double() - e).square().sum() for v, e in pairs) / sum(e.square().sum() for _, e in pairs)) ** 0.5
        )

    plain = error([param.grad for param in models[0].parameters() if param.grad is not None])
    in_float32 = error([float32_grad(param) for param in models[1].parameters()])
    joined = error([float32_grad(param) for param in models[2].parameters()])
    halves = error([param.grad for param in models[2].parameters() if param.grad is not None])
    what = "error of 64 micro-steps' sum"
    return [
        Row(f"{what}: float32 (torch: bfloat16)", "ppm", plain, in_float32),
        Row(f"{what}: bfloat16 and a byte", "ppm", plain, joined),
        Row(f"{what}: its bfloat16 half, which DDP communicates", "ppm", plain, halves),
    ]
