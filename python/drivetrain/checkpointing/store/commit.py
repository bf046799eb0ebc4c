"""Writes one save: this rank's file and record, and on rank 0 the manifest that completes the checkpoint."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..._C import Snapshot, crc32c
from . import directory as disk
from .coordinator import Coordinator
from .encryption import TAG_BYTES, Encryption, FileCipher
from .errors import CheckpointError
from .identity import Origin
from .layout import CHUNK_BYTES, MANIFEST, part_name, step_name, temporary_name
from .manifest import Manifest, RankFiles, Record, hexadecimal, seal
from .reading import manifests
from .save import Save

_logger = logging.getLogger("drivetrain")
_VISIBLE_S = 30.0  # a network file system may show a new name late
_READ_S = 5.0  # ranks look for the end of a save every 50 ms

_ADVICE = {
    errno.ENOSPC: "Free space or lower `keep`.",
    errno.EDQUOT: "Raise the quota or lower `keep`.",
    errno.EROFS: "Remount the file system writable or choose another directory.",
    errno.EACCES: "Give this user write permission or choose another directory.",
    errno.EPERM: "Give this user write permission or choose another directory.",
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`).",
    errno.ENOENT: "The directory has vanished: check whether it is still mounted.",
    errno.ESTALE: "The directory has vanished: check whether it is still mounted.",
    errno.ENOTCONN: "The directory has vanished: check whether it is still mounted.",
    errno.EIO: "The disk reported an error: check its health, and run `drivetrain ckpt verify`.",
}


@dataclass(eq=False)
class Writer:
    """Writes saves of one rank into a directory. All ranks write the same saves in the same order.

    `timeout_s` is the limit on every wait.
    """

    directory: Path
    coordinator: Coordinator
    timeout_s: float
    encryption: Encryption | None
    _old_keys: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.world_size = self.coordinator.rank, self.coordinator.world_size

    def write(self, index: int, save: Save, origin: Origin) -> Path:
        """Writes save number `index` of a run and waits until it is complete on all ranks. Returns its folder.

        Raises the errors of this rank as they come, and a CheckpointError if another one has failed.
        """
        return self._lead(index, save, origin) if self.rank == 0 else self._follow(index, save)

    def refuse(self, index: int, step: int, error: Exception) -> None:
        """Tells the other ranks that this one cannot take part in save number `index`."""
        self._tell_failure(f"{index}/begin" if self.rank == 0 else f"{index}/part/{self.rank}", step, error)

    def _lead(self, index: int, save: Save, origin: Origin) -> Path:
        final = self.directory / step_name(save.step)
        temporary = self.directory / temporary_name(save.step)
        key = f"{index}/begin"
        try:
            temporary.mkdir()
            checkpoint = secrets.token_hex(16)  # identifies the checkpoint in encrypted files
            begin = {"folder": temporary.name, "host": socket.gethostname(), "checkpoint": checkpoint}
            self.coordinator.tell(key, {"step": save.step, **begin})
            key = f"{index}/end"
            parts = [self._write_part(save, temporary, checkpoint), *self._gather(index, save.step, temporary)]
            cipher = None if self.encryption is None else self.encryption.new_cipher(MANIFEST)
            protection = None if cipher is None else cipher.protection
            serial = max((manifest.serial for manifest in manifests(self.directory)), default=0) + 1
            about = (save.step, self.world_size, time.time())
            manifest = Manifest(serial, *about, parts, checkpoint, protection, *origin)
            disk.write_file(temporary / MANIFEST, seal(manifest, cipher))
            disk.sync(temporary)
            disk.publish(temporary, final)
        except BaseException as error:
            self._discard(temporary, save)
            self._tell_failure(key, save.step, error)
            raise
        self.coordinator.tell(key, {"step": save.step, "folder": final.name})
        self._await_readers(index)
        return final

    def _await_readers(self, index: int) -> None:
        """Waits until the other ranks know that a save is complete.

        This process may host the store and end right after its last save. Ranks that had not read the end of that save
        would then report it as failed. A rank that does not answer is no error: the checkpoint is complete.
        """
        deadline = time.monotonic() + min(_READ_S, self.timeout_s)
        with contextlib.suppress(CheckpointError):
            for rank in range(1, self.world_size):
                left = max(0.0, deadline - time.monotonic())
                self.coordinator.ask(f"{index}/read/{rank}", left, f"rank {rank} to learn that the save is complete")

    def _follow(self, index: int, save: Save) -> Path:
        temporary: Path | None = None
        key, is_told = f"{index}/part/{self.rank}", False
        try:
            begin = self._ask(f"{index}/begin", save.step, "rank 0 to begin the save")
            temporary = self.directory / begin["folder"]
            self._await_visible(temporary, f"rank 0 on host {begin['host']} made")
            part = self._write_part(save, temporary, begin["checkpoint"])
            is_told = True  # From here on rank 0 may complete the checkpoint at any time, and needs the files.
            self.coordinator.tell(key, {"step": save.step, "host": socket.gethostname(), **vars(part)})
            key = ""
            end = self._ask(f"{index}/end", save.step, "rank 0 to complete the checkpoint")
        except BaseException as error:
            if temporary is not None and not is_told:
                self._discard(temporary, save)
            if key:
                self._tell_failure(key, save.step, error)
            raise
        with contextlib.suppress(CheckpointError):  # rank 0 does not need the answer, and the checkpoint is complete
            self.coordinator.tell(f"{index}/read/{self.rank}", {"step": save.step})
        final: Path = self.directory / end["folder"]
        return final

    def _write_part(self, save: Save, folder: Path, checkpoint: str) -> RankFiles:
        snapshot = save._snapshot
        assert snapshot is not None
        name, record_name = (part_name(self.rank, self.world_size, suffix) for suffix in ("safetensors", "json"))
        cipher = None if self.encryption is None else self.encryption.new_cipher(name)
        snapshot.write(os.fspath(folder / name))
        save._key_id = None if cipher is None else cipher.protection.key_id
        tags = [] if cipher is None else self._encrypt(snapshot, cipher, checkpoint)
        if not snapshot.wait_written(self.timeout_s):
            raise CheckpointError(
                f"{folder / name} was not written within {self.timeout_s:g} s: the disk is slow or does not answer. "
                "Check it, or raise `timeout`."
            )
        save.write_s = time.monotonic() - save._began
        record = Record(
            step=save.step,
            rank=self.rank,
            world_size=self.world_size,
            file=name,
            file_bytes=snapshot.nbytes,
            header_bytes=len(save._header),
            header_crc32c=hexadecimal(crc32c(save._header)) if cipher is None else "",
            chunk_bytes=CHUNK_BYTES,
            chunks=[hexadecimal(checksum) for checksum in snapshot.checksums()],
            state=save._state if cipher is None else None,
            checkpoint=checkpoint,
            tags=tags,
            protection=None if cipher is None else cipher.protection,
        )
        secret = {} if cipher is None else {"state": save._state, "header": base64.b64encode(save._header).decode()}
        data = seal(record, cipher, json.dumps(secret).encode())
        disk.write_file(folder / record_name, data)
        # Python has made the record under the umask and the rules of the folder; the tensors get its mode.
        mode, wanted = (stat.S_IMODE((folder / one).stat().st_mode) for one in (name, record_name))
        if mode != wanted:
            (folder / name).chmod(wanted)
        disk.sync(folder)
        return RankFiles(record_name, len(data), hexadecimal(crc32c(data)), name, snapshot.nbytes)

    def _encrypt(self, snapshot: Snapshot, cipher: FileCipher, checkpoint: str) -> list[str]:
        """Encrypts each chunk once it is copied, and returns the tags. Stops early if the snapshot fails."""
        deadline = time.monotonic() + self.timeout_s
        sealed = torch.empty(CHUNK_BYTES + TAG_BYTES, dtype=torch.uint8, device="cpu")
        tags = []
        for index in range(snapshot.num_chunks):
            chunk = snapshot.chunk(index, max(0.0, deadline - time.monotonic()))
            if chunk is None:
                break  # waiting for the written file tells why
            tags.append(cipher.seal_chunk(checkpoint, index, snapshot.nbytes, chunk, sealed))
            snapshot.replace_chunk(index, sealed)
        return tags

    def _gather(self, index: int, step: int, folder: Path) -> Iterator[RankFiles]:
        """Yields the parts of the other ranks, after a look at their files, which proves a shared file system."""
        for rank in range(1, self.world_size):
            message = self._ask(f"{index}/part/{rank}", step, f"rank {rank} to write its part")
            host = message.pop("host")
            del message["step"]
            part = RankFiles(**message)
            self._await_visible(folder / part.record, f"rank {rank} on host {host} made")
            self._await_visible(folder / part.file, f"rank {rank} on host {host} made")
            found = (folder / part.record).read_bytes(), (folder / part.file).stat().st_size
            if (hexadecimal(crc32c(found[0])), found[1]) != (part.record_crc32c, part.file_bytes):
                raise CheckpointError(
                    f"{folder / part.record} or its tensors differ from what rank {rank} on host {host} wrote: "
                    "the ranks do not share one file system, or it lost data."
                )
            yield part
        for key in self._old_keys:
            self.coordinator.forget(key)
        sent = [f"{index}/{what}/{rank}" for what in ("part", "read") for rank in range(1, self.world_size)]
        self._old_keys = [f"{index}/begin", f"{index}/end", *sent]

    def _await_visible(self, path: Path, made_by: str) -> None:
        deadline = time.monotonic() + min(_VISIBLE_S, self.timeout_s)
        while not path.exists():
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"rank {self.rank} on host {socket.gethostname()} does not see {path}, which {made_by}: the ranks "
                    "do not share this file system. Choose a directory that all hosts mount."
                )
            self.coordinator.look(f"{path}, which {made_by}")
            time.sleep(0.02)

    def _tell_failure(self, key: str, step: int, error: BaseException) -> None:
        """Tells the other ranks why they wait in vain. A store that fails as well must not hide the first error."""
        try:
            self.coordinator.tell(key, {"step": step, "error": f"rank {self.rank}: {describe(error)}"})
        except CheckpointError as other:
            _logger.warning("the other ranks were not notified of a failed save: %s", other)

    def _ask(self, key: str, step: int, what: str) -> dict[str, Any]:
        message = self.coordinator.ask(key, self.timeout_s, what)
        if message["step"] != step:
            raise CheckpointError(
                f"rank {self.rank} saves step {step} while another rank saves step {message['step']}: "
                "call save() with the same step on every rank."
            )
        if "error" in message:
            raise CheckpointError(message["error"])
        return message

    def _discard(self, temporary: Path, save: Save) -> None:
        """Removes what a failed save has written, as far as the disk lets it; the next start tries again."""
        try:
            if self.rank == 0:
                disk.remove_files(temporary)
                return
            for suffix in ("safetensors", "json"):
                (temporary / part_name(self.rank, self.world_size, suffix)).unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError as error:
            _logger.warning("%s of the failed save of step %d is left: %s", temporary, save.step, error)


def describe(error: BaseException) -> str:
    """Returns a sentence about an error, with advice where its error number tells some."""
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{error.filename}: " if error.filename else ""
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{place}{error.strerror} ({name}). {_ADVICE.get(error.errno, '')}".strip()
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {str(error).rstrip('.')}."
