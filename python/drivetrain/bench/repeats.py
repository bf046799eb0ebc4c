"""Whether a form of the training step gives the same bits every time: what differs in torch's deterministic mode, where
torch's own kernels repeat theirs, is a race of ours; what differs only outside of it is the order of torch's sums."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import optim
from .activation_models import GPT, VOCABULARY
from .measure import Row

MAX_NORM = 1.0
LEARNING_RATE = 6e-4
REPETITIONS = 10
STEPS = 30

Finish = Callable[[], None]  # of a step, after its backward


@dataclass
class Runs:
    """What the repetitions of one form ended with."""

    digests: list[str] = field(default_factory=list)  # of all parameters' bytes
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


FORMS: dict[str, Callable[[nn.Module], Finish]] = {
    "torch's AdamW and clipping": _torchs_calls,
    "clipped in the step": _clipped_in_step,
    "clipped in the step, gradients zeroed by torch": _zeroed_by_torch,
    "clipped and zeroed in the step": _zeroed_in_step,
}
# They differ only in how gradients become zero, and so not in any bit.
SAME_BITS = tuple(FORMS)[1:]


def run_gpu(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Rows per form: the different results of all repetitions as it is and in deterministic mode, and the losses; then
    whether our forms have the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic mode asks for
    num_runs, num_steps = (2, 2) if is_dry else (REPETITIONS, STEPS)
    found: dict[str, Runs] = {}
    for name, form in FORMS.items():
        as_it_is, found[name] = Runs(), Runs()
        for _ in range(num_runs):
            train(form, device, num_steps, is_dry, as_it_is)
        with _deterministic():
            for _ in range(num_runs):
                train(form, device, num_steps, is_dry, found[name])
        yield Row(
            f"{name}: different results of {num_runs} runs, as it is | in deterministic mode: "
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
    what = "results of our forms in deterministic mode, expected | different ones"
    yield Row(what, "", 1, len(same), target="| 1", met=len(same) == 1)


def verdict(as_it_is: Runs, deterministic: Runs) -> str:
    """What the numbers of different results say."""
    if deterministic.num_results > 1:
        return "a race"
    return "noise of torch's kernels" if as_it_is.num_results > 1 else "the same bits every time"


def train(form: Callable[[nn.Module], Finish], device: torch.device, steps: int, is_dry: bool, runs: Runs) -> None:
    """One run from a fixed seed, in autocast to bfloat16."""
    size = {"depth": 2, "dim": 32, "heads": 2, "length": 16} if is_dry else {"dim": 768, "heads": 12, "length": 256}
    torch.manual_seed(0)
    model = GPT(dropout=0.0, **size).to(device)
    finish = form(model)
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
    """torch's deterministic algorithms; an operation without one raises."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
