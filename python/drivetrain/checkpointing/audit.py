"""Appends a line of JSON to an audit log for each save, load and deletion of a checkpoint."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import getpass
import json
import logging
import os
import socket
from pathlib import Path

_logger = logging.getLogger("drivetrain")
AUDIT = "audit.jsonl"


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
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                with contextlib.suppress(OSError):  # appends of one host need no lock, and some mounts have none
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.write(descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            _logger.warning("the audit log %s was not written: %s", self.path, error.strerror)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return str(os.getuid())
