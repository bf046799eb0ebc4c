"""Makes references optimizers, for classes that torch lacks."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


class AsOptimizer(torch.optim.Optimizer):
    """Steps by a reference function, whose keyword arguments are the options, with the interface of torch's classes."""

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, params: Any, lr: float | None = None, **options: Any) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        self._options = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
        given = options if lr is None else {"lr": lr, **options}
        super().__init__(params, {**self._options, **given})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            options = {name: group[name] for name in self._options}
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(self.function(param, param.grad, self.state[param], **options))
