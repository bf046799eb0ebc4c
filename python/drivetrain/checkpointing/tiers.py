"""Keeps checkpoints in further tiers: in shared memory, which survives the process, and on remote file systems."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..processes import machine
from . import survivors
from .preemption.agreement import Ranks
from .preemption.interval import seconds_of
from .saver import Saver
from .store import directory as disk
from .store.access import refusal
from .store.errors import CheckpointError
from .store.identity import Identity, Origin
from .store.reading import Checkpoint, DamagedError, complete_checkpoints, manifests
from .store.remote import RemoteDirectory
from .store.store import Store
from .store.uploader import TierStatus, Uploader

_logger = logging.getLogger("drivetrain")
_LAST_SAVE_S = 5.0  # for a save into memory that is in progress when an exception ends the training
TIERS = "tiers.json"  # what the tiers of a directory hold, for `drivetrain ckpt ls`


@dataclass(frozen=True)
class Ram:
    """Keeps the newest state in shared memory, from which a restarted process on the same host continues.

    It costs twice the bytes of a checkpoint in shared memory, and as much again for the copy. All ranks must run on one
    host.

    Attributes:
        every: Steps between saves.
        directory: A directory on a file system in memory.
    """

    every: int = 1
    directory: str = "/dev/shm"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, expected at least 1 step")

    def path_for(self, directory: Path) -> Path:
        """Returns the place of the checkpoints that belong to a directory."""
        name = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:16]
        return Path(self.directory) / f"drivetrain-{os.getuid()}" / name


@dataclass(frozen=True)
class Remote:
    """Uploads complete checkpoints to a file system of fsspec in the background.

    Attributes:
        url: Such as s3://bucket/run, gs://bucket/run or file:///mnt/run.
        every: Shortest time between uploads, such as "1h"; None uploads each checkpoint. During an upload
            only the newest of the next ones waits. The last one of a run is uploaded always.
        keep: Number of checkpoints to keep there; None keeps all.
        attempts: Number of calls that fail before the upload is given up. Pauses grow from 0.5 s to 60 s.
        reads_back: Reads each uploaded file back to compare its checksums. Without it, only sizes are compared.
        options: Arguments of the file system's class, such as {"profile": "training"} for s3fs.
    """

    url: str
    every: str | float | datetime.timedelta | None = None
    keep: int | None = 3
    attempts: int = 8
    reads_back: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.every is not None:
            seconds_of(self.every, "every")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}, expected at least 1, or None to keep all")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}, expected at least 1")


class Tiers:
    """Runs the tiers of a local store. All ranks call the same methods in the same order.

    Args:
        tiers: At most one Ram, and any number of Remotes.
        ranks: Agrees with the other ranks.
        timeout: Limit in seconds on waits.

    Raises:
        TypeError: A member is neither a Ram nor a Remote.
        ValueError: There are several Rams.

    Attributes:
        damaged: The faults of remote checkpoints that are newer than the one taken, on rank 0.
    """

    def __init__(self, tiers: Sequence[Ram | Remote], ranks: Ranks, timeout: float) -> None:
        for tier in tiers:
            if not isinstance(tier, Ram | Remote):
                raise TypeError(f"tiers has a {type(tier).__name__}, expected Ram or Remote")
        rams = [tier for tier in tiers if isinstance(tier, Ram)]
        if len(rams) > 1:
            raise ValueError(f"tiers has {len(rams)} members of type Ram, expected one at most")
        self._ram = rams[0] if rams else None
        self._remotes = [tier for tier in tiers if isinstance(tier, Remote)]
        self._ranks, self._timeout = ranks, timeout
        self._store: Store | None = None
        self._ram_store: Store | None = None
        self._ram_saver: Saver | None = None
        self._ram_error = ""
        self._uploaders: list[Uploader] = []
        self._submitted_at: list[float] = []
        self._newest_remote: dict[int, int] = {}  # the newest serial of each remote that could be read at the start
        self._last: Path | None = None
        self._closed_status: list[TierStatus] = []
        self.damaged: list[str] = []
        self._identity: Identity | None = None  # on rank 0
        self._guard = threading.Lock()

    def open(
        self,
        store: Store,
        home: str,
        run: str | None,
        open_store: Callable[[Path], Store],
        new_saver: Callable[[Store], Saver],
    ) -> None:
        """Opens the tiers, and downloads the newest checkpoint if a remote has a newer one than this host.

        Args:
            store: The local store.
            home, run: See `Identity`.
            open_store: Opens another store for the same ranks.
            new_saver: Makes what saves into a store.

        Raises:
            CheckpointError: This user may not save into the directory. Or no checkpoint is here, and a remote that may
                have one cannot be read. Or a tier has
                checkpoints of another run.
            ValueError: Ranks run on several hosts, which a Ram does not allow.
        """
        self._store = store
        refused = refusal(store.directory, self._ranks.rank == 0)
        self._raise_together(None if refused is None else CheckpointError(refused))
        if self._ram is not None:
            host = int(hashlib.sha256(machine().encode()).hexdigest()[:15], 16)
            lowest, highest = self._ranks.agree(host)
            if lowest != highest:
                raise ValueError(
                    "tiers has a Ram, and the ranks run on several hosts: the memory of a host holds the shares of its "
                    "own ranks alone. Leave the Ram out."
                )
            path = self._ram.path_for(store.directory)
            if self._ranks.rank == 0:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._ram_store = open_store(path)
            self._ram_saver = new_saver(self._ram_store)
            self._ram_store.continue_numbers_of(store.directory)
            store.continue_numbers_of(path)
        if self._ranks.rank == 0:
            _warn_of_closed_memory(store.directory)
            for one in self._remotes:
                self._uploaders.append(
                    Uploader(one.url, one.options, one.keep, one.attempts, one.reads_back, self._write_status)
                )
            self._submitted_at = [float("-inf")] * len(self._uploaders)
            store.follow(self)
            if self._ram_store is not None or self._uploaders:
                self._write_status()
        self._begin(store, home, run)

    def stores(self) -> list[Store]:
        """Returns the stores that may have the newest checkpoint, the local one first."""
        assert self._store is not None
        memory = self._ram_store
        return [self._store, memory] if memory is not None and memory.directory.is_dir() else [self._store]

    def fetch(self, above: int, up_to: int) -> bool:
        """Downloads the newest remote checkpoint with a serial above the first number, up to the second.

        Returns:
            On all ranks, whether an intact one is now in the local directory.
        """
        if not self._remotes:
            return False
        assert self._store is not None
        is_there = False
        try:
            is_there = bool(self._uploaders) and self._download(self._store, above, up_to)
        except CheckpointError as error:
            _logger.warning("no remote copy takes the place of a damaged checkpoint: %s", error)
        return self._ranks.any_true(is_there)

    def continue_with(self, checkpoint: Checkpoint) -> None:
        """Uploads the checkpoint that the training continues with, where the last run ended before it was uploaded."""
        for index, newest in self._newest_remote.items():
            assert self._store is not None
            if checkpoint.path.parent == self._store.directory and checkpoint.serial > newest:
                self._uploaders[index].submit(checkpoint.path)

    def check_new(self) -> None:
        """Raises CheckpointError on all ranks if no checkpoint was found, although the run has had one."""
        failure: CheckpointError | None = None
        if self._identity is not None:
            try:
                self._identity.check_new()
            except CheckpointError as error:
                failure = error
        self._raise_together(failure)

    def step(self, steps: int, header: Mapping[str, Any]) -> None:
        """Saves into memory if that is due. Waits for the last save into memory first."""
        saver = self._ram_saver
        if saver is None or self._ram is None or steps % self._ram.every:
            return
        saver.wait()
        self._report_ram(saver)
        saver.begin(steps, header)

    def is_due(self, steps: int) -> bool:
        """Returns whether `step` would save."""
        return self._ram is not None and steps % self._ram.every == 0

    def finish(self, timeout: float) -> str | None:
        """Uploads the last checkpoint, and waits for uploads. Returns what has failed or takes longer, if any."""
        failures = []
        deadline = time.monotonic() + timeout
        for index, uploader in enumerate(self._uploaders):
            last = self._last
            if last is not None and uploader.status().newest != int(last.name.removeprefix("step-")):
                self._submit(index, last)
            if not uploader.wait(max(0.0, deadline - time.monotonic())):
                failures.append(f"the upload to {uploader.status().tier} did not end within {timeout:g} s")
            elif (error := uploader.status().error) is not None:
                failures.append(error)
        if self._uploaders:
            self._write_status()  # an uploader may have ended an upload, but not yet said so in the file
        return "; ".join(failures) or None

    def close(self, is_orderly: bool) -> None:
        """Closes the tiers. After an orderly end, what is in memory is deleted: the local directory has it."""
        self._closed_status = self.status()
        saver, self._ram_saver = self._ram_saver, None
        store, self._ram_store = self._ram_store, None
        if saver is not None and is_orderly:
            saver.wait()
        if store is not None:
            try:
                _close(store, self._timeout if is_orderly else 0.0 if survivors.are_expected() else _LAST_SAVE_S)
                if is_orderly and self._ranks.rank == 0:
                    discard(store.directory)
                    self._write_status()  # without the memory
            except (CheckpointError, OSError) as error:
                _logger.warning("checkpoints in memory are left in %s: %s", store.directory, error)
        for uploader in self._uploaders:
            uploader.close()
        with self._guard:  # a thread that ends an upload now must not write that there are no tiers
            self._uploaders, self._store = [], None

    def status(self) -> list[TierStatus]:
        """Returns the state of each tier but the local directory, on rank 0; of the memory alone on other ranks."""
        found = []
        if self._ram_saver is not None and self._ram_store is not None:
            step = self._ram_saver.saved_step
            pending = (self._ram_saver.begun_step,) if self._ram_saver.is_busy else ()
            path = os.fspath(self._ram_store.directory)
            found.append(TierStatus(path, step if step >= 0 else None, pending, self._ram_error or None, ()))
        found += [uploader.status() for uploader in self._uploaders]
        return found or self._closed_status

    # ---- The store calls these on rank 0, in its thread.

    def completed(self, path: Path) -> None:
        """Uploads a checkpoint to each remote that is due."""
        if self._identity is not None:
            self._identity.completed()
        self._last = path
        now = time.monotonic()
        for index, remote in enumerate(self._remotes):
            if remote.every is None or now - self._submitted_at[index] >= seconds_of(remote.every, "every"):
                self._submit(index, path)

    def holds(self, path: Path) -> bool:
        """Returns whether an upload still needs a checkpoint."""
        return any(uploader.holds(path) for uploader in self._uploaders)

    # ---- Parts.

    def _submit(self, index: int, path: Path) -> None:
        self._submitted_at[index] = time.monotonic()
        self._uploaders[index].submit(path)

    def _report_ram(self, saver: Saver) -> None:
        text = str(saver.error) if saver.error is not None else ""
        if text and text != self._ram_error:
            _logger.error("the training goes on without its copy in memory: %s", text)
        self._ram_error, saver.error = text, None

    def _begin(self, store: Store, home: str, run: str | None) -> None:
        """Settles the identity of the run on rank 0, and downloads the newest checkpoint if a remote has it."""
        failure: CheckpointError | None = None
        if self._ranks.rank == 0:
            try:
                # Reads no key: an error of rank 0 alone must come after the exchange.
                places = [one.directory for one in self.stores()]
                local, *memory = [[Origin(one.run, one.home) for one in manifests(place)] for place in places]
                self._identity = Identity(store.directory, home, run)
                self._identity.settle(local, places[-1], memory[0] if memory else [])
                if self._uploaders:
                    complete = [one for place in places for one in complete_checkpoints(place)]
                    self._download(store, max((one.serial for one in complete), default=0), None)
                origin = self._identity.begin()
                store.belong_to(origin)
                if self._ram_store is not None:
                    self._ram_store.belong_to(origin)
                    self._ram_store.follow(_Noting(self._identity))
            except CheckpointError as error:
                failure = error
            except OSError as error:
                _logger.warning("%s cannot be read: %s", store.directory, error)
        self._raise_together(failure)

    def _raise_together(self, failure: CheckpointError | None) -> None:
        if self._ranks.any_true(failure is not None):
            raise failure or CheckpointError(
                "another rank cannot begin with the checkpoints that it found; its error says why"
            )

    def _download(self, store: Store, above: int, up_to: int | None) -> bool:
        """Downloads the newest intact remote checkpoint with a serial above the first number, up to the second.

        Args:
            store: The local store.
            above, up_to: The limits; None sets no upper one.

        Raises:
            CheckpointError: `above` is 0, and a remote cannot be read or none of their checkpoints is intact.
        """
        candidates: list[tuple[int, str, RemoteDirectory]] = []
        problems = []
        for index, uploader in enumerate(self._uploaders):
            try:
                found = uploader.remote.manifests()
            except CheckpointError as error:
                problems.append(f"{uploader.remote.url}, which may have one, cannot be read: {error}")
                continue
            for one in found.values():
                assert self._identity is not None
                self._identity.settle_remote(uploader.remote.url, Origin(one.run, one.home))
            candidates += [
                (one.serial, name, uploader.remote)
                for name, one in found.items()
                if one.serial > above and (up_to is None or one.serial <= up_to)
            ]
            self._newest_remote[index] = max((one.serial for one in found.values()), default=0)
        for _, name, remote in sorted(candidates, key=lambda one: one[0], reverse=True):
            problem = _fetched(remote, name, store.directory)
            if problem is None:
                return True
            _logger.warning("a remote checkpoint is passed over: %s", problem)
            self.damaged.append(problem)
            problems.append(f"no remote one is intact: {problem}")
        if problems and not above:
            raise CheckpointError(f"{store.directory} has no intact checkpoint, and {problems[0]}")
        if problems:
            _logger.warning("the checkpoints of this host are taken: %s", "; ".join(problems))
        return False

    def _write_status(self) -> None:
        """Writes what `drivetrain ckpt ls` shows of the tiers."""
        with self._guard:  # the state is read here too, so that the last writer writes the newest
            if self._store is None:
                return
            remotes = [uploader.status()._asdict() for uploader in self._uploaders]
            ram = os.fspath(self._ram_store.directory) if self._ram_store is not None else None
            text = json.dumps({"drivetrain": "tiers", "ram": ram, "remotes": remotes}, indent=1)
            path = self._store.directory / TIERS
            try:
                temporary = path.with_name(f".{TIERS}.tmp")
                temporary.unlink(missing_ok=True)  # a colleague's process may have left it
                temporary.write_text(text)
                temporary.replace(path)
            except OSError as error:
                _logger.warning("%s was not written: %s", path, error)


class _Noting:
    """Notes that a run has had a checkpoint."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def completed(self, path: Path) -> None:
        self._identity.completed()

    def holds(self, path: Path) -> bool:
        return False


