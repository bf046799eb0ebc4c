"""Reports an optimizer's memory, traffic and rounding losses: the result of `optimizer.report()`."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from copy import copy as copy_of
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from ..notebook import html_table
from . import precision
from .kept import NAME, Counts
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

    def __str__(self) -> str:
        first, *others = self._lines()
        entries = [f"  {name:24} {size:>10} MiB{mark}" for name, size, mark in self._entries()]
        return "\n".join([f"{first}:", *entries, *others])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(
            self._lines(), ("entry", "MiB"), [(name + mark, size) for name, size, mark in self._entries()]
        )

    def _entries(self) -> list[tuple[str, str, str]]:
        return [
            (name, f"{size / MIB:.1f}", " (expected)" if name in self.expected else "")
            for name, size in self.bytes.items()
        ]

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
    """Returns a line about the parameters whose states keep 32 bits under state_bits=8; none if there are none."""
    if not kept_32_bits:
        return []
    largest = sorted(kept_32_bits, key=lambda name: -kept_32_bits[name])
    names = ", ".join(map(repr, largest[:5])) + (", ..." if len(largest) > 5 else "")
    return [
        f"{len(largest)} small parameters ({sum(kept_32_bits.values()):,} elements) keep 32-bit states: {names}",
    ]


def report_of(engine: Any) -> Report:
    """Computes the report that :meth:`FusedOptimizer.report` returns."""
    optimizer, counts = engine.optimizer, engine.kept.counts
    sizes: dict[str, int] = {}
    expected: set[str] = set()
    num_elements = moved = 0
    on_cpu = engine.is_on_cpu
    lost, kept = {}, {}
    for label, param, grad, group, state in _stepped(optimizer):
        num_elements += param.numel()
        if _C.optim_keeps_32_bits(engine.precision_of(group), param):
            kept[label] = param.numel()
        entries = {"parameters": _size(param)}
        if grad is None:
            entries["gradients"] = param.numel() * (param.grad_dtype or param.dtype).itemsize
            expected.add("gradients")
        else:
            entries["gradients"] = _size(grad)
        there = {name: _size(entry) for name, entry in state.items() if isinstance(entry, Tensor)}
        made = states_of_step(engine, param, group)
        expected |= {name for name, size in made.items() if there.get(name) != size}
        entries |= made
        for name, size in entries.items():
            sizes[name] = sizes.get(name, 0) + size
            moved += size if name == "gradients" else 2 * size
        # Gradients are read a second time for the norm, and written where the step zeroes them.
        passes = (engine.kept.max_grad_norm is not None) + engine.kept.zero_grads_in_step
        moved += passes * entries["gradients"]
        if grad is not None and param.dtype in (torch.bfloat16, torch.float16) and "param_remainder" not in state:
            share = _lost_share(engine, param, grad, group, state)
            if share is not None:
                lost[label] = share
    bandwidth = _triad_bandwidth() if on_cpu and num_elements else None
    seconds = counts.seconds or None if on_cpu else None
    return Report(num_elements, sizes, moved, seconds, bandwidth, counts, lost, frozenset(expected), kept)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Labeled(NamedTuple):
    """A parameter, its name or position, and its group."""

    label: str
    param: Tensor
    group: dict[str, Any]


class _Stepped(NamedTuple):
    """A parameter that a step is about, with its name or position, its gradient, its group and its state."""

    label: str
    param: Tensor
    grad: Tensor | None
    group: dict[str, Any]
    state: dict[str, Any]


def _stepped(optimizer: Any) -> Iterator[_Stepped]:
    """Yields the parameters that a step is about; for DTensors this rank's part.

    Skips parameters that have neither a gradient nor a state, unless that holds for all.
    """
    params = [
        _Labeled(
            f"param_groups[{g}] {i}" if group.get("param_names") is None else group["param_names"][i], param, group
        )
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
    ]
    begun = [each for each in params if each.param.grad is not None or optimizer.state.get(each.param)]
    for label, param, group in begun or [each for each in params if each.param.requires_grad]:
        state = dtensors.local_values(param, optimizer.state.get(param, {}))
        grad = None if param.grad is None else dtensors.local_part(param.grad)
        yield _Stepped(label, dtensors.local_part(param), grad, group, state)


def states_of_step(engine: Any, param: Tensor, group: dict[str, Any]) -> dict[str, int]:
    """Computes the bytes of each state after the next step has created or converted it."""
    asked = engine.precision_of(group)
    sizes = {}
    for name, kind in _C.optim_states(engine.rule.name_of(group)):
        shape = _C.optim_state_shape(param, kind)
        if shape is None:
            continue
        numel, dtype = math.prod(shape), _C.optim_state_dtype(asked, param, kind)
        if dtype is not None and dtype.itemsize == 1:
            sizes[precision.codes_name(name)] = numel
            sizes[precision.scales_name(name)] = 4 * -(-numel // _C.optim_block_size())
        else:
            sizes[name] = numel * (dtype or param.dtype).itemsize
    if (extra := _C.optim_param_extra(asked, param)) is not None:
        sizes[extra[0]] = param.numel() * extra[1].itemsize
    return sizes


def _lost_share(engine: Any, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> float | None:
    """Steps copies, once as they are and once in float32. Returns None if this parameter's rounding loses nothing."""
    formats = engine.formats_of(group)
    if formats.get("rounding", "nearest") != "nearest" or formats.get("master_bits") is not None:
        return None
    with torch.no_grad():
        results = []
        for dtype in (param.dtype, torch.float32):
            copy = param.detach().to(dtype, copy=True).requires_grad_()
            copy.grad = grad.to(dtype)
            _optimizer_of(engine, group, state, copy).step()
            results.append(copy.detach())
        stored, exact = results
        changes = exact != param.float()
        lost = changes & (stored == param)
        return lost.sum().item() / max(1, changes.sum().item())


def _optimizer_of(engine: Any, group: dict[str, Any], state: dict[str, Any], copy: Tensor) -> Any:
    """Returns an optimizer of the same class for `copy` alone, with a copy of the state and without clipping."""
    state = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    optimizer, kept = engine.optimizer, copy_of(engine.kept)
    kept.max_grad_norm, kept.zero_grads_in_step = None, False
    result: Any = object.__new__(type(optimizer))
    result.__setstate__(
        optimizer.__getstate__()
        | {"state": defaultdict(dict, {copy: state} if state else {}), "param_groups": [{**group, "params": [copy]}]}
        | {NAME: kept}
    )
    return result


def _triad_bandwidth(num_floats: int = 1 << 25, rounds: int = 5) -> float:
    """Measures the bytes per second of a += s * b in place: two reads and a write of 4 bytes."""
    a, b = torch.ones(num_floats), torch.ones(num_floats)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        a.add_(b, alpha=0.5)
        times.append(time.perf_counter() - begin)
    return 12 * num_floats / statistics.median(times)
