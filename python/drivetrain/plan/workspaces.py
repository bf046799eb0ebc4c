"""Estimates the memory that kernels take while they run, beyond their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .trace import Signature, StepTrace, TensorSpec

_aten = torch.ops.aten
_LANES = 16  # oneDNN's blocks of channels with AVX-512
_FLOATS = (torch.float32, torch.bfloat16)


def cpu_workspaces(trace: StepTrace) -> dict[int, int]:
    """Returns the most bytes that an operation holds while it runs on the CPU, results included, by signature.

    Operations that hold no more than their results are left out. Convolutions are oneDNN's, which copies arguments and
    results that are not in its blocked layout.
    """
    found = {}
    for index, signature in enumerate(trace.signatures):
        if signature.op is _aten.convolution.default:
            found[index] = _convolution(signature)
        elif signature.op is _aten.convolution_backward.default:
            found[index] = _convolution_backward(signature)
    return {index: size for index, size in found.items() if size}


def _convolution(signature: Signature) -> int:
    tensors = [argument for argument in signature.arguments if isinstance(argument, TensorSpec)]
    source, weight = tensors[:2]
    if not _is_blocked(source, weight, signature):
        return 0
    transposed = _is_transposed(signature)
    channels = weight.shape[1] if transposed else weight.shape[0]
    target = _target_shape(source, weight, signature, channels)
    size = int(weight.dtype.itemsize)
    copied = math.prod(target[2:]) * target[0] * _padded(channels) * size
    whole = math.prod(target) * size
    return max(_blocked(source) + _blocked_weight(weight) + copied, whole + copied)


def _convolution_backward(signature: Signature) -> int:
    grad, source, weight = [argument for argument in signature.arguments if isinstance(argument, TensorSpec)][:3]
    if not _is_blocked(source, weight, signature):
        return 0
    makes = [argument for argument in signature.arguments if isinstance(argument, bool)][-3:]
    of_source = _blocked(grad) + _blocked_weight(weight) + _blocked(source, always=True)
    kept = math.prod(source.shape) * source.dtype.itemsize if makes[0] else 0
    of_weight = kept + _blocked(grad) + _blocked(source) + _blocked_weight(weight)
    return max(of_source if makes[0] else 0, of_weight if makes[1] else 0)


def _is_blocked(source: TensorSpec, weight: TensorSpec, signature: Signature) -> bool:
    """Returns whether oneDNN copies: torch's rule for using it, and a layout with channels before positions."""
    if source.dtype not in _FLOATS or len(source.shape) < 4 or source.stride[1] == 1 != source.shape[1]:
        return False
    is_pointwise = all(size == 1 for size in weight.shape[2:])
    is_strided = _numbers(source, signature)[0] > 1
    if is_pointwise and torch.get_num_threads() == 1 and not is_strided and source.shape[0] < 16:
        return False
    is_large_filter = all(size > 3 for size in weight.shape[2:])
    return is_large_filter or source.shape[0] > 1 or math.prod(source.shape) > 20480


def _numbers(source: TensorSpec, signature: Signature) -> list[int]:
    """Returns stride, padding, dilation and output padding of every axis, and the groups."""
    numbers = [value for value in signature.arguments if isinstance(value, int) and not isinstance(value, bool)]
    return numbers[-(4 * (len(source.shape) - 2) + 1) :]  # without the size of the bias


def _is_transposed(signature: Signature) -> bool:
    return next((argument for argument in signature.arguments if isinstance(argument, bool)), False)


def _target_shape(source: TensorSpec, weight: TensorSpec, signature: Signature, channels: int) -> Sequence[int]:
    rank = len(source.shape) - 2
    numbers = _numbers(source, signature)
    stride, padding, dilation, output_padding = (numbers[rank * i : rank * (i + 1)] for i in range(4))
    shape = [source.shape[0], channels]
    for axis in range(rank):
        size, reach = source.shape[2 + axis], dilation[axis] * (weight.shape[2 + axis] - 1)
        if _is_transposed(signature):
            shape.append((size - 1) * stride[axis] - 2 * padding[axis] + reach + output_padding[axis] + 1)
        else:
            shape.append((size + 2 * padding[axis] - reach - 1) // stride[axis] + 1)
    return shape


def _padded(channels: int) -> int:
    return -(-channels // _LANES) * _LANES


def _blocked(spec: TensorSpec, always: bool = False) -> int:
    """Returns the bytes of a blocked copy. Images with a few channels are read as they are."""
    channels = spec.shape[1]
    if channels < 4 and not always:
        return 0
    return math.prod(spec.shape) // channels * _padded(channels) * int(spec.dtype.itemsize)


def _blocked_weight(weight: TensorSpec) -> int:
    out, into = weight.shape[:2]
    return math.prod(weight.shape[2:]) * _padded(out) * _padded(into) * int(weight.dtype.itemsize)
