"""Checks the arguments of optimizers, with torch's messages where torch has one."""

from typing import Any

from torch import Tensor


def check_max_grad_norm(value: float | None) -> None:
    """Raises ValueError unless the value is None or above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"max_grad_norm is {value}, expected a number above 0 (inf: only measure), or None")


def check_arguments(lr: float | Tensor, betas: tuple[float, float], weight_decay: float, eps: float = 0.0) -> None:
    """Raises ValueError, with torch's messages, for arguments out of range."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


def refuse_unsupported(name: str, options: dict[str, Any]) -> None:
    """Raises NotImplementedError for torch's constructor options that would otherwise be ignored silently.

    `foreach` and `fused` choose between torch's implementations and have no effect here: the step is always fused.
    `capturable` has no effect either: every step on CUDA can be captured.
    """
    if options.get("differentiable"):
        raise NotImplementedError(
            f"drivetrain.optim.{name} does not support differentiable=True: use torch.optim.{name} to differentiate "
            "through the step"
        )
