"""Optimizers with torch's constructors and state, stepped in one parallel pass over all parameters."""

from .adam import Adam, AdamW
from .base import constructed
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "constructed"]
