"""Measures the memory that CPU kernels take beyond their results, by calls of them on made-up values."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_unflatten

from .replay import CALL_ERRORS, fill, on_cpu
from .trace import Signature, StepTrace, TensorSpec

_aten = torch.ops.aten
_NOTHING = "6"  # above the highest level of libkineto's messages
_MOST_FLOPS = 4e9  # of a call; a larger one is measured with two parts of its batch
_IMAGES = {_aten.convolution.default: (0,), _aten.convolution_backward.default: (0, 1)}  # arguments with a batch
_known: dict[tuple[Any, int], int] = {}  # by operation, arguments and threads


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
