"""Measures an activation budget on compiled blocks against torch's own memory budget at equal peaks."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from drivetrain import _C
from drivetrain.bench.measure import Row, interleaved, ratio_row
from drivetrain.budget import activation_budget
from drivetrain.budget.trace import Recording

from .activation_models import GPT

RATIOS = (0.5, 0.3)  # of torch's memory budget
DRY_RATIOS = (0.5,)


def run(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Measures a GPT of 350 M parameters in bfloat16 with compiled blocks. Peaks are bytes kept for backward."""
    for ratio in DRY_RATIOS if is_dry else RATIOS:
        backend = "aot_eager" if is_dry else "inductor"
        theirs, their_step = _compiled(device, is_dry, _at_ratio(backend, ratio))
        their_step()
        their_peak = _peak_bytes(theirs, their_step)
        ours, our_step = _compiled(device, is_dry, backend)
        our_step()
        try:
            plan = activation_budget(ours, our_step, their_peak)
        except ValueError as error:
            yield Row(f"compiled blocks at ratio {ratio:g}: {error}", "MiB", their_peak / 2**20)
            continue
        torch_s, ours_s = interleaved([their_step, our_step], min(rounds, 20), device=device)
        yield ratio_row(f"compiled blocks at torch's ratio {ratio:g}, and a budget of its peak", torch_s, ours_s)
        peak = plan.measured_bytes or 0
        yield Row("  kept for backward", "MiB", their_peak / 2**20, peak / 2**20, peak / their_peak)
        plan.remove()
        torch._dynamo.reset()


def _at_ratio(backend: str, ratio: float) -> Callable[..., Any]:
    """Returns a backend that compiles at torch's memory budget. Dynamo distinguishes it from the plain backend."""

    def compile_at_ratio(graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend
        from torch._functorch import config

        with config.patch(activation_memory_budget=ratio):
            return lookup_backend(backend)(graph, inputs)

    return compile_at_ratio


def _compiled(device: torch.device, is_dry: bool, backend: Any) -> tuple[nn.Module, Callable[[], None]]:
    small = {"depth": 3, "dim": 32, "heads": 2, "length": 16}
    sizes = small if is_dry else {"depth": 24, "dim": 1024, "heads": 16, "length": 1024}
    torch.manual_seed(0)
    model = GPT(**sizes, dropout=0.0).to(device, torch.bfloat16)
    for block in model.blocks:
        block.compile(backend=backend)
    tokens, targets = torch.randint(64, (2, 2 if is_dry else 16, sizes["length"]), device=device)
    return model, functools.partial(_step, model, tokens, targets)


def _step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(tokens, targets).backward()


def _peak_bytes(model: nn.Module, step: Callable[[], None]) -> int:
    """Returns the peak bytes kept for backward, counted by a recorder without a plan."""
    recorder = _C.ActivationRecorder()
    with Recording(model, recorder):
        step()
    return recorder.peak_bytes
