"""Activation budgets: forward's saved tensors are kept, recomputed or offloaded within a limit of bytes."""

from .budget import ActivationPlan, activation_budget

__all__ = ["ActivationPlan", "activation_budget"]
