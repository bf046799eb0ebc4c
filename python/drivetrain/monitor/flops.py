"""Counts the FLOPs of a step by what the dispatcher executes, and knows the peaks of devices."""

from typing import Any

import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Dense FLOP/s of vendors' data sheets: bfloat16, and float32 (TF32 where torch is allowed to use it).
_PEAKS = {
    "B200": (2.25e15, 8.0e13, 1.1e15),
    "H200": (9.89e14, 6.7e13, 4.94e14),
    "H100 PCIe": (7.56e14, 5.1e13, 3.78e14),
    "H100": (9.89e14, 6.7e13, 4.94e14),
    "A100": (3.12e14, 1.95e13, 1.56e14),
    "L40S": (3.62e14, 9.16e13, 1.83e14),
    "L4": (1.21e14, 3.03e13, 6.0e13),
}


class FlopCount(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention while it is active. Every operation runs
    unchanged, so that results keep their bits.

    torch's formulas count. Attention with `is_causal` counts only the scores that the mask keeps.

    Attributes:
        forward: FLOPs outside of backward passes.
        total: FLOPs of everything, with recomputation.
        of_dtype: FLOPs by dtype of the operations' first tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = 0.0
        self.total = 0.0
        self.of_dtype: dict[torch.dtype, float] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most FLOPs, which decides the device's peak; torch's default before any are counted."""
        return max(self.of_dtype, key=lambda one: self.of_dtype[one], default=torch.get_default_dtype())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, and counts it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flops_of(func, args, kwargs, result)
        self.total += count
        if count:
            dtype = next((one.dtype for one in args if isinstance(one, torch.Tensor)), torch.get_default_dtype())
            self.of_dtype[dtype] = self.of_dtype.get(dtype, 0.0) + count
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs in this thread
            self.forward += count
        return result


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns the FLOPs of one call of an operation; 0 for those that are no products, convolutions or attention."""
    packet = func._overloadpacket
    if packet in _CPU_ATTENTION:
        tensors = args[: _CPU_ATTENTION[packet][1]]
        count = float(_CPU_ATTENTION[packet][0](*(tensor.shape for tensor in tensors)))
    elif (formula := flop_counter.flop_registry.get(packet)) is not None:
        count = float(formula(*args, **kwargs, out_val=result))
    else:
        return 0.0
    return count * _kept_by_mask(func, args, kwargs)


# torch has no formulas for the CPU's own operations.
_CPU_ATTENTION: dict[Any, tuple[Any, int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (flop_counter.sdpa_flop_count, 3),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (flop_counter.sdpa_backward_flop_count, 4),
}


def _kept_by_mask(func: Any, args: Any, kwargs: Any) -> float:
    """Returns the share of attention scores that a causal mask keeps; 1 without one."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if not given.get("is_causal"):
        return 1.0
    queries, keys = given["query"].shape[-2], given["key"].shape[-2]
    square = min(queries, keys)
    kept = square * (square + 1) // 2 + (queries - square) * keys
    return float(kept / (queries * keys))


def obstacle_to_counting(model: nn.Module) -> str | None:
    """Returns why the FLOPs of this model's steps are not counted; None if they are."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return "the model is compiled, and counting would make it compile again"
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOP/s of a CUDA device for dense products of a dtype; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, (half, single, tensor_float) in _PEAKS.items():
        if known in name:
            if dtype in (torch.bfloat16, torch.float16):
                return half
            return tensor_float if torch.backends.cuda.matmul.allow_tf32 else single
    return None
