"""Stores checkpoints of tensors and JSON values in a directory, in the background and safe against crashes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ..._C import Slab
from ...frames import place_of
from ...threads import settle_on_device
from . import directory as disk
from .audit import AuditLog
from .commit import Writer, describe
from .coordinator import Coordinator
from .encryption import Encryption
from .errors import CheckpointError
from .identity import Origin
from .layout import check_tensors, step_name
from .manifest import JSON, copy_json
from .reading import Checkpoint, Survey, complete_checkpoints, survey
from .save import LONGEST_WAIT_S, Save

_logger = logging.getLogger("drivetrain")


class Store:
    """Keeps checkpoints in a directory.

    A save is complete or absent, whatever ends the process or the machine: the files are made durable before the
    folder gets its name. Only one job at a time may use a directory. Readers need no store: see `Checkpoint`.

    Args:
        directory: Folder of the checkpoints, which all ranks must see. It is made if it does not exist.
        rank: This rank. Rank 0 completes the checkpoints and deletes old ones.
        world_size: Number of ranks. Every rank saves the same steps in the same order.
        coordinator: Passes messages between ranks. None uses the default process group if `world_size` is not 1.
        keep: Number of checkpoints to keep; None keeps all. Older ones are deleted once a newer one is complete.
        timeout: Limit in seconds on every wait for a disk or for another rank.
        lock_timeout: Seconds to wait for a process that holds the directory, such as one that is being killed.
        encryption: Encrypts new checkpoints, and decrypts old ones; None writes plain files.
        audit: A file that gets a line of JSON for each save, load and deletion; None writes none.

    Raises:
        CheckpointError: Another process uses the directory.
        ValueError: An argument is out of range, or ranks have no coordinator.

    A directory that cannot be made or written raises no error here. Each save then fails with the reason.

    Attributes:
        directory: The directory.
        rank: This rank.
        world_size: Number of ranks.
        on_complete: Is called in the store's thread with the path of each complete checkpoint, on rank 0.
        is_held: Returns whether the checkpoint at a path must stay.
        origin: The run that the next checkpoints belong to.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        coordinator: Coordinator | None = None,
        keep: int | None = 3,
        timeout: float = LONGEST_WAIT_S,
        lock_timeout: float = 5.0,
        encryption: Encryption | None = None,
        audit: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 to world_size - 1, which is {world_size - 1}")
        if "://" in os.fspath(directory):
            raise ValueError(
                f"directory is {directory!r}, expected a folder of this host. Save into one, and pass "
                f"tiers=[Remote({directory!r})] to Checkpointer to upload each checkpoint"
            )
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1, or None to keep all")
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}, expected more than 0 seconds")
        if coordinator is None and world_size == 1:
            coordinator = Coordinator(HashStore(), 0, 1)
        elif coordinator is None:
            if not dist.is_initialized() or dist.get_world_size() != world_size:
                raise ValueError(
                    f"coordinator is None and world_size {world_size}: pass a Coordinator, or call "
                    "init_process_group() with as many ranks first"
                )
            coordinator = Coordinator(dist.distributed_c10d._get_default_store(), dist.get_rank(), world_size)
        if (coordinator.rank, coordinator.world_size) != (rank, world_size):
            raise ValueError(
                f"coordinator is of rank {coordinator.rank} of {coordinator.world_size}, "
                f"expected rank {rank} of {world_size}"
            )
        self.directory = Path(directory).absolute()
        self.rank = rank
        self.world_size = world_size
        self._keep = keep
        self._lock_timeout_s, self._timeout_s = lock_timeout, timeout
        self._encryption = encryption
        self._audit = None if audit is None else AuditLog(audit, rank)
        self._writer = Writer(self.directory, coordinator, timeout, encryption)
        self._coordinator = coordinator
        self.on_complete: Callable[[Path], None] = lambda _: None
        self.is_held: Callable[[Path], bool] = lambda _: False
        self.origin = Origin()
        self._announced = self._count = 0  # calls of `announce` and `save`
        self._slab = Slab()
        # The interpreter waits for its thread when it exits, so that the last save completes.
        self._executor = ThreadPoolExecutor(1, "drivetrain-checkpoint")
        self._thread: threading.Thread | None = None
        self._last: Save | None = None
        self._pending: list[Future[None]] = []  # the last save with all that follows it
        self._is_closed = False
        self._lock: disk.Lock | None = None
        self._identity: tuple[int, int] | None = None
        try:
            disk.make_folders(self.directory)
            self._prepare()
        except OSError as error:
            _logger.warning("checkpoints cannot be written to %s: %s", self.directory, describe(error))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that hold snapshots: as many as this rank's largest save took so far."""
        return self._slab.nbytes

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: JSON,
        *,
        ready: Callable[[float], None] | None = None,
    ) -> Save:
        """Starts to save and returns at once. A save that is still being written delays the copies of the next one.

        Args:
            step: At least 0, and the same on every rank. A checkpoint of the same step is replaced.
            tensors: CPU tensors by name. They must not change until `Save.wait_copied` returns.
            state: Anything that JSON represents. It is copied before this returns.
            ready: Is called with `timeout` in the thread that saves, and returns once the tensors have their values.
                The copy begins then. An error that it raises makes the save fail.

        Raises:
            TypeError: `tensors` or `state` has a member of another type; the message names it.
            ValueError: `step` is negative, or a tensor is not on the CPU.
            CheckpointError: The store is closed.
        """
        if self._is_closed:
            raise CheckpointError(f"the store of {self.directory} is closed: open a new one")
        index, self._count = self._count, self._count + 1
        try:
            if step < 0:
                raise ValueError(f"step is {step}, expected at least 0")
            check_tensors(tensors)
            save = Save(self, step, tensors, copy_json(state), ready)
        except (TypeError, ValueError) as error:
            self._writer.refuse(index, step, CheckpointError(str(error)))
            raise
        if ready is None and (self._last is None or self._last.done()):
            save._begin_copy(self._slab)
        self._last, self._pending = save, [self._executor.submit(self._run, index, save)]
        return save

    def checkpoints(self) -> list[Checkpoint]:
        """Returns the complete checkpoints whose metadata holds, oldest first.

        Raises:
            CheckpointError: The directory cannot be read.
            EncryptionError: The key of the newest one is missing, or it is plain although it must not be.
        """
        return complete_checkpoints(self.directory, self._encryption, self._audit)

    def survey(self) -> Survey:
        """Returns the complete checkpoints and the errors of damaged ones; raises what `checkpoints` raises."""
        return survey(self.directory, self._encryption, self._audit)

    def latest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint whose metadata holds; None if there is none.

        The log says why newer ones are passed over. `Checkpoint.load` verifies the tensors.

        Raises:
            CheckpointError: The directory cannot be read.
        """
        complete = self.checkpoints()
        return complete[-1] if complete else None

    def close(self, timeout: float = LONGEST_WAIT_S) -> None:
        """Waits until all saves have ended, and lets another process use the directory.

        Raises:
            CheckpointError: A save did not end in time. The directory stays locked.
        """
        self._is_closed = True
        if wait(self._pending, timeout).not_done:
            raise CheckpointError(
                f"{self.directory}: a save was not complete within {timeout:g} s: it is still being written"
                f"{self._progress()}"
            )
        self._executor.shutdown()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def abandon(self) -> None:
        """Makes saves in progress fail instead of waiting for other ranks, which may have died."""
        self._coordinator.abandon()

    def announce(self, call: str) -> Callable[[], str | None]:
        """Notes that this rank makes a call that all ranks must make.

        Returns:
            A function whose text names the ranks that have not made it; it returns None if all have.
        """
        coordinator, self._announced = self._coordinator, self._announced + 1
        coordinator.tell(f"announced/{self._announced}/{self.rank}", {})
        coordinator.forget(f"announced/{self._announced - 2}/{self.rank}")
        keys = {rank: f"announced/{self._announced}/{rank}" for rank in range(self.world_size)}

        def describe() -> str | None:
            absent = ", ".join(str(rank) for rank, key in keys.items() if not coordinator.has(key))
            text = (
                f"rank {self.rank} waits in Checkpointer.{call} for ranks that have not called it: {absent}. Every "
                "rank must call it: remove a condition such as `if rank == 0` before it."
            )
            return text if absent else None

        return describe

    def _run(self, index: int, save: Save) -> None:
        """Writes a save, and deletes old ones; runs in the store's thread."""
        self._thread, path, error = threading.current_thread(), None, None
        settle_on_device()
        try:
            path = self._write(index, save)
        except BaseException as caught:
            error = caught
        if self._audit is not None:
            place, result = path or self.directory / step_name(save.step), "ok" if error is None else str(error)
            self._audit.append("save", place, save.step, save.nbytes, save._key_id, result)
        if path is not None and self.rank == 0:
            self.on_complete(path)
        save._end(path, error)
        if path is not None and self.rank == 0:
            self._delete_old()

    def _write(self, index: int, save: Save) -> Path:
        try:
            try:
                if not save._copy_began.is_set():
                    if save._ready is not None:
                        save._ready(self._timeout_s)
                    save._begin_copy(self._slab)
                if save._snapshot is None:
                    assert save._error is not None
                    raise save._error
                self._prepare()
            except Exception as error:
                self._writer.refuse(index, save.step, error)
                raise
            return self._writer.write(index, save, self.origin)
        except Exception as error:
            raise CheckpointError(
                f"step {save.step} was not saved to {self.directory}: {describe(error)} Older checkpoints are unharmed."
            ) from (error.__cause__ if isinstance(error, CheckpointError) else error)

    def _progress(self) -> str:
        """Returns where the writing thread is, for the message of a wait that took too long."""
        thread = self._thread
        return "" if thread is None else f"; the thread that writes is at {place_of(thread)}"

    def _prepare(self) -> None:
        """Locks the directory on rank 0 if it is not locked, or if another one was mounted in its place."""
        found = self.directory.stat()
        identity = (found.st_dev, found.st_ino)
        if self.rank != 0 or (self._lock is not None and identity == self._identity):
            return
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._lock = disk.Lock(self.directory, self._lock_timeout_s)
        self._identity = identity
        for folder in disk.leftovers(self.directory):
            self._remove(folder)

    def _delete_old(self) -> None:
        if self._keep is None:
            return
        try:
            # Checkpoints whose keys were dropped are old as well.
            for checkpoint in complete_checkpoints(self.directory)[: -self._keep]:
                if self.is_held(checkpoint.path):
                    continue
                self._remove(disk.retire(checkpoint.path))
                if self._audit is not None:
                    self._audit.append("delete", checkpoint.path, checkpoint.step, checkpoint.nbytes, checkpoint.key_id)
        except (CheckpointError, OSError) as error:
            _logger.warning("an old checkpoint in %s was not deleted: %s", self.directory, error)

    def _remove(self, folder: Path) -> None:
        try:
            disk.remove_files(folder)
        except OSError as error:
            _logger.warning("%s was not deleted: %s", folder, describe(error))
