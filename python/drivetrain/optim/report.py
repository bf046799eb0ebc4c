"""Reports an optimizer's memory, traffic and rounding losses: the result of `optimizer.report()`."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from copy import copy as copy_of
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..notebook import html_table
from .engine import Engine
from .kept import NAME, Counts
from .rule import Group
from .sharded import dtensors

MIB = 2**20


@dataclass(repr=False)
class Report:
    """Figures of one optimizer; `print(report)` shows them.

    Attributes:
        num_elements: Elements of all parameters that have a gradient or a state. Where none has, as before the first
            backward pass, all parameters that require a gradient.
        bytes: Bytes of them, their gradients and each entry of the state, by name. Gradients that are None, and states
            that the next step makes or converts, count with the size that they will have.
        kept_32_bits: By parameter, the elements whose states keep 32 bits although their group asks for 8.
        expected: Names of the entries of `bytes` that are not there now, or not in that format, at least in part.
        bytes_moved: Bytes that a step must read and write, including the second read of gradients for clipping.
        step_s: Seconds of the last step; None before the first, and on a GPU, where it continues after step().
        bandwidth: Bytes per second of an in-place triad on this machine, measured for the report; None on a GPU.
        counts: Steps made, skipped and clipped since the optimizer was constructed.
        lost_updates: By parameter, the share of elements that a step changes in float32 but not in their 16 bits. Only
            parameters that round to nearest appear.
    """

    num_elements: int
    bytes: dict[str, int]
    bytes_moved: int
    step_s: float | None
    bandwidth: float | None
    counts: Counts
    lost_updates: dict[str, float] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    kept_32_bits: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of parameters, gradients and states together, per element."""
        return sum(self.bytes.values()) / max(1, self.num_elements)

    @property
    def share_of_bandwidth(self) -> float | None:
        """The last step's share of the memory bandwidth, from 0 to 1; above 1 if its memory was cached."""
        if not self.step_s or not self.bandwidth:
            return None
        return self.bytes_moved / self.step_s / self.bandwidth

    def __repr__(self) -> str:
        first, *others = self._lines()
        marks = dict.fromkeys(self.expected, " (expected)")
        entries = [f"  {name:24} {size / MIB:10.1f} MiB{marks.get(name, '')}" for name, size in self.bytes.items()]
        return "\n".join([f"{first}:", *entries, *others])

    def _repr_html_(self) -> str:
        marks = dict.fromkeys(self.expected, " (expected)")
        rows = [(name + marks.get(name, ""), f"{size / MIB:.1f}") for name, size in self.bytes.items()]
        return html_table(self._lines(), ("entry", "MiB"), rows)

    def _lines(self) -> list[str]:
        lines = [f"{self.num_elements:,} elements, {self.bytes_per_parameter:.2f} bytes each"]
        moved = f"a step moves {self.bytes_moved / MIB:.1f} MiB"
        if self.step_s:
            moved += f"; the last took {self.step_s * 1e3:.2f} ms"
        if self.share_of_bandwidth is not None:
            moved += f", {self.share_of_bandwidth:.0%} of this machine's {(self.bandwidth or 0) / 1e9:.1f} GB/s"
        counts = self.counts
        lines += [moved, f"{counts.steps} steps, {counts.clipped} clipped, {counts.skipped} left out (not finite)"]
        lines += lines_about_kept(self.kept_32_bits)
        worst = sorted(self.lost_updates.items(), key=lambda item: -item[1])
        lines += [f"  {name}: {share:.1%} of the updates are lost to rounding" for name, share in worst[:10]]
        if worst and worst[0][1] > 0.1:
            lines.append("  (master_bits=24, rounding='kahan' or 'stochastic' keep them)")
        return lines


def lines_about_kept(kept_32_bits: dict[str, int]) -> list[str]:
    """Returns a line about the parameters whose states keep 32 bits under state_bits=8 or 4; none if there are none."""
    if not kept_32_bits:
        return []
    largest = sorted(kept_32_bits, key=lambda name: -kept_32_bits[name])
    names = ", ".join(map(repr, largest[:5])) + (", ..." if len(largest) > 5 else "")
    return [f"{len(largest)} small parameters ({sum(kept_32_bits.values()):,} elements) keep 32-bit states: {names}"]


