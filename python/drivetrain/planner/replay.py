"""Runs the operations of a traced step in their order, on memory as the step has it, and measures each in its place.

An operation that is repeated alone finds its code, its result's memory and often its arguments in caches. In a step,
others run between two calls of it, which takes its place in caches and clocks. Only the order of the step shows that.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_flatten, tree_unflatten

from .trace import ALLOC, FREE, OP, Category, Operand, Signature, StepTrace, TensorSpec

# Calls that cannot run on made-up values raise one of these.
CALL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
# oneDNN reads whatever the forward pass has left in a workspace, whose size and layout a trace does not know.
UNSAFE = ("aten::mkldnn_rnn_layer_backward",)
_WARM_UP = 2  # rounds: the first one fills memory, as a first step does
_MOST_ROUNDS = 30
_LOW, _HIGH = 0.1, 1.0  # of made-up values
# Blocks that outlive steps. A trace frees them as well, after its last step.
_KEPT: tuple[Category, ...] = ("parameters", "optimizer states", "inputs")
_aten = torch.ops.aten
_NOTHING = "6"  # above the highest level of libkineto's messages
_MOST_FLOPS = 4e9  # of a call; a larger one is measured with two parts of its batch
_IMAGES = {_aten.convolution.default: (0,), _aten.convolution_backward.default: (0, 1)}  # arguments with a batch
_known: dict[tuple[Any, int], int] = {}  # by operation, arguments and threads


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


# ---- The memory that CPU kernels take beyond their results.


def cpu_workspaces(trace: StepTrace) -> dict[int, int]:
    """Returns the most bytes that an operation holds while it runs on the CPU, results included, by signature.

    Convolutions and recurrent layers are measured. Their kernels copy arguments and results into layouts that depend
    on sizes, threads and the processor. Operations that hold no more than their results are left out.
    """
    flops = {op.signature: op.flops for op in trace.ops}
    found = {}
    before = torch.get_num_threads()
    try:
        for index, signature in enumerate(trace.signatures):
            if signature.op not in _IMAGES and signature.op is not _aten.mkldnn_rnn_layer_backward.default:
                continue
            key = ((signature.op, signature.arguments), trace.num_threads)
            if key not in _known:
                torch.set_num_threads(trace.num_threads)
                _known[key] = _measured(signature, flops.get(index, 0.0))
            found[index] = _known[key]
    finally:
        torch.set_num_threads(before)
    return {index: size for index, size in found.items() if size}


def _measured(signature: Signature, flops: float) -> int:
    """Returns the workspace of a call; 0 if it cannot run on made-up values."""
    try:
        if signature.op is _aten.mkldnn_rnn_layer_backward.default:
            return _workspace_of_recurrence(signature)
        size: int = signature.arguments[0].shape[0]
        if flops <= _MOST_FLOPS or size < 8:
            return workspace(signature, arguments_for(signature))
        few, many = size // 8, size // 4
        of_few, of_many = (_workspace_of_part(signature, part) for part in (few, many))
        return of_many + (of_many - of_few) * (size - many) // (many - few)
    except CALL_ERRORS:
        return 0


def _workspace_of_part(signature: Signature, size: int) -> int:
    """Returns the workspace of a convolution for a part of its batch."""
    arguments = list(signature.arguments)
    for position in _IMAGES[signature.op]:
        arguments[position] = arguments[position]._replace(shape=(size, *arguments[position].shape[1:]))
    part = signature._replace(arguments=tuple(arguments))
    return workspace(part, arguments_for(part))


def _workspace_of_recurrence(signature: Signature) -> int:
    """Returns the workspace of oneDNN's backward pass, which reads what its forward pass keeps."""
    args, _ = arguments_for(signature)
    names = [argument.name for argument in signature.op._schema.arguments]
    given = dict(zip(names, args, strict=True))
    settings = ("batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first")
    forward = [*args[:5], given["hx_"], given["cx_tmp"], given["reverse"], *(given[name] for name in settings), True]
    with torch.enable_grad():
        kept = _aten.mkldnn_rnn_layer(*forward)[3]
    return workspace(signature, ((*args[:-1], kept), {}))


def bytes_kept_by_recurrence(args: tuple[Any, ...]) -> int:
    """Returns the bytes that oneDNN's recurrent layer keeps for backward, which tensors without values do not show."""
    source, *weights = args[:5]

    def kept(length: int) -> int:
        shapes = [(length, *source.shape[1:]), *(weight.shape for weight in weights), args[5].shape, args[6].shape]
        made = [torch.zeros(shape, dtype=source.dtype) for shape in shapes]
        with torch.enable_grad():
            return int(_aten.mkldnn_rnn_layer(*made, *args[7:])[3].numel())

    length: int = source.shape[0]
    return kept(1) + (length - 1) * (kept(2) - kept(1))


# ---- Calls on made-up values.


def arguments_for(signature: Signature) -> tuple[Any, dict[str, Any]]:
    """Returns made-up arguments of an operation."""
    rows = next((a.shape[0] for a in signature.arguments if isinstance(a, TensorSpec) and a.shape), 1)
    flat = [
        _made(argument, rows) if isinstance(argument, TensorSpec) else on_cpu(argument)
        for argument in signature.arguments
    ]
    args, kwargs = tree_unflatten(flat, signature.structure)
    return args, kwargs


def _made(spec: TensorSpec, rows: int) -> Tensor:
    """Returns a tensor of that layout: random values, and indices that are valid for the first argument's rows."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,))
    fill(storage, max(1, min(rows, 2)))
    return tensor


def workspace(signature: Signature, call: tuple[Any, dict[str, Any]]) -> int:
    """Returns the most bytes that a call holds at a time, results included; 0 if it holds no more than these."""
    args, kwargs = call
    with torch.no_grad():
        signature.op(*args, **kwargs)  # a first call may fill caches
        with memory_profile() as profiled:
            result = signature.op(*args, **kwargs)
    peak, live = peak_of(profiled)
    del result
    return peak if peak > max(live, 0) else 0


def memory_profile() -> profile:
    """Returns a profile for `peak_of`."""
    # Otherwise the profiler prints two lines for each profile. It reads the variable once.
    os.environ.setdefault("KINETO_LOG_LEVEL", _NOTHING)
    # torch.profiler's class would also summarize all operations, which takes longer than to run them.
    return profile(profile_memory=True, use_kineto=True)


def peak_of(profiled: profile) -> tuple[int, int]:
    """Returns the most bytes that torch's CPU allocator gave out in a profile, and those that are left at its end."""
    live = peak = 0
    results: Any = profiled.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live
