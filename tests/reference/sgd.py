"""SGD with momentum, one tensor at a time, as torch's documentation writes it."""

from torch import Tensor


def sgd(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (the momentum buffer, in the computing dtype) is updated in place."""
    if maximize:
        grad = -grad
    grad = grad + weight_decay * param
    if momentum:
        if "momentum_buffer" in state:
            state["momentum_buffer"] = momentum * state["momentum_buffer"] + (1 - dampening) * grad
        else:
            state["momentum_buffer"] = grad
        grad = grad + momentum * state["momentum_buffer"] if nesterov else state["momentum_buffer"]
    return param - lr * grad