def report_of(engine: Engine) -> Report:
    """Computes the report that `FusedOptimizer.report` returns."""
    kept, counts, on_cpu = engine.kept, engine.kept.counts, engine.is_on_cpu
    passes = (kept.max_grad_norm is not None) + kept.zero_grads_in_step  # over gradients, besides the update's
    report = Report(0, {}, 0, counts.seconds or None if on_cpu else None, None, counts)
    expected: set[str] = set()
    for label, param, grad, group in _stepped(engine.optimizer):
        state = dtensors.local_values(param, engine.optimizer.state.get(param, {}))
        param, grad = dtensors.local_part(param), None if grad is None else dtensors.local_part(grad)
        report.num_elements += param.numel()
        if _C.optim_keeps_32_bits(engine.precision_of(group), param):
            report.kept_32_bits[label] = param.numel()
        if grad is None:
            grad_bytes = param.numel() * (param.grad_dtype or param.dtype).itemsize
            expected.add("gradients")
        else:
            grad_bytes = grad.nbytes
        there = {name: entry.nbytes for name, entry in state.items() if isinstance(entry, Tensor)}
        made = states_of_step(engine, param, group)
        expected |= {name for name, size in made.items() if there.get(name) != size}
        entries = {"parameters": param.nbytes, "gradients": grad_bytes} | made
        for name, size in entries.items():
            report.bytes[name] = report.bytes.get(name, 0) + size
        report.bytes_moved += 2 * sum(entries.values()) + (passes - 1) * grad_bytes
        if grad is not None and param.dtype in (torch.bfloat16, torch.float16) and "param_remainder" not in state:
            share = _lost_share(engine, param, grad, group, state)
            if share is not None:
                report.lost_updates[label] = share
    report.expected = frozenset(expected)
    report.bandwidth = _triad_bandwidth() if on_cpu and report.num_elements else None
    return report


def _stepped(optimizer: Any) -> Iterator[tuple[str, Tensor, Tensor | None, Group]]:
    """Yields the parameters that a step is about, each with its name or position, its gradient and its group.

    Skips parameters that have neither a gradient nor a state, unless that holds for all.
    """
    params = [
        (f"param_groups[{g}] {i}" if group.get("param_names") is None else group["param_names"][i], p, p.grad, group)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    ]
    begun = [each for each in params if each[2] is not None or optimizer.state.get(each[1])]
    yield from begun or [each for each in params if each[1].requires_grad]


def states_of_step(engine: Engine, param: Tensor, group: Group) -> dict[str, int]:
    """Computes the bytes of each state after the next step has created or converted it."""
    asked = engine.precision_of(group)
    sizes = {}
    for name, kind in _C.optim_states(engine.rule.name_of(group)):
        shape = _C.optim_state_shape(param, kind)
        if shape is None:
            continue
        numel, dtype = math.prod(shape), _C.optim_state_dtype(asked, param, kind) or param.dtype
        if (coded := _C.optim_coded_bytes(dtype, numel)) is not None:
            sizes[f"{name}_codes"], sizes[f"{name}_scales"] = coded
        else:
            sizes[name] = numel * dtype.itemsize
    if (extra := _C.optim_param_extra(asked, param)) is not None:
        sizes[extra[0]] = param.numel() * extra[1].itemsize
    return sizes


def _lost_share(engine: Engine, param: Tensor, grad: Tensor, group: Group, state: dict[str, Any]) -> float | None:
    """Steps copies, once as they are and once in float32. Returns None if this parameter's rounding loses nothing."""
    formats = engine.formats_of(group)
    if formats.get("rounding", "nearest") != "nearest" or formats.get("master_bits") is not None:
        return None
    results = []
    for dtype in (param.dtype, torch.float32):
        copy = param.detach().to(dtype, copy=True).requires_grad_()
        copy.grad = grad.to(dtype)
        copies = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
        alone = {**group, "params": [copy]}
        kept, states = copy_of(engine.kept), defaultdict(dict, {copy: copies} if copies else {})
        kept.max_grad_norm, kept.zero_grads_in_step = None, False
        optimizer: Any = object.__new__(type(engine.optimizer))  # of the copy alone, without clipping
        saved = engine.optimizer.__getstate__() | {"state": states, "param_groups": [alone], NAME: kept}
        optimizer.__setstate__(saved)
        optimizer.step()
        results.append(copy.detach())
    stored, exact = results
    changes = exact != param.detach().float()
    return (changes & (stored == param.detach())).sum().item() / max(1, changes.sum().item())


def _triad_bandwidth(num_floats: int = 1 << 25, rounds: int = 5) -> float:
    """Measures the bytes per second of a += s * b in place: two reads and a write of 4 bytes."""
    a, b = torch.ones(num_floats), torch.ones(num_floats)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        a.add_(b, alpha=0.5)
        times.append(time.perf_counter() - begin)
    return 12 * num_floats / statistics.median(times)
