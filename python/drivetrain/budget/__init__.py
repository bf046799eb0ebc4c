"""Activation budgets: what forward saves for backward is kept, recomputed or offloaded within a limit of bytes."""

from .budget import ActivationPlan, activation_budget

__all__ = ["ActivationPlan", "activation_budget"]
