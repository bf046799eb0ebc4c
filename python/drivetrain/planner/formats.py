"""Asks drivetrain's optimizers for the bytes of their states, and puts them in place of a trace's."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch

from .. import _C, optim
from ..optim import precision
from ..optim.base import FusedOptimizer
from ..optim.engine import Engine
from ..optim.report import states_of_step
from .trace import ALLOC, OP, STEP, Block, Event, OpCall, ParameterInfo, StepTrace


def state_bytes(
    parameters: list[ParameterInfo], optimizer: str, state_bits: int | None = None, master_bits: int | None = None
) -> list[list[int]]:
    """Returns the bytes of each state of each parameter, in order; none for parameters that are not trained.

    The formats are as a class of drivetrain.optim takes them. `master_bits` applies to parameters of 16 bits.

    Raises:
        ValueError: drivetrain.optim has no such class, or a format does not exist.
    """
    kind = getattr(optim, optimizer, None)
    if optimizer not in optim.__all__ or not (isinstance(kind, type) and issubclass(kind, FusedOptimizer)):
        names = ", ".join(name for name in optim.__all__ if name[0].isupper())
        raise ValueError(f"optimizer is {optimizer!r}, expected one of {names}")
    known = functools.cache(lambda shape, dtype: _bytes_for(kind, shape, dtype, state_bits, master_bits))
    return [known(one.shape, one.dtype) if one.requires_grad else [] for one in parameters]


def kept_32_bits(parameters: list[ParameterInfo]) -> dict[str, int]:
    """Returns the elements of each trainable parameter that is too small for states in blocks, by its name."""
    asked = precision.of({"state_bits": 8})
    return {
        parameter.name: math.prod(parameter.shape)
        for parameter in parameters
        if parameter.requires_grad
        and _C.optim_keeps_32_bits(asked, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    }


def _bytes_for(
    kind: Any, shape: tuple[int, ...], dtype: torch.dtype, state_bits: int | None, master_bits: int | None
) -> list[int]:
    example = torch.zeros((1,) * max(1, len(shape)), dtype=dtype).requires_grad_()
    is_half = dtype in (torch.bfloat16, torch.float16)
    formats = {"state_bits": state_bits, "master_bits": master_bits if is_half else None}
    asked = {name: bits for name, bits in formats.items() if bits is not None}
    optimizer = kind([example], **({"lr": 1e-3} | asked))
    layout = torch.empty(shape, dtype=dtype, device="meta")
    return list(states_of_step(Engine(optimizer), layout, optimizer.param_groups[0]).values())


def with_states(trace: StepTrace, sizes: list[list[int]], name: str) -> StepTrace:
    """Returns the trace with optimizer states of other sizes, given by parameter, as a class of that name has them.

    In a trace without optimizer states, they come at the end of the first step.
    """
    trace = copy.copy(trace)
    trace.blocks = [copy.copy(block) for block in trace.blocks]
    states = [block for block in trace.blocks if block.category == "optimizer states"]
    if states:
        left = [list(entries) for entries in sizes]
        last: dict[int, Block] = {}
        for block in states:
            block.num_bytes = left[block.parameter].pop(0) if block.parameter >= 0 and left[block.parameter] else 0
            last[block.parameter] = block
        for parameter, entries in enumerate(left):  # states that the traced optimizer does not have
            if entries and parameter in last:
                last[parameter].num_bytes += sum(entries)
        return trace
    trace.ops = list(trace.ops)
    first_end = [i for i, event in enumerate(trace.events) if event.kind == STEP][1:2] or [len(trace.events)]
    made = []
    for parameter, entries in enumerate(sizes):
        for size in entries:
            made.append(Event(ALLOC, len(trace.blocks)))
            trace.blocks.append(
                Block(size, "optimizer states", len(trace.ops), parameter, trace.parameters[parameter].name)
            )
    moved = 2 * sum(map(sum, sizes)) + 3 * trace.parameter_bytes
    trace.ops.append(OpCall(f"drivetrain::{name}", "optimizer", "optimizer", False, 0.0, moved, "float32", (), (), -1))
    call = Event(OP, len(trace.ops) - 1)
    trace.events = [*trace.events[: first_end[0]], call, *made, *trace.events[first_end[0] :], call]
    trace.optimizers = [*trace.optimizers, name]
    return trace
