"""Appends a line of JSON to an audit log for each save, load and deletion of a checkpoint."""

from __future__ import annotations

import datetime
import errno
import fcntl
import getpass
import json
import logging
import os
import socket
import time
from pathlib import Path

from .directory import unlock_and_close

_logger = logging.getLogger("drivetrain")
AUDIT = "audit.jsonl"
_LOCK_S = 1.0  # limit of the wait for another process's line


class AuditLog:
    """Appends to a file that several processes may share. A line is durable once `append` returns.

    Args:
        path: The file; it is made if it does not exist.
        rank: This rank, for the lines.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.path = Path(path).absolute()
        self._rank = rank

    def append(
        self, action: str, checkpoint: Path | str, step: int, nbytes: int, key_id: str | None, result: str = "ok"
    ) -> None:
        """Appends one line. A log that cannot be written gives a warning, and the training goes on.

        Args:
            action: Such as "save", "load" or "delete".
            checkpoint: Folder of the checkpoint.
            step: Its step.
            nbytes: Bytes of tensor files that this rank has written, read or deleted.
            key_id: Identifier of the key that encrypts it; None if it is plain.
            result: "ok", or the error.
        """
        line = {
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
            "action": action,
            "checkpoint": os.fspath(checkpoint),
            "step": step,
            "rank": self._rank,
            "user": _user(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "bytes": nbytes,
            "key_id": key_id,
            "result": result,
        }
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                _lock(descriptor)
                os.write(descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
                os.fsync(descriptor)
            finally:
                unlock_and_close(descriptor)
        except OSError as error:
            _logger.warning("the audit log %s was not written: %s", self.path, error.strerror)


def _lock(descriptor: int) -> None:
    """Locks the log, which appends over NFS need. One that stays locked is appended to without the lock."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            # A child that was forked by a rank which was killed while it appended may hold the lock until it ends.
            if error.errno != errno.EWOULDBLOCK or time.monotonic() >= deadline:
                return
        time.sleep(0.01)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return str(os.getuid())
