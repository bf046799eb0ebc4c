"""Keeps the checkpoints of a local store on remote file systems as well, and begins with the newest intact copy."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .preemption.agreement import Ranks
from .store import directory as disk
from .store.access import check_access
from .store.errors import CheckpointError
from .store.identity import Identity
from .store.reading import Checkpoint, DamagedError, complete_checkpoints, manifests
from .store.remote import Remote, RemoteDirectory, TierStatus, Uploader
from .store.store import Store

_logger = logging.getLogger("drivetrain")
TIERS = "tiers.json"  # what the tiers of a directory hold, for `drivetrain ckpt ls`


class Tiers:
    """Runs the tiers of a local store. All ranks call the same methods in the same order.

    Attributes:
        damaged: The faults of remote checkpoints that are newer than the one taken, on rank 0.
    """

    def __init__(self, remotes: Sequence[Remote], ranks: Ranks) -> None:
        for tier in remotes:
            if not isinstance(tier, Remote):
                raise TypeError(f"tiers has a {type(tier).__name__}, expected Remote")
        self._remotes, self._ranks = remotes, ranks
        self._is_open = False
        self._uploaders: list[Uploader] = []  # on rank 0
        self._identity: Identity | None = None  # on rank 0
        self._guard = threading.Lock()
        self.damaged: list[str] = []

    def open(self, store: Store, home: str, run: str | None) -> None:
        """Opens the tiers, and downloads the newest checkpoint if a remote has a newer one than this host.

        `home` and `run` are as `Identity` takes them.

        Raises:
            CheckpointError: This user may not save into the directory. Or no checkpoint is here, and a remote that may
                have one cannot be read. Or a tier has checkpoints of another run.
        """
        self.store, self._is_open = store, True
        with self._together():
            check_access(store.directory, self._ranks.rank == 0)
        with self._together():
            if self._ranks.rank == 0:
                self._open_first(store, home, run)

    def _open_first(self, store: Store, home: str, run: str | None) -> None:
        self._uploaders = [Uploader(one, self._write_status) for one in self._remotes]
        store.on_complete = self._completed
        store.is_held = lambda path: any(uploader.holds(path) for uploader in self._uploaders)
        self._write_status()
        try:
            # Reads no key: an error of rank 0 alone must come after the exchange.
            self._identity = Identity(store.directory, home, run)
            for one in manifests(store.directory):
                self._identity.settle(one)
            if self._uploaders:
                self._download(max((one.serial for one in complete_checkpoints(store.directory)), default=0))
            store.origin = self._identity.begin()
        except OSError as error:
            _logger.warning("%s cannot be read: %s", store.directory, error)

    def fetch(self, above: int, up_to: int) -> bool:
        """Downloads the newest remote checkpoint with a serial above the first number, up to the second."""
        if not self._remotes:
            return False
        is_there = False
        try:
            is_there = bool(self._uploaders) and self._download(above, up_to)
        except CheckpointError as error:
            _logger.warning("no remote copy takes the place of a damaged checkpoint: %s", error)
        return self._ranks.any_true(is_there)

    def continue_with(self, checkpoint: Checkpoint) -> None:
        """Uploads the checkpoint that the training continues with, where the last run ended before it was uploaded."""
        for uploader in self._uploaders:
            if uploader.newest_found is not None and checkpoint.serial > uploader.newest_found:
                uploader.submit(checkpoint.path)

    def check_new(self) -> None:
        """Raises CheckpointError on all ranks if no checkpoint was found, although the run has had one."""
        with self._together():
            if self._identity is not None:
                self._identity.check_new()

    def finish(self, timeout: float) -> str | None:
        """Uploads the last checkpoint, and waits for uploads. Returns what has failed or takes longer, if any."""
        deadline = time.monotonic() + timeout
        failures = [one.finish(max(0.0, deadline - time.monotonic())) for one in self._uploaders]
        self._write_status()  # an uploader may have ended an upload, but not yet said so in the file
        return "; ".join(filter(None, failures)) or None

    def close(self) -> None:
        for uploader in self._uploaders:
            uploader.close()
        with self._guard:  # a thread that ends an upload later must not write the file of another run
            self._is_open = False

    def status(self) -> list[TierStatus]:
        """Returns the state of each remote on rank 0, and nothing on other ranks."""
        return [uploader.status() for uploader in self._uploaders]

    def _completed(self, path: Path) -> None:
        """Uploads a checkpoint to each remote that is due."""
        if self._identity is not None:
            self._identity.completed()
        for uploader in self._uploaders:
            uploader.completed(path)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Raises on all ranks if the block raises a CheckpointError on one of them."""
        failure: CheckpointError | None = None
        try:
            yield
        except CheckpointError as error:
            failure = error
        if self._ranks.any_true(failure is not None):
            raise failure or CheckpointError(
                "another rank cannot begin with the checkpoints that it found; its error says why"
            )

    def _download(self, above: int, up_to: float = math.inf) -> bool:
        """Downloads what `fetch` does, on rank 0.

        Raises:
            CheckpointError: `above` is 0, and a remote cannot be read or none of their checkpoints is intact.
        """
        assert self._identity is not None
        candidates: list[tuple[int, str, RemoteDirectory]] = []
        problems = []
        for uploader in self._uploaders:
            remote = uploader.remote
            try:
                found = remote.manifests()
            except CheckpointError as error:
                problems.append(f"{remote.url}, which may have one, cannot be read: {error}")
                continue
            for name, one in found.items():
                self._identity.settle(one, remote.url)
                candidates += [(one.serial, name, remote)] if above < one.serial <= up_to else []
            uploader.newest_found = max((one.serial for one in found.values()), default=0)
        for _, name, remote in sorted(candidates, key=lambda one: one[0], reverse=True):
            problem = _fetched(remote, name, self.store.directory)
            if problem is None:
                return True
            _logger.warning("a remote checkpoint is passed over: %s", problem)
            self.damaged.append(problem)
            problems.append(f"no remote one is intact: {problem}")
        if problems and not above:
            raise CheckpointError(f"{self.store.directory} has no intact checkpoint, and {problems[0]}")
        if problems:
            _logger.warning("the checkpoints of this host are taken: %s", "; ".join(problems))
        return False

    def _write_status(self) -> None:
        """Writes what `drivetrain ckpt ls` shows of the tiers."""
        with self._guard:  # the state is read here too, so that the last writer writes the newest
            if self._uploaders and self._is_open:
                note = {"drivetrain": "tiers", "remotes": [one._asdict() for one in self.status()]}
                disk.replace_note(self.store.directory / TIERS, note)


def _fetched(remote: RemoteDirectory, name: str, directory: Path) -> str | None:
    """Downloads a checkpoint and verifies all of it. Returns None, or what is wrong with it; then it is not kept.

    Raises:
        CheckpointError: The local disk fails.
    """
    _logger.info("downloading %s from %s", name, remote.url)
    try:
        folder = remote.download(name, directory)
        try:
            faults = Checkpoint(folder).verify()
        except DamagedError as error:
            faults = [error.fault]
        if faults:
            disk.remove_files(folder)
            return f"{remote.url}/{name}: {faults[0]}"
        disk.publish(folder, directory / name)
    except (CheckpointError, FileNotFoundError) as error:
        return f"{remote.url}/{name} cannot be read: {error}"
    except OSError as error:
        raise CheckpointError(f"{remote.url}/{name} was not written to {directory}: {error}") from error
    return None
