"""Follows one save: when its tensors may change again, and whether it has succeeded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..._C import Slab, Snapshot
from .errors import CheckpointError
from .layout import encode_header
from .manifest import JSON
from .reading import Checkpoint

if TYPE_CHECKING:
    from .store import Store

LONGEST_WAIT_S = 600.0
_RELEASE_S = 5.0  # a write that takes longer keeps the memory, and the next save says so


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a new safetensors file and waits until its contents are durable."""
    header, ordered = encode_header(tensors)
    snapshot = Snapshot(Slab(), header, ordered)
    snapshot.write(str(path))
    if not snapshot.wait_written(LONGEST_WAIT_S):
        raise CheckpointError(f"{path} was not written within {LONGEST_WAIT_S:g} s: the disk is slow. Check it.")


class Save:
    """A save that copies and writes in the background.

    Attributes:
        step: The step that is saved.
        nbytes: Bytes of this rank's file, header included.
        copy_s: Seconds from `Store.save` until the last tensor was copied; None before.
        write_s: Seconds from `Store.save` until this rank's file was durable; None before.
    """

    def __init__(
        self,
        store: Store,
        step: int,
        tensors: Mapping[str, Tensor],
        state: JSON,
        ready: Callable[[float], None] | None,
    ) -> None:
        self.step = step
        self.write_s: float | None = None
        self._began = time.monotonic()
        self._store, self._state = store, state
        self._header, self._tensors = encode_header(tensors)  # in the order of their data, until they are copied
        self.nbytes = len(self._header) + sum(tensor.nbytes for tensor in self._tensors)
        self._snapshot: Snapshot | None = None
        self._copy_began, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._key_id: str | None = None  # of the key that encrypts
        self._path: Path | None = None
        self._checkpoint: Checkpoint | None = None
        self._ready = ready  # waits until the tensors have their values

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "in progress"
        return f"<Save of step {self.step}: {state}>"

    @property
    def copy_s(self) -> float | None:
        """Seconds from `Store.save` until the last tensor was copied; None before."""
        return self._snapshot.copy_seconds if self._snapshot else None

    def wait_copied(self, timeout: float = LONGEST_WAIT_S) -> None:
        """Waits until the tensors may change again.

        Args:
            timeout: Seconds to wait.

        Raises:
            CheckpointError: They were not copied in time.
        """
        deadline = time.monotonic() + timeout
        began = self._copy_began.wait(timeout)
        if self._snapshot is not None:
            began = self._snapshot.wait_copied(max(0.0, deadline - time.monotonic()))
        if not began:
            raise CheckpointError(
                f"step {self.step} was not copied within {timeout:g} s: an earlier save still holds the memory, "
                f"or the machine is overloaded{self._store._progress()}. Save less often, or raise `timeout`."
            )

    def done(self) -> bool:
        """Returns whether the save has succeeded or failed."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Returns why the save failed; None if it succeeded or is in progress."""
        return self._error

    def result(self, timeout: float = LONGEST_WAIT_S) -> Checkpoint:
        """Waits until the checkpoint is complete and durable on every rank, and returns it.

        Args:
            timeout: Seconds to wait.

        Raises:
            CheckpointError: The save failed, and the message says why; or it did not end in time.
        """
        if not self._ended.wait(timeout):
            raise CheckpointError(
                f"step {self.step} was not saved within {timeout:g} s: it is still being written"
                f"{self._store._progress()}"
            )
        if self._error is not None:
            raise self._error
        assert self._path is not None
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self._path, self._store._encryption, self._store._audit)
        return self._checkpoint

    # The store calls the rest.

    def _begin_copy(self, slab: Slab) -> None:
        encrypts = self._store._encryption is not None
        try:
            self._snapshot = Snapshot(slab, self._header, self._tensors, replaces_chunks=encrypts)
        except (MemoryError, OSError, RuntimeError) as error:
            self._error = error
        self._tensors = []  # the snapshot keeps each tensor until it is copied
        self._copy_began.set()

    def _end(self, path: Path | None, error: BaseException | None) -> None:
        self._path, self._error = path, error
        if error is not None and self._snapshot is not None:
            self._snapshot.abandon()
            self._snapshot.wait_released(_RELEASE_S)  # the next save needs the memory
        self._tensors, self._ready = [], None  # both keep the memory of copies
        self._copy_began.set()
        self._ended.set()
