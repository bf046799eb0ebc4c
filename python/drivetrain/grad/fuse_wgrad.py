"""Linear layers whose backward adds the weight's gradient straight to where it is collected."""

import torch
from torch import Tensor, nn

from .. import _C


class Linear(nn.Linear):
    """torch.nn.Linear after fuse_wgrad()."""

    def forward(self, input: Tensor) -> Tensor:
        """As torch's."""
        if is_plain(input):
            return _C.fused_linear(input, self.weight, self.bias, is_conv1d=False)
        return super().forward(input)


def fuse_wgrad(model: nn.Module) -> None:
    """Lets the linear layers of a model add their weight's gradient straight to where it is collected.

    A layer's backward computes `dW = grad_output^T input`, of the weight's size, and autograd then adds it to `.grad`
    (or main_grads() does): it is written, read, and added. Here one matrix product adds to `.grad` itself (GEMM with
    beta = 1), in the precision of that: where it is float32 and the product's factors are in 16 bits, under autocast or
    after main_grads(), nothing is rounded to 16 bits in between.

    torch.nn.Linear and Hugging Face's Conv1D become subclasses that do so, themselves and their state as they are;
    subclasses of theirs, with a forward of their own, are left alone. It goes together with DistributedDataParallel
    (the gradient of the first micro-batch, too, is then multiplied straight into the arena), main_grads(), autocast,
    no_sync(), accumulate(), and activation checkpointing; call it before or after any of these.

    Backward returns a gradient as ever where somebody is to see it first, or it cannot be added: under
    torch.autograd.grad(), with create_graph=True, for weights that have hooks (`register_hook`) or are computed
    (parametrizations), with the first of several gradients where `.grad` is None (autograd keeps that one as it is,
    without a copy), for float16 on the CPU, bfloat16 there on processors without AVX-512, and with 24-bit main
    gradients on CUDA, where no product adds to them. Regions under torch.compile, functional transforms (torch.func),
    and tensor subclasses take torch's own layers.

    The layers' classes are drivetrain's from here on, which what compares classes must know (torch.jit.script,
    quantize_dynamic), and so must files of whole models: fuse what you train, not what you ship.

    Args:
        model: has at least one such layer. Freezing weights later is fine.

    Raises:
        TypeError: it is no module.
        ValueError: it has none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    fused = {module: layer for module in model.modules() if (layer := _fused(type(module))) is not None}
    if not fused:
        raise ValueError(
            f"the model, a {type(model).__name__}, has no torch.nn.Linear and no Conv1D of transformers: there is "
            "nothing to fuse."
        )
    for module, layer in fused.items():
        module.__class__ = layer


def _fused(layer: type) -> type | None:
    if layer in (nn.Linear, Linear):
        return Linear
    # Without an import of transformers, which takes its time, for models that have nothing of it.
    if layer.__name__ == "Conv1D" and layer.__module__ in ("transformers.pytorch_utils", f"{__name__}_conv1d"):
        from .fuse_wgrad_conv1d import Conv1D

        return Conv1D
    return None


def is_plain(input: Tensor) -> bool:
    """Whether it is a tensor of values, not of a tracer or a subclass."""
    return type(input) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
