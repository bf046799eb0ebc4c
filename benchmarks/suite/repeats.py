"""Checks that variants of the training step give the same bits every time.

Results that differ in torch's deterministic mode show a race of ours. Results that differ only outside of it come from
torch's kernels, which sum in any order.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from drivetrain import optim
from drivetrain.bench.measure import Row

from .activation_models import GPT, VOCABULARY

MAX_NORM = 1.0
LEARNING_RATE = 6e-4
REPETITIONS = 10
STEPS = 30

Finish = Callable[[], None]  # completes a step after its backward


@dataclass
class Runs:
    """The final results of the repetitions of one variant."""

    digests: list[str] = field(default_factory=list)  # of the bytes of all parameters
    losses: list[float] = field(default_factory=list)  # of the last step

    @property
    def num_results(self) -> int:
        return len(set(self.digests))


def _torchs_calls(model: nn.Module) -> Finish:
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE)

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return finish


def _clipped_in_step(model: nn.Module) -> Finish:
    optimizer = optim.AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=MAX_NORM)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return finish


def _zeroed_by_torch(model: nn.Module) -> Finish:
    optimizer = optim.AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=MAX_NORM)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return finish


def _zeroed_in_step(model: nn.Module) -> Finish:
    optimizer = optim.AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=MAX_NORM, zero_grads_in_step=True)

    def finish() -> None:
        optimizer.step()

    return finish


VARIANTS: dict[str, Callable[[nn.Module], Finish]] = {
    "torch's AdamW and clipping": _torchs_calls,
    "clipped in the step": _clipped_in_step,
    "clipped in the step, gradients zeroed by torch": _zeroed_by_torch,
    "clipped and zeroed in the step": _zeroed_in_step,
}
# These differ only in how gradients become zero, so their results must have the same bits.
SAME_BITS = tuple(VARIANTS)[1:]


def run_gpu(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields per variant the number of different results, normally and in deterministic mode, and the losses. The last
    row compares our variants with each other."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode requires it
    num_runs, num_steps = (2, 2) if is_dry else (REPETITIONS, STEPS)
    found: dict[str, Runs] = {}
    for name, variant in VARIANTS.items():
        as_it_is, found[name] = Runs(), Runs()
        for _ in range(num_runs):
            train(variant, device, num_steps, is_dry, as_it_is)
        with _deterministic():
            for _ in range(num_runs):
                train(variant, device, num_steps, is_dry, found[name])
        yield Row(
            f"{name}: different results of {num_runs} runs, normally | in deterministic mode: "
            f"{verdict(as_it_is, found[name])}",
            "",
            as_it_is.num_results,
            found[name].num_results,
            target="| 1",
            met=found[name].num_results == 1,
        )
        losses = as_it_is.losses
        yield Row(f"{name}: loss after {num_steps} steps, lowest | highest", "nats", min(losses), max(losses))
    same = {digest for name in SAME_BITS for digest in found[name].digests}
    what = "different results of our variants in deterministic mode, expected | found"
    yield Row(what, "", 1, len(same), target="| 1", met=len(same) == 1)


def verdict(as_it_is: Runs, deterministic: Runs) -> str:
    """Names the cause of different results."""
    if deterministic.num_results > 1:
        return "a race"
    return "noise of torch's kernels" if as_it_is.num_results > 1 else "the same bits every time"


def train(variant: Callable[[nn.Module], Finish], device: torch.device, steps: int, is_dry: bool, runs: Runs) -> None:
    """Trains from a fixed seed under autocast to bfloat16, and adds the results to `runs`."""
    size = {"depth": 2, "dim": 32, "heads": 2, "length": 16} if is_dry else {"dim": 768, "heads": 12, "length": 256}
    torch.manual_seed(0)
    model = GPT(dropout=0.0, **size).to(device)
    finish = variant(model)
    batches = torch.randint(VOCABULARY, (steps, 2, 4, size["length"])).to(device)
    loss = torch.zeros(())
    for tokens, targets in batches:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        finish()
    runs.losses.append(float(loss.detach()))
    runs.digests.append(_digest(list(model.parameters())))


def _digest(params: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for param in params:
        digest.update(bytes(param.detach().cpu().contiguous().view(torch.uint8).numpy().data))
    return digest.hexdigest()


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Enables torch's deterministic algorithms; an operation without one raises an error."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
