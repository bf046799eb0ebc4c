"""Replaces linear layers by ones whose backward adds the weight gradient directly to the gradient buffer."""

from torch import nn

from .fused_linear import Linear


def fuse_wgrad(model: nn.Module) -> None:
    """Lets the linear layers of a model add their weight gradient directly to `.grad`.

    A layer's backward computes `dW = grad_output^T input`, which has the weight's size. autograd or main_grads() then
    adds it to `.grad`, so that it is written, read and added. After this call one matrix product adds to `.grad` itself
    (GEMM with beta = 1), in the precision of `.grad`. With a float32 `.grad` and 16-bit factors, under autocast or
    after main_grads(), nothing is rounded to 16 bits in between.

    torch.nn.Linear and Hugging Face's Conv1D become subclasses; modules and state stay the same. Other subclasses of
    theirs, which may have a forward of their own, are left alone. Supported together with DistributedDataParallel,
    main_grads(), autocast, no_sync(), accumulate() and activation checkpointing, before or after this call. Under
    DistributedDataParallel the first micro-batch multiplies directly into the flat gradient buffer.

    Backward returns a gradient, as without this call, where another reader needs it or no product can add to `.grad`.
    This is so under torch.autograd.grad(), with create_graph=True, and for weights with hooks (`register_hook`) or
    parametrizations. It is also so for the first of several gradients where `.grad` is None. It holds for float16 on
    the CPU, for bfloat16 on processors without AVX-512, and for 24-bit main gradients on CUDA. Regions under
    torch.compile, functional transforms (torch.func) and tensor subclasses use torch's own layers.

    The layers' classes are drivetrain's from then on. Code that compares classes (torch.jit.script, quantize_dynamic)
    and pickled models depend on that: fuse the model that you train, not the one that you ship.

    Args:
        model: Has at least one such layer. Weights may be frozen later.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `model` has no such layer.
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
    # Avoids importing transformers, which takes long, for models that do not use it.
    if layer.__name__ == "Conv1D" and layer.__module__ in ("transformers.pytorch_utils", f"{__package__}.fused_conv1d"):
        from .fused_conv1d import Conv1D

        return Conv1D
    return None
