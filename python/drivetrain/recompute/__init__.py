"""Activation checkpointing: a call whose saved tensors are freed after forward and recomputed in backward."""

from .region import checkpoint

__all__ = ["checkpoint"]
