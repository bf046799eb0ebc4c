"""Saves and restores training states: crash-safe checkpoints that are written in the background."""

from .checkpointer import Checkpointer
from .encryption import Encryption
from .store import Checkpoint, CheckpointError, Coordinator, EncryptionError, Fault, Save, Store
from .survivors import continue_in_place
from .tiers import Ram, Remote
from .uploader import TierStatus

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "Coordinator",
    "Encryption",
    "EncryptionError",
    "Fault",
    "Ram",
    "Remote",
    "Save",
    "Store",
    "TierStatus",
    "continue_in_place",
]
