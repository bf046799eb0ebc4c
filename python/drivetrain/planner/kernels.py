"""Chooses the kernels of attention and dropout as torch does on the planned device, for tensors without values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD = 256  # of csrc flash attention; a multiple of 8


class KernelChoice(TorchFunctionMode):
    """Replaces functions whose kernel depends on the device.

    torch asks the device of the tensors, and traced tensors are not on the planned one. Attention becomes the fused
    kernel that torch's own rules choose, or the products and the softmax that it falls back to. Dropout on a GPU
    becomes the fused kernel, which keeps a mask of bytes.
    """

    def __init__(self, device_kind: str) -> None:
        super().__init__()
        self._is_cuda = device_kind == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self._is_cuda and func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        kind = query.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            # torch casts the arguments, and runs the kernel without autocast.
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
            with torch.autocast(kind, enabled=False):
                return self._attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # torch turns a mask of truth values into one that is added.
            kept, hidden = (torch.scalar_tensor(number, dtype=query.dtype) for number in (0.0, -math.inf))
            attn_mask = torch.where(attn_mask, kept, hidden)
        found: Tensor
        is_fused = query.dim() == 4 and query.shape[-1] == value.shape[-1]
        is_fused = is_fused and all(t.stride(-1) == 1 for t in (query, key, value)) and 0 not in query.shape
        if is_fused and self._is_cuda:
            if query.dtype in _HALF and attn_mask is None and query.shape[-1] <= _MAX_FLASH_HEAD:
                flash = _aten._scaled_dot_product_flash_attention
                found = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
                return found
            if key.shape[-3] == query.shape[-3]:  # the memory-efficient kernel has no grouped heads
                needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
                mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
                efficient = _aten._scaled_dot_product_efficient_attention
                found = efficient(query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]
                return found
        elif is_fused and dropout_p == 0:
            if attn_mask is None or (not attn_mask.requires_grad and attn_mask.dim() in (2, 4)):
                flash = _aten._scaled_dot_product_flash_attention_for_cpu
                found = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
                return found
        plain = _aten._scaled_dot_product_attention_math
        found = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        return found


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, training)[0]
    return functional.dropout(input, p, training, inplace)
