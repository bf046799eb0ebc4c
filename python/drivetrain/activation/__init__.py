"""Activation checkpointing: what forward saves for backward is forgotten and recomputed."""

from .budget import ActivationPlan, activation_budget
from .region import checkpoint

__all__ = ["ActivationPlan", "activation_budget", "checkpoint"]
