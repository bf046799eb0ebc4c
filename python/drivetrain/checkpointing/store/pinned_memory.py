"""Page-locks host memory in a thread, chunk by chunk, and returns it to the system once it is idle."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ...threads import Thread
from .errors import CheckpointError

CHUNK_BYTES = 64 << 20  # the driver holds its locks for as long as it locks a chunk
_LOCK_S = 60.0
_LOOK_S = 0.25


class PinnedMemory:
    """Memory that one snapshot uses at a time. torch's own would take powers of two, and never return them.

    Attributes:
        ends: Events after the last copies, by device.
        nbytes: The mapped bytes.
        locked_bytes: As many bytes from the beginning on are page-locked. Copies into the others block the host.
    """

    def __init__(self, nbytes: int, idle_s: float) -> None:
        self._pages: _C.HostPages | None = _C.HostPages(nbytes)
        self._address = self._pages.tensor().data_ptr()
        self.nbytes, self.locked_bytes = self._pages.size, 0
        self.ends: dict[torch.device, Any] = {}
        self._idle_s, self._idle_at = idle_s, time.monotonic() + idle_s
        self._changed = threading.Condition()
        self._is_lent = self._is_locking = self._is_refused = self._is_gone = False
        self._thread = Thread(self._run, "drivetrain-pinned")
        self._thread.start()

    def lend(self) -> Tensor | None:
        """Returns all bytes, and locks no more of them until they are given back; None if they have been returned.

        Raises:
            CheckpointError: The driver does not come to the end of a chunk.
        """
        with self._changed:
            if self._is_gone:
                return None
            self._is_lent = True
            if not self._changed.wait_for(lambda: not self._is_locking, _LOCK_S):
                raise CheckpointError(f"CUDA has not page-locked {CHUNK_BYTES >> 20} MiB within {_LOCK_S:g} s.")
            assert self._pages is not None
            return self._pages.tensor()

    def give_back(self, is_dropped: bool = False) -> None:
        """Locks the rest of the memory for the next snapshot. Dropped memory is returned after its last use instead."""
        with self._changed:
            self._is_lent = False
            self._idle_at = time.monotonic() + (0.0 if is_dropped else self._idle_s)
            self._changed.notify_all()

    def keep(self) -> bool:
        """Restarts the time of idleness. Returns False if the memory has been returned."""
        with self._changed:
            self._idle_at = time.monotonic() + self._idle_s
            return not self._is_gone

    def join(self, timeout: float) -> None:
        """Waits until dropped memory is returned."""
        self._thread.join(timeout)

    def pieces(self, place: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields targets and sources of copies that do not cross the end of a chunk, which CUDA refuses."""
        begin = place.data_ptr() - self._address
        end = begin + place.nbytes
        cuts = [cut for cut in range(0, self.locked_bytes + 1, CHUNK_BYTES) if begin < cut < end]
        cuts += [self.locked_bytes] if begin < self.locked_bytes < end and self.locked_bytes % CHUNK_BYTES else []
        if not cuts:
            yield place, source
            return
        flat = source.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        target = place.view(-1).view(torch.uint8)
        bounds = [0, *(cut - begin for cut in cuts), end - begin]
        for first, last in itertools.pairwise(bounds):
            yield target[first:last], flat[first:last]

    def _run(self) -> None:
        """Locks the memory, and returns it at its end; runs in the thread."""
        assert self._pages is not None
        while self._wants_chunk():
            is_locked = self._pages.lock(CHUNK_BYTES)
            with self._changed:
                self.locked_bytes = self._pages.locked_bytes
                self._is_locking, self._is_refused = False, not is_locked
                self._changed.notify_all()
        while self._is_used():
            time.sleep(_LOOK_S)
        self.ends.clear()
        self._pages = None  # unlocks and unmaps it

    def _wants_chunk(self) -> bool:
        """Waits until there is a chunk to lock; returns False once the memory is idle."""
        with self._changed:
            while True:
                left_s = self._idle_at - time.monotonic()
                if not self._is_lent and left_s <= 0:
                    self._is_gone = True
                    return False
                if not self._is_lent and not self._is_refused and self.locked_bytes < self.nbytes:
                    self._is_locking = True
                    return True
                self._changed.wait(None if self._is_lent else left_s)

    def _is_used(self) -> bool:
        """Returns whether a tensor keeps the memory, or the device has not come to the end of its copies."""
        assert self._pages is not None
        with contextlib.suppress(torch.AcceleratorError):  # the device has failed, and copies no more
            if not all(end.query() for end in self.ends.values()):
                return True
        return self._pages.has_tensors
