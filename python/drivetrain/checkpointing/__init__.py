"""Saves and restores training states: crash-safe checkpoints that are written in the background."""

from .checkpointer import Checkpointer
from .store import Checkpoint, CheckpointError, Coordinator, Fault, Save, Store

__all__ = ["Checkpoint", "CheckpointError", "Checkpointer", "Coordinator", "Fault", "Save", "Store"]
