"""Trains GPT-2 124M on one GPU, eager and compiled: a stock script, the same with `install()`, and drivetrain's
classes."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import drivetrain
from drivetrain import optim
from drivetrain.bench.measure import Row, interleaved

from .activation_models import GPT

MAX_NORM = 1.0
VOCABULARY = 50304
# FLOP/s of dense bfloat16 matrix products, by a part of the device's name.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}


def run(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields tokens per second, model FLOPs utilization (MFU) and peak memory. Ratios are relative to the stock
    script."""
    sizes = {"depth": 2, "dim": 32, "heads": 2, "length": 16} if is_dry else {"dim": 768, "heads": 12, "length": 1024}
    vocabulary = 64 if is_dry else VOCABULARY
    batch = 2 if is_dry else 16
    for way in ("eager", "compiled"):
        models, steps, peaks = [], [], []
        for make in (_stock, _installed, _own):
            torch.manual_seed(0)
            model = GPT(**sizes, dropout=0.0, vocabulary=vocabulary).to(device)
            model.head.weight = model.tokens.weight
            if way == "compiled":
                model.compile(backend="aot_eager" if is_dry else "inductor")
            tokens, targets = torch.randint(vocabulary, (2, batch, sizes["length"]), device=device)
            models.append(model)
            steps.append(make(model, tokens, targets))
            peaks.append(_peak_mib(steps[-1], device))
        seconds = interleaved(steps, min(rounds, 20), warm_up=2, device=device)
        medians = [statistics.median(each) for each in seconds]
        count = batch * sizes["length"]
        utilization = [_utilization(models[0], sizes, count, median, device) for median in medians]
        for index, name in ((1, "installed"), (2, "own classes")):
            what = f"{way}, {count:,} tokens a step: {name}"
            yield Row(what, "tokens/s", count / medians[0], count / medians[index], medians[0] / medians[index])
            yield Row("  step", "ms", 1e3 * medians[0], 1e3 * medians[index], medians[index] / medians[0])
            if utilization[0] is not None:
                yield Row("  MFU", "%", 100 * utilization[0], 100 * (utilization[index] or 0.0))
            if device.type == "cuda":
                yield Row("  peak memory", "MiB", peaks[0], peaks[index], peaks[index] / peaks[0])


def _stock(model: nn.Module, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    return _script(model, torch.optim.AdamW(model.parameters(), fused=True), tokens, targets, clips=True)


def _installed(model: nn.Module, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    drivetrain.install(optim=True)
    try:
        return _stock(model, tokens, targets)
    finally:
        drivetrain.uninstall()


def _own(model: nn.Module, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    optimizer = optim.AdamW(model.parameters(), max_grad_norm=MAX_NORM)
    return _script(model, optimizer, tokens, targets, clips=False)


def _script(model: nn.Module, optimizer: Any, tokens: Tensor, targets: Tensor, clips: bool) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _peak_mib(step: Callable[[], None], device: torch.device) -> float:
    """Returns the peak MiB of a step with optimizer states, beyond the memory of other models; 0 on the CPU."""
    step()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _utilization(
    model: nn.Module, sizes: dict[str, int], num_tokens: int, seconds: float, device: torch.device
) -> float | None:
    """Returns the model FLOPs utilization without recomputation, by 6 FLOPs per parameter and token plus attention;
    None for a device of unknown peak."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    if peak is None:
        return None
    num_params = sum(param.numel() for param in model.parameters())
    per_token = 6 * num_params + 12 * sizes.get("depth", 12) * sizes["dim"] * sizes["length"]
    return per_token * num_tokens / seconds / peak
