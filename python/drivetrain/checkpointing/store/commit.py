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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..._C import Snapshot, crc32c
from . import directory as disk
from .access import share
from .coordinator import Coordinator
from .encryption import TAG_BYTES, Encryption, FileCipher
from .errors import CheckpointError
from .identity import Origin
from .layout import CHUNK_BYTES, MANIFEST, part_name, step_name, temporary_name
from .manifest import Manifest, RankFiles, Record, hexadecimal, seal
from .save import NICE, Save

_logger = logging.getLogger("drivetrain")
_VISIBLE_S = 30.0  # a network file system may show a new name late
_READ_S = 5.0  # ranks look for the end of a save every 50 ms
_WRITE_THREADS = 2

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

    Args:
        directory: The directory.
        rank: This rank.
        world_size: Number of ranks.
        coordinator: Passes messages between ranks; None for one rank.
        timeout_s: Limit on every wait.
        encryption: The keys that encrypt; None writes plain files.
        next_serial: Returns the serial of the next checkpoint. Only rank 0 calls it.
        origin: The run that the next checkpoints belong to.
    """

    directory: Path
    rank: int
    world_size: int
    coordinator: Coordinator | None
    timeout_s: float
    encryption: Encryption | None
    next_serial: Callable[[], int]
    origin: Origin = field(default_factory=Origin)
    _old_keys: list[str] = field(default_factory=list)

    def write(self, index: int, save: Save) -> Path:
        """Writes save number `index` and waits until it is complete on all ranks. Returns the checkpoint's folder.

        Raises:
            CheckpointError: Any rank failed. Errors of this one are as they came: see `explained`.
        """
        return self._lead(index, save) if self.rank == 0 else self._follow(index, save)

    def refuse(self, index: int, step: int, error: Exception) -> None:
        """Tells the other ranks that this one cannot take part in save number `index`."""
        self._tell_failure(f"{index}/begin" if self.rank == 0 else f"{index}/part/{self.rank}", step, error)

    def _lead(self, index: int, save: Save) -> Path:
        final = self.directory / step_name(save.step)
        temporary = self.directory / temporary_name(save.step)
        key = f"{index}/begin"
        try:
            temporary.mkdir()
            begin = {"step": save.step, "folder": temporary.name, "host": socket.gethostname()}
            checkpoint = secrets.token_hex(16)  # identifies the checkpoint in encrypted files
            self._tell(key, {**begin, "checkpoint": checkpoint})
            key = f"{index}/end"
            parts = [self._write_part(save, temporary, checkpoint), *self._gather(index, save.step, temporary)]
            cipher = self._new_cipher(MANIFEST)
            manifest = Manifest(
                self.next_serial(),
                save.step,
                self.world_size,
                time.time(),
                parts,
                checkpoint,
                None if cipher is None else cipher.protection,
                *self.origin,
            )
            disk.write_file(temporary / MANIFEST, seal(manifest, cipher))
            disk.sync_folder(temporary)
            disk.publish(temporary, final)
        except BaseException as error:
            self._discard(temporary, save)
            self._tell_failure(key, save.step, error)
            raise
        self._tell(key, {"step": save.step, "folder": final.name})
        self._await_readers(index)
        return final

    def _await_readers(self, index: int) -> None:
        """Waits until the other ranks know that a save is complete.

        This process may host the store and end right after its last save. Ranks that had not read the end of that save
        would then report it as failed. A rank that does not answer is no error: the checkpoint is complete.
        """
        if self.coordinator is None:
            return
        deadline = time.monotonic() + min(_READ_S, self.timeout_s)
        with contextlib.suppress(CheckpointError):
            for rank in range(1, self.world_size):
                left = max(0.0, deadline - time.monotonic())
                self.coordinator.ask(f"{index}/read/{rank}", left, f"rank {rank} to learn that the save is complete")

    def _follow(self, index: int, save: Save) -> Path:
        temporary: Path | None = None
        key = f"{index}/part/{self.rank}"
        try:
            begin = self._ask(f"{index}/begin", save.step, "rank 0 to begin the save")
            temporary = self.directory / begin["folder"]
            self._await_visible(temporary, f"rank 0 on host {begin['host']} made")
            part = self._write_part(save, temporary, begin["checkpoint"])
            self._tell(key, {"step": save.step, "host": socket.gethostname(), **vars(part)})
            key = ""
            end = self._ask(f"{index}/end", save.step, "rank 0 to complete the checkpoint")
        except BaseException as error:
            if temporary is not None:
                self._discard(temporary, save)
            if key:
                self._tell_failure(key, save.step, error)
            raise
        with contextlib.suppress(CheckpointError):  # rank 0 does not need the answer, and the checkpoint is complete
            self._tell(f"{index}/read/{self.rank}", {"step": save.step})
        final: Path = self.directory / end["folder"]
        return final

    def _write_part(self, save: Save, folder: Path, checkpoint: str) -> RankFiles:
        snapshot = save._snapshot
        assert snapshot is not None
        name = part_name(self.rank, self.world_size, "safetensors")
        cipher = self._new_cipher(name)
        snapshot.write(os.fspath(folder / name), True, _WRITE_THREADS, NICE)
        save._key_id = None if cipher is None else cipher.protection.key_id
        tags = [] if cipher is None else self._encrypt(snapshot, cipher, checkpoint)
        if not snapshot.wait_written(self.timeout_s):
            raise CheckpointError(
                f"{folder / name} was not written within {self.timeout_s:g} s: the disk is slow or does not answer. "
                "Check it, or raise `timeout`."
            )
        save.write_s = time.monotonic() - save._began
        record = self._record(save, snapshot, name)
        if cipher is None:
            data = seal(record)
        else:
            secret = {"state": save._state, "header": base64.b64encode(save._header).decode()}
            hidden = replace(record, checkpoint=checkpoint, tags=tags, protection=cipher.protection)
            hidden = replace(hidden, state=None, header_crc32c="")
            data = seal(hidden, cipher, json.dumps(secret).encode())
        record_name = part_name(self.rank, self.world_size, "json")
        disk.write_file(folder / record_name, data)
        share(folder / name, folder / record_name)
        disk.sync_folder(folder)
        return RankFiles(record_name, len(data), hexadecimal(crc32c(data)), name, snapshot.nbytes)

    def _new_cipher(self, file: str) -> FileCipher | None:
        return None if self.encryption is None else FileCipher.new(self.encryption, file)

    def _encrypt(self, snapshot: Snapshot, cipher: FileCipher, checkpoint: str) -> list[str]:
        """Encrypts each chunk once it is copied, and returns the tags. Stops early if the snapshot fails."""
        deadline = time.monotonic() + self.timeout_s
        sealed = torch.empty(CHUNK_BYTES + TAG_BYTES, dtype=torch.uint8, device="cpu")
        tags = []
        for index in range(snapshot.num_chunks):
            chunk = snapshot.chunk(index, max(0.0, deadline - time.monotonic()))
            if chunk is None:
                break  # waiting for the written file tells why
            tags.append(cipher.seal_chunk(index, cipher.place(checkpoint, index, snapshot.nbytes), chunk, sealed))
            snapshot.replace_chunk(index, sealed)
        return tags

    def _record(self, save: Save, snapshot: Snapshot, name: str) -> Record:
        return Record(
            step=save.step,
            rank=self.rank,
            world_size=self.world_size,
            file=name,
            file_bytes=snapshot.nbytes,
            header_bytes=len(save._header),
            header_crc32c=hexadecimal(crc32c(save._header)),
            chunk_bytes=CHUNK_BYTES,
            chunks=[hexadecimal(checksum) for checksum in snapshot.checksums()],
            state=save._state,
        )

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
        if self.coordinator is not None:
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
            if self.coordinator is not None:
                self.coordinator.look(f"{path}, which {made_by}")
            time.sleep(0.02)

    def _tell(self, key: str, message: dict[str, Any]) -> None:
        if self.coordinator is not None:
            self.coordinator.tell(key, message)

    def _tell_failure(self, key: str, step: int, error: BaseException) -> None:
        """Tells the other ranks why they wait in vain. A store that fails as well must not hide the first error."""
        try:
            self._tell(key, {"step": step, "error": f"rank {self.rank}: {describe(error)}"})
        except CheckpointError as other:
            _logger.warning("the other ranks were not notified of a failed save: %s", other)

    def _ask(self, key: str, step: int, what: str) -> dict[str, Any]:
        assert self.coordinator is not None
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

    @contextlib.contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Raises a CheckpointError that says what any error in the block means for a save."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"step {step} was not saved to {self.directory}: {describe(error)} Older checkpoints are unharmed."
            ) from (error.__cause__ if isinstance(error, CheckpointError) else error)


def describe(error: BaseException) -> str:
    """Returns a sentence about an error, with advice where its error number tells some."""
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{error.filename}: " if error.filename else ""
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{place}{error.strerror} ({name}). {_ADVICE.get(error.errno, '')}".strip()
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {str(error).rstrip('.')}."