def _warn_of_closed_memory(directory: Path) -> None:
    """Warns if the run has left steps in memory that belongs to another user of this host."""
    try:
        memory = json.loads((directory / TIERS).read_text())["ram"]
        if memory is not None:
            Path(memory).stat()
    except PermissionError as error:
        _logger.warning(
            "the newest steps of %s may be in %s, which another user's process left in memory and this user may not "
            "read. Let that user continue the run, or expect to repeat those steps.",
            directory,
            error.filename,
        )
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or this is another host
        pass


def _close(store: Store, timeout_s: float) -> None:
    try:
        store.close(timeout_s)
    except CheckpointError:
        store.abandon()  # another rank may have died
        store.close(_LAST_SAVE_S)


def discard(directory: Path) -> None:
    """Deletes all checkpoints of a directory in memory, and the directory.

    Raises:
        CheckpointError: A run uses it.
        OSError: A file cannot be deleted.
    """
    with disk.locked(directory):
        for checkpoint in complete_checkpoints(directory):
            disk.retire(checkpoint.path)
        for folder in disk.leftovers(directory):
            disk.remove_files(folder)
    (directory / ".lock").unlink(missing_ok=True)
    directory.rmdir()


def _fetched(remote: RemoteDirectory, name: str, directory: Path) -> str | None:
    """Downloads a checkpoint and verifies all of it. Returns None, or what is wrong with it; then it is not kept.

    Raises:
        CheckpointError: The local disk fails.
    """
    _logger.info("downloading %s from %s", name, remote.url)
    try:
        folder = remote.download(name, directory)
        try:
            faults = [str(fault) for fault in Checkpoint(folder).verify()]
        except DamagedError as error:
            faults = [str(error.fault)]
        if faults:
            disk.remove_files(folder)
            return f"{remote.url}/{name}: {faults[0]}"
        disk.publish(folder, directory / name)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        raise CheckpointError(f"{remote.url}/{name} was not written to {directory}: {error}") from error
    return None
