"""Appends a line of JSON to an audit log for each save, load and deletion of a checkpoint."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
from pathlib import Path

from .directory import take_lock, unlock_and_close, user_name

_logger = logging.getLogger("drivetrain")
AUDIT = "audit.jsonl"
_LOCK_S = 1.0  # limit of the wait for another process's line


class AuditLog:
    """Appends to a file that several processes may share; each line has the number of this rank."""

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self._path, self._rank = Path(path).absolute(), rank

    def append(
        self, action: str, checkpoint: Path | str, step: int, nbytes: int, key_id: str | None, result: str = "ok"
    ) -> None:
        """Appends a durable line about bytes that this rank has saved, loaded or deleted, with "ok" or the error.

        A log that cannot be written gives a warning, and the training goes on.
        """
        line = {
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
            "action": action,
            "checkpoint": os.fspath(checkpoint),
            "step": step,
            "rank": self._rank,
            "user": user_name(os.getuid()),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "bytes": nbytes,
            "key_id": key_id,
            "result": result,
        }
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                # Appends over NFS need the lock. A child of a rank that was killed while it appended may keep it.
                take_lock(descriptor, _LOCK_S)
                os.write(descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
                os.fsync(descriptor)
            finally:
                unlock_and_close(descriptor)
        except OSError as error:
            _logger.warning("the audit log %s was not written: %s", self._path, error.strerror)
