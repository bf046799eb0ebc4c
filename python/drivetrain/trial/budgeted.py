"""Gives the models of an unedited script an activation budget, for `drivetrain try --budget`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ..budget import ActivationPlan, activation_budget
from ..budget.retry import unchanged

_backward = torch.autograd.backward  # not the one that records losses


class BudgetedCalls:
    """Plans each model at its first call that trains it, with the inputs of that call.

    It knows no loss, so the plan covers what the model computes, as `activation_budget` describes. Planning leaves
    the model unchanged, and all random states.

    Args:
        budget: As of `activation_budget`.
    """

    def __init__(self, budget: str) -> None:
        self._budget = budget
        self._plain: Callable[..., Any] | None = None
        self._is_inside = False
        self._seen: list[nn.Module] = []
        self.plans: list[ActivationPlan] = []
        self.failures: list[str] = []  # why a model has no budget

    def begin(self) -> None:
        """Follows calls of modules from now on."""
        plain = self._plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not _trains(module):
                return plain(module, *args, **kwargs)
            self._is_inside = True
            try:
                self._plan(module, plain, args, kwargs)
                return plain(module, *args, **kwargs)
            finally:
                self._is_inside = False

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def end(self) -> None:
        """Plans no further model. Measures what the plans keep from now on."""
        if self._plain is not None:
            nn.Module.__call__, self._plain = self._plain, None  # type: ignore[method-assign]
            for plan in self.plans:
                plan.reset_peak()

    def _plan(self, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if any(module is one for one in self._seen):
            return
        self._seen.append(module)

        def step() -> None:
            given, named = tree_map_only(
                Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), (args, kwargs)
            )
            with module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext():
                results = tree_leaves(plain(module, *given, **named))
                results = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
                _backward([one.sum() for one in results if one.numel() == 1] or [one.sum() for one in results])

        with unchanged(module):
            try:
                self.plans.append(activation_budget(module, step, self._budget))
            except Exception as error:
                self.failures.append(f"{type(module).__name__} has no budget: {type(error).__name__}: {error}")


def _trains(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and module.training and any(param.requires_grad for param in module.parameters())
