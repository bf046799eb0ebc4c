"""Reports an optimizer's memory and counts its steps: the result of `optimizer.report()`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import _C
from ..notebook import html_table
from .engine import Engine
from .kept import Counts
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
        counts: Steps made, skipped and clipped since the optimizer was constructed.
    """

    counts: Counts
    num_elements: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    kept_32_bits: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of parameters, gradients and states together, per element."""
        return sum(self.bytes.values()) / max(1, self.num_elements)

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
        counts = self.counts
        return [
            f"{self.num_elements:,} elements, {self.bytes_per_parameter:.2f} bytes each",
            f"{counts.steps} steps, {counts.clipped} clipped, {counts.skipped} left out (not finite)",
            *lines_about_kept(self.kept_32_bits),
        ]


def lines_about_kept(kept_32_bits: dict[str, int]) -> list[str]:
    """Returns a line about the parameters whose states keep 32 bits under state_bits=8; none if there are none."""
    if not kept_32_bits:
        return []
    largest = sorted(kept_32_bits, key=lambda name: -kept_32_bits[name])
    names = ", ".join(map(repr, largest[:5])) + (", ..." if len(largest) > 5 else "")
    return [f"{len(largest)} small parameters ({sum(kept_32_bits.values()):,} elements) keep 32-bit states: {names}"]


def report_of(engine: Engine) -> Report:
    """Computes the report that :meth:`FusedOptimizer.report` returns."""
    report = Report(engine.kept.counts)
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
        for name, size in ({"parameters": param.nbytes, "gradients": grad_bytes} | made).items():
            report.bytes[name] = report.bytes.get(name, 0) + size
    report.expected = frozenset(expected)
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
        numel, dtype = math.prod(shape), _C.optim_state_dtype(asked, param, kind)
        if dtype is not None and dtype.itemsize == 1:
            sizes[f"{name}_codes"] = numel
            sizes[f"{name}_scales"] = 4 * -(-numel // _C.optim_block_size())
        else:
            sizes[name] = numel * (dtype or param.dtype).itemsize
    if (extra := _C.optim_param_extra(asked, param)) is not None:
        sizes[extra[0]] = param.numel() * extra[1].itemsize
    return sizes
