"""Passes short messages about a save between ranks, through the store of torch.distributed."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from ...processes import Process, has_ended, this_process
from .errors import CheckpointError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 50e-3
_PREFIX = "drivetrain/checkpoint"  # of all keys
_LOOK_S = 0.25  # between two looks whether the processes of other ranks have ended


class Coordinator:
    """Wraps a TCPStore, FileStore or HashStore. It polls, because a blocking call would block the store's other users.

    Args:
        store: The store that all ranks share.
        rank: This rank.
        world_size: Number of ranks.

    Every rank must construct its coordinators in the same order: a number in the keys separates them.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self._is_abandoned = threading.Event()
        self._store = store
        # A restart in place may reuse the store: keys of the last coordinator must not answer this one.
        self._prefix = f"{_PREFIX}/{store.add(f'{_PREFIX}/count/{rank}', 1)}/"
        store.set(f"{self._prefix}process/{rank}", json.dumps(this_process()))
        self._processes: dict[int, Process] = {}
        self._looked_at = time.monotonic()

    def tell(self, key: str, message: dict[str, Any]) -> None:
        """Publishes a message under a key."""
        self._call("set", key, json.dumps(message))

    def has(self, key: str) -> bool:
        """Returns whether a message was published under a key."""
        return bool(self._call("check", key))

    def abandon(self) -> None:
        """Ends all waits with an error: another rank has died."""
        self._is_abandoned.set()

    def ask(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        """Waits for the message under a key and returns it."""
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while True:
            if self.has(key):
                message: dict[str, Any] = json.loads(self._call("get", key))
                return message
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"rank {self.rank} waited {timeout_s:g} s for {what}, and it did not come. "
                    "Check whether that rank is alive, or raise `timeout`."
                )
            self.look(what)
            if self._is_abandoned.wait(pause):
                raise CheckpointError(f"rank {self.rank} does not wait for {what} any more: the training has ended.")
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def look(self, what: str) -> None:
        """Raises if a rank of this host has ended, which no save can complete without. Call it while waiting."""
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        for rank in set(range(self.world_size)) - {self.rank} - set(self._processes):
            if self.has(key := f"process/{rank}"):
                self._processes[rank] = json.loads(self._call("get", key))
        for rank, process in self._processes.items():
            if has_ended(process):
                raise CheckpointError(
                    f"rank {self.rank} does not wait for {what} any more: the process {process['pid']} of rank {rank} "
                    "has ended."
                )
        self._looked_at = time.monotonic()

    def forget(self, key: str) -> None:
        """Deletes the message under a key, if there is one, so that the store does not grow."""
        self._call("delete_key", key)

    def _call(self, method: str, key: str, *arguments: str) -> Any:
        key = self._prefix + key
        try:
            return getattr(self._store, method)([key] if method == "check" else key, *arguments)
        except Exception as error:  # c10d raises several types
            raise CheckpointError(
                f"rank {self.rank} cannot reach the store of torch.distributed for {key!r}: {error}. "
                "The process that hosts it may have ended."
            ) from error
