"""Runs the operations of a traced step in their order, on memory as the step has it, and measures each in its place.

An operation that is repeated alone finds its code, its result's memory and often its arguments in caches. In a step,
others run between two calls of it, which takes its place in caches and clocks. Only the order of the step shows that.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .trace import ALLOC, FREE, OP, Category, Operand, StepTrace, TensorSpec

# Calls that cannot run on made-up values raise one of these.
CALL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
# oneDNN reads whatever the forward pass has left in a workspace, whose size and layout a trace does not know.
UNSAFE = ("aten::mkldnn_rnn_layer_backward",)
_WARM_UP = 2  # rounds: the first one fills memory, as a first step does
_MOST_ROUNDS = 30
_LOW, _HIGH = 0.1, 1.0  # of made-up values
# Blocks that outlive steps. A trace frees them as well, after its last step.
_KEPT: tuple[Category, ...] = ("parameters", "optimizer states", "inputs")


def replayed_seconds(
    trace: StepTrace, deadline: float, clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Runs the last step of a trace several times, without autograd, and returns the mean seconds of a call.

    The seconds of a call are the median over all rounds, with the release of what dies after it. Medians leave out what
    disturbs a call now and then, and in a long step something always is disturbed. All are therefore scaled by one
    factor, with which they add up to the lower quartile of whole rounds. Other programs only add to a round's time, and
    often for as long as half of the rounds take.

    Returns:
        The seconds by signature, without those that cannot run on made-up values. They are empty if no round is done at
        the deadline, a time of `time.monotonic`. The first rounds count where there are no others.
    """
    replay = _Replay(trace, clock)
    rounds: list[list[float]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number in range(_WARM_UP + _MOST_ROUNDS):
            times = replay.round(deadline)
            if times is None:
                break
            if number <= _WARM_UP:
                rounds.clear()
            rounds.append(times)
    if not rounds:
        return {}
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    whole = sum(medians)
    quartile = statistics.quantiles(map(sum, rounds), n=4)[0] if len(rounds) > 1 else whole
    scale = quartile / whole if whole else 1.0
    calls: dict[int, list[float]] = {}
    for op, seconds in zip(trace.last_step(), medians, strict=True):
        if op.signature >= 0 and op.signature not in replay.failed:
            calls.setdefault(op.signature, []).append(scale * seconds)
    return {signature: statistics.fmean(times) for signature, times in calls.items()}


def replay_bytes(trace: StepTrace) -> int:
    """Returns the most bytes that tensors of the last step hold at a time."""
    live = sum(block.num_bytes for block in trace.blocks if block.op == -1)
    peak, begin = 0, trace.begin_of_last_step()
    for position, (kind, subject) in enumerate(trace.events):
        if kind == ALLOC:
            live += trace.blocks[subject].num_bytes
        elif kind == FREE:
            live -= trace.blocks[subject].num_bytes
        if position >= begin:
            peak = max(peak, live)
    return peak


class _Replay:
    def __init__(self, trace: StepTrace, clock: Callable[[], float] = time.perf_counter) -> None:
        # Signatures without a time: those that are left out from the start, and those that have failed.
        self.failed = {index for index, one in enumerate(trace.signatures) if one.op._schema.name in UNSAFE}
        self._trace, self._clock = trace, clock
        self._events = trace.events[trace.begin_of_last_step() :]
        self._storages: dict[int, torch.UntypedStorage] = {}  # by block
        self._dtypes: dict[int, torch.dtype] = {}  # of blocks that have another dtype than traced

    def round(self, deadline: float) -> list[float] | None:
        """Runs the step once, and returns the seconds of each call; None if the deadline comes first."""
        times: list[float] = []
        for kind, subject in self._events:
            if kind == FREE:
                if self._trace.blocks[subject].category in _KEPT:
                    continue
                begin = self._clock()
                self._storages.pop(subject, None)
                if times:
                    times[-1] += self._clock() - begin
            elif kind == OP:
                if time.monotonic() > deadline:
                    return None
                times.append(self._call(subject))
        return times

    def _call(self, number: int) -> float:
        op = self._trace.ops[number]
        if op.signature < 0 or op.signature in self.failed:
            return 0.0
        signature = self._trace.signatures[op.signature]
        operands = iter(op.operands)
        flat = [
            self._tensor(argument, next(operands)) if isinstance(argument, TensorSpec) else on_cpu(argument)
            for argument in signature.arguments
        ]
        args, kwargs = tree_unflatten(flat, signature.structure)
        try:
            begin = self._clock()
            result = signature.op(*args, **kwargs)
            seconds = self._clock() - begin
        except CALL_ERRORS:
            self.failed.add(op.signature)
            return 0.0
        made = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        for tensor, block in zip(made, op.results, strict=False):
            storage = self._storages[block] = tensor.untyped_storage()
            if storage.nbytes() != self._trace.blocks[block].num_bytes:
                # Without values, torch takes the mean of half-precision norms for half-precision as well.
                self._dtypes[block] = tensor.dtype
        return seconds

    def _tensor(self, spec: TensorSpec, operand: Operand) -> Tensor:
        block, offset = operand
        spec = spec._replace(dtype=self._dtypes.get(block, spec.dtype))
        steps = zip(spec.shape, spec.stride, strict=True)
        extent = 0 if 0 in spec.shape else 1 + sum((size - 1) * stride for size, stride in steps)
        needed = (offset + extent) * spec.dtype.itemsize
        storage = self._storages.get(block)
        if storage is None or storage.nbytes() < needed:
            storage = self._made(spec, block, needed)
            if block >= 0:
                self._storages[block] = storage
        return torch.empty(0, dtype=spec.dtype).set_(storage, offset, spec.shape, spec.stride)

    def _made(self, spec: TensorSpec, block: int, num_bytes: int) -> torch.UntypedStorage:
        """Returns a storage for a block that no call of the step made."""
        category: Category = "temporary"
        shape: Sequence[int] = ()
        if block >= 0:
            known = self._trace.blocks[block]
            category, num_bytes = known.category, max(num_bytes, known.num_bytes)
            if category == "parameters" and known.parameter >= 0:
                shape = self._trace.parameters[known.parameter].shape
        values = torch.empty(-(-num_bytes // spec.dtype.itemsize), dtype=spec.dtype)
        if len(shape) > 1 and values.is_floating_point():
            values.normal_(0.0, 1.0 / math.sqrt(max(1, math.prod(shape[1:]))))  # keeps results of layers near 1
        else:
            fill(values, 2)
        return values.untyped_storage()


def fill(tensor: Tensor, limit: int) -> None:
    """Fills a tensor with made-up values: indices below `limit`, truth values, or positive numbers up to 1."""
    if tensor.dtype.is_floating_point:
        tensor.uniform_(_LOW, _HIGH)
    elif tensor.dtype == torch.bool:
        tensor.bernoulli_(0.5)
    elif not tensor.dtype.is_complex:
        tensor.random_(0, limit)


def on_cpu(argument: Any) -> Any:
    """Returns an argument of a call as it is on the CPU: for a trace, devices are the model's."""
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
