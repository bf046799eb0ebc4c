"""Checks of arguments; in torch's words for the classes that torch does not have."""

from torch import Tensor


def check_max_grad_norm(value: float | None) -> None:
    """Raises ValueError for what no norm can be clipped to."""
    if value is not None and not value > 0:
        raise ValueError(f"max_grad_norm is {value}, expected a number above 0 (inf: only measure), or None")


def check_arguments(lr: float | Tensor, betas: tuple[float, float], weight_decay: float, eps: float = 0.0) -> None:
    """Raises ValueError, in torch's words, for what is out of range."""
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
