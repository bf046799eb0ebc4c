"""Makes changes of a checkpoint directory durable, locks it, and removes what crashed saves left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import pwd
import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from ..._C import exchange_paths
from .errors import CheckpointError
from .layout import LEFTOVER, LOCK, is_known, step_of, temporary_name

_logger = logging.getLogger("drivetrain")
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # by another process
_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def user_name(uid: int) -> str:
    """Returns a user's name, or the number of one without a name, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def take_lock(descriptor: int, timeout_s: float) -> OSError | None:
    """Waits for a file's lock. Returns None once this process has it, and otherwise why not."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD or time.monotonic() >= deadline:
                return error
        else:
            return None
        time.sleep(0.02)


def unlock_and_close(descriptor: int) -> None:
    """Releases a file's lock and closes it. To close alone would leave the lock to children forked meanwhile."""
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Makes the contents of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Makes a folder with its parents, all durable."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):  # another rank was faster
        folder.mkdir()
    sync(folder.parent)


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file and makes its contents durable; its name is durable after `sync`.

    The umask and the folder decide about the access of others, here and in all other files of a checkpoint.
    """
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def replace_note(path: Path, content: Mapping[str, object]) -> None:
    """Writes a small file next to the checkpoints in one step, durably. A disk that refuses gives a warning."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a colleague's process may have left it
        write_file(temporary, json.dumps(content, indent=1).encode())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        _logger.warning("%s was not written: %s", path, error)


def publish(temporary: Path, final: Path) -> None:
    """Gives a complete folder its name, in one step and durably. An older checkpoint of that step is replaced."""
    if final.exists():
        # After the exchange, the temporary name holds the old checkpoint, and whatever removes leftovers removes it.
        if not exchange_paths(os.fspath(temporary), os.fspath(final)):
            retire(final)
            temporary.rename(final)
    else:
        temporary.rename(final)
    sync(final.parent)
    if temporary.exists():
        remove_files(temporary)


def retire(final: Path) -> Path:
    """Renames a checkpoint so that it is none anymore, durably, before its files are deleted one by one."""
    trash = final.with_name(temporary_name(step_of(final.name) or 0, "trash"))
    final.rename(trash)
    sync(final.parent)
    return trash


def remove_files(folder: Path) -> bool:
    """Deletes a leftover, and returns True. Returns False for a folder with foreign files, of which all is kept."""
    entries = sorted(folder.iterdir())
    strange = [entry.name for entry in entries if entry.is_symlink() or not entry.is_file() or not is_known(entry.name)]
    if strange:
        _logger.warning("%s is kept, because it holds files that no checkpoint has: %s", folder, ", ".join(strange))
        return False
    for entry in entries:
        entry.unlink()
    folder.rmdir()
    return True


def leftovers(directory: Path) -> list[Path]:
    """Returns the folders of saves that did not finish and of checkpoints whose deletion did not."""
    return sorted(
        entry
        for entry in directory.iterdir()
        if LEFTOVER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    )


class Lock:
    """Holds a directory for one process with flock. The kernel releases it when the process ends, however it ends.

    It waits up to `timeout_s`, as a process that is being killed may hold the directory, and then raises a
    CheckpointError. An OSError says that the lock file cannot be made.
    """

    def __init__(self, directory: Path, timeout_s: float = 0) -> None:
        path = directory / LOCK
        self._pid = os.getpid()
        self._descriptor = -1  # for __del__, if open() raises
        _locks.add(self)  # before the lock is taken: another thread may fork at any time
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(path, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            unlock_and_close(descriptor) if os.getpid() == self._pid else os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _take(self, path: Path, timeout_s: float) -> None:
        if (error := take_lock(self._descriptor, timeout_s)) is not None:
            if error.errno in _HELD:
                raise CheckpointError(
                    f"{path.parent} is in use by {self._holder()}: give each run its own directory, or end that run."
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise error
            _logger.warning("%s cannot be locked (%s): use it from one job only", path.parent, error.strerror)
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _holder(self) -> str:
        try:
            holder = json.loads(os.pread(self._descriptor, 4096, 0))
            return f"process {holder['pid']} of host {holder['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"


def _release_in_child() -> None:
    """Closes inherited locks: a worker that outlives its parent must not hold the directory."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_release_in_child)
