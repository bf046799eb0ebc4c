"""Finds parameters whose values lie in other tensors, such as quantized weights, which no optimizer here steps."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def wraps_others(tensor: Tensor) -> bool:
    """Returns whether the tensor has no memory of its own, as quantized weights made of several tensors do."""
    is_plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return not is_plain and torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def is_fake(tensor: Tensor) -> bool:
    """Returns whether the tensor only simulates operations, as when tools build a model to plan its memory."""
    return isinstance(tensor, FakeTensor)


def why_not(param: Tensor, local: Tensor) -> str:
    """Returns the end of an error for a parameter whose part on this rank, `local`, wraps other tensors."""
    what = f"a {type(local).__name__}" + ("" if local is param else f" in a {type(param).__name__}")
    return (
        f"is a tensor subclass that wraps others ({what}), which drivetrain's optimizers do not support: use "
        "torch.optim for it, or a plain tensor as the weight"
    )
