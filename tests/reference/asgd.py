"""ASGD, one tensor at a time, as torch implements it."""

import torch
from torch import Tensor


def asgd(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step, step size, weight and average) is updated in place.

    The step size and the weight of the average are float32, as torch keeps them, and one step late.
    """
    state["step"] = state.get("step", torch.zeros(())) + 1
    step = int(state["step"])
    eta, mu = state.get("eta", torch.tensor(lr)).item(), state.get("mu", torch.ones(())).item()
    if maximize:
        grad = -grad
    grad = grad + weight_decay * param
    param = param * (1 - lambd * eta) - eta * grad
    average = state.get("ax", torch.zeros_like(param))
    state["ax"] = param.clone() if mu == 1 else average + mu * (param - average)
    state["eta"] = torch.tensor(lr / (1 + lambd * lr * step) ** alpha)
    state["mu"] = torch.tensor(1 / max(1, step - t0))
    return param
