"""What an optimizer keeps, moves and loses: the answer of `optimizer.report()`."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import sharded

MIB = 2**20


@dataclass
class Counts:
    """Steps of one optimizer since it was made; on a GPU, which is not asked, all count as made and none as clipped."""

    steps: int = 0
    skipped: int = 0  # left out because a gradient was not finite
    clipped: int = 0  # their norm was above max_grad_norm
    seconds: float = 0.0  # of the last step that was made; 0: none yet

    def add(self, grad_norm: float | None, max_grad_norm: float | None, skipped: bool, seconds: float) -> None:
        """Counts one step."""
        if skipped:
            self.skipped += 1
            return
        self.steps += 1
        self.seconds = seconds
        if grad_norm is not None and max_grad_norm is not None:
            self.clipped += grad_norm > max_grad_norm


@dataclass
class Report:
    """Figures of one optimizer; `print(report)` shows them.

    Attributes:
        num_elements: of all parameters that have a gradient (others take no part in a step).
        bytes: what they, their gradients and each entry of the state take, by name.
        bytes_moved: by a step: what it must read and write at the least, and the gradients again where it clips.
        step_s: seconds of the last step; None: none was made, or it was on a GPU, where it goes on after step().
        bandwidth: bytes per second of an in-place triad on this machine, measured for the report; None on a GPU.
        counts: steps made, left out and clipped since the optimizer was made.
        lost_updates: by parameter, the share of elements that a step with the present gradients would change in
            float32 but leaves as they are, because their 16 bits cannot hold the change; only what rounds to nearest.
    """

    num_elements: int
    bytes: dict[str, int]
    bytes_moved: int
    step_s: float | None
    bandwidth: float | None
    counts: Counts
    lost_updates: dict[str, float] = field(default_factory=dict)

    @property
    def bytes_per_parameter(self) -> float:
        """Of everything together, per element."""
        return sum(self.bytes.values()) / max(1, self.num_elements)

    @property
    def share_of_bandwidth(self) -> float | None:
        """How near the last step came to the speed of memory, from 0 to 1; above 1 what it touched was cached."""
        if not self.step_s or not self.bandwidth:
            return None
        return self.bytes_moved / self.step_s / self.bandwidth

    def __str__(self) -> str:
        lines = [f"{self.num_elements:,} elements, {self.bytes_per_parameter:.2f} bytes each:"]
        lines += [f"  {name:24} {size / MIB:10.1f} MiB" for name, size in self.bytes.items()]
        moved = f"a step moves {self.bytes_moved / MIB:.1f} MiB"
        if self.step_s:
            moved += f"; the last took {self.step_s * 1e3:.2f} ms"
        if self.share_of_bandwidth is not None:
            moved += f", {self.share_of_bandwidth:.0%} of this machine's {(self.bandwidth or 0) / 1e9:.1f} GB/s"
        counts = self.counts
        lines += [moved, f"{counts.steps} steps, {counts.clipped} clipped, {counts.skipped} left out (not finite)"]
        worst = sorted(self.lost_updates.items(), key=lambda item: -item[1])
        lines += [f"  {name}: {share:.1%} of the updates are lost to rounding" for name, share in worst[:10]]
        if worst and worst[0][1] > 0.1:
            lines.append("  (master_bits=24, rounding='kahan' or 'stochastic' keep them)")
        return "\n".join(lines)


def report_of(optimizer: Any, counts: Counts) -> Report:
    """What :meth:`FusedOptimizer.report` returns."""
    sizes: dict[str, int] = {}
    num_elements = moved = 0
    on_cpu = optimizer.is_on_cpu
    lost = {}
    for label, param, grad, group, state in _with_gradient(optimizer):
        num_elements += param.numel()
        entries = {"parameters": param, "gradients": grad, **state}
        entries.pop("step", None)
        for name, tensor in entries.items():
            size = tensor.numel() * tensor.element_size()
            sizes[name] = sizes.get(name, 0) + size
            moved += size if name == "gradients" else 2 * size
        # Beyond that one read: once more for the norm, and written where the step leaves zeros.
        passes = (optimizer.max_grad_norm is not None) + bool(optimizer.zero_grads_in_step)
        moved += passes * grad.numel() * grad.element_size()
        if param.dtype in (torch.bfloat16, torch.float16) and "param_remainder" not in state:
            share = _lost_share(optimizer, param, grad, group, state)
            if share is not None:
                lost[label] = share
    bandwidth = _triad_bandwidth() if on_cpu and num_elements else None
    return Report(num_elements, sizes, moved, counts.seconds or None if on_cpu else None, bandwidth, counts, lost)


def _with_gradient(optimizer: Any) -> Iterator[tuple[str, Tensor, Tensor, dict[str, Any], dict[str, Any]]]:
    """Label, parameter, gradient, group and state; of DTensors this rank's part."""
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if param.grad is not None:
                names = group.get("param_names")
                label = names[i] if names else f"param_groups[{g}] {i}"
                state = sharded.local_values(param, optimizer.state.get(param, {}))
                yield label, sharded.local_part(param), sharded.local_part(param.grad), group, state


def _lost_share(
    optimizer: Any, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]
) -> float | None:
    """Makes the step on copies, once as it is and once in float32; None: this parameter's rounding loses nothing."""
    if group.get("rounding", "nearest") != "nearest" or group.get("master_bits") is not None:
        return None
    with torch.no_grad():
        results = []
        for dtype in (param.dtype, torch.float32):
            copy = param.detach().to(dtype, copy=True).requires_grad_()
            copy.grad = grad.to(dtype)
            _twin(optimizer, group, state, copy).step()
            results.append(copy.detach())
        stored, exact = results
        changes = exact != param.float()
        lost = changes & (stored == param)
        return lost.sum().item() / max(1, changes.sum().item())


def _twin(optimizer: Any, group: dict[str, Any], state: dict[str, Any], copy: Tensor) -> Any:
    """An optimizer of the same class for `copy` alone, with a copy of that state; clips nothing."""
    state = {name: value.clone() for name, value in state.items()}
    twin: Any = object.__new__(type(optimizer))
    twin.__setstate__(
        optimizer.__getstate__()
        | {"state": defaultdict(dict, {copy: state} if state else {}), "param_groups": [{**group, "params": [copy]}]}
        | {"_max_grad_norm": None, "zero_grads_in_step": False}
    )
    return twin


def _triad_bandwidth(num_floats: int = 1 << 25, rounds: int = 5) -> float:
    """Bytes per second of a += s * b in place: two reads and a write of 4 bytes."""
    a, b = torch.ones(num_floats), torch.ones(num_floats)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        a.add_(b, alpha=0.5)
        times.append(time.perf_counter() - begin)
    return 12 * num_floats / statistics.median(times)
