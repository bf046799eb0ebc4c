"""Trains all of 8 B parameters on one 80 GB card, and measures tokens per second and peak memory.

16-bit parameters with 24-bit master weights and 8-bit states take 5 bytes per parameter. Stepping in backward frees
each gradient early, and an activation budget fits the activations into the remaining memory.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from drivetrain import optim
from drivetrain.bench.measure import Row, interleaved
from drivetrain.budget import activation_budget

from .activation_models import GPT, VOCABULARY

SIZE = {"depth": 40, "dim": 4096, "heads": 32, "length": 1024}  # 8.1 B parameters
BATCH = 8
BUDGET_BYTES = 20 << 30  # of activations, for the whole batch
PROFILED_PART = 4  # a plan holds for any batch size, and the profile of a quarter fits
TINY = {"depth": 2, "dim": 32, "heads": 2, "length": 16}
TINY_BUDGET_BYTES = 1 << 20
STEPS = 5
CARD_BYTES = 80e9
FIRST_STEP_S = 1.0  # the most that the first step may take beyond another, to create the states
SIDE = 8192  # of the square matrices whose product sets the upper bound of speed


def run_gpu(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields rows of speed, memory and the first step. Raises AssertionError if the loss does not fall."""
    if device.type == "cuda":  # torch reads it at the first allocation
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    size = TINY if is_dry else SIZE
    torch.manual_seed(0)
    model = _model(size, device)
    num_params = sum(param.numel() for param in model.parameters())
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, size["length"]), device=device)

    def backward(rows: int) -> Tensor:
        loss: Tensor = model(tokens[:rows], targets[:rows])
        loss.backward()
        return loss.detach()

    part = BATCH // PROFILED_PART
    budget = TINY_BUDGET_BYTES if is_dry else BUDGET_BYTES
    plan = activation_budget(model, lambda: backward(part), budget // PROFILED_PART)
    model.zero_grad(set_to_none=True)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2 if is_dry else 1e-4, state_bits=8, master_bits=24)
    optimizer.step_in_backward(model)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(backward(BATCH))
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [_seconds(step, device) for _ in range(2 if is_dry else STEPS)]
    _check_losses([float(loss) for loss in losses])
    later = statistics.median(seconds[1:])
    work = BATCH * size["length"]
    bound = work / (6 * num_params * work / _product_flops(device, 64 if is_dry else SIDE, max(rounds // 4, 2)))
    what = f"{num_params / 1e9:.2f} B parameters, {work:,} tokens a step"
    speed = work / later
    row = Row(f"{what}: upper bound from one product of {SIDE} x {SIDE} | measured", "tokens/s", bound, speed)
    row.ratio = row.low = row.high = speed / bound
    yield row
    beyond = max(seconds[0] - later, 0.0)
    row = Row(f"{what}: a step | the first step's additional time", "s", later, beyond)
    row.target, row.met = f"<= {FIRST_STEP_S:g} s", beyond <= FIRST_STEP_S
    yield row
    state = sum(each.nbytes for states in optimizer.state.values() for each in states.values())
    rest = state + sum(param.nbytes for param in model.parameters())
    yield Row(f"{what}: bytes per parameter at rest, fp32 AdamW | ours", "", 16.0, rest / num_params)
    yield Row(f"{what}: activations, budget | measured", "MiB", budget / 2**20, plan.peak_bytes / 2**20)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        row = Row(f"{what}: a card of 80 GB | the allocator's peak", "MiB", CARD_BYTES / 2**20, peak / 2**20)
        row.target, row.met = "<= 80 GB", peak <= CARD_BYTES
        yield row


def _model(size: dict[str, int], device: torch.device) -> nn.Module:
    """Makes the model on its device in bfloat16, because it does not fit in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return GPT(dropout=0.0, **size)
    finally:
        torch.set_default_dtype(before)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _product_flops(device: torch.device, side: int, rounds: int) -> float:
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    (seconds,) = interleaved([lambda: a @ b], rounds, device=device)
    return 2 * side**3 / statistics.median(seconds)


def _check_losses(losses: list[float]) -> None:
    if not all(math.isfinite(loss) for loss in losses) or losses[-1] >= losses[0]:
        raise AssertionError(f"losses on one batch do not fall: {losses}")
