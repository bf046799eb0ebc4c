"""Activation checkpointing: what forward saves for backward is forgotten and recomputed."""

from .region import checkpoint

__all__ = ["checkpoint"]
