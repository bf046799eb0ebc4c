"""Gives a run an identity, so that no run continues the checkpoints of another one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import directory as disk
from .errors import CheckpointError

RUN = "run.json"


class Origin(NamedTuple):
    """Where a checkpoint comes from.

    Attributes:
        run: The identity of the run; "" in checkpoints of versions that knew none.
        home: The directory that the run was started with.
    """

    run: str = ""
    home: str = ""


class Identity:
    """The identity of a run, which is drawn for its first save and noted in its directory.

    Only rank 0 uses one, before any checkpoint is loaded.

    Args:
        directory: The directory of the run.
        home: The directory as the script names it.
        run: The identity that the script gives, or None.
    """

    def __init__(self, directory: Path, home: str, run: str | None) -> None:
        self._directory, self._given = directory, run
        self._noted, self._has_saved = self._written = _read(directory)
        self.origin = Origin(run or self._noted, home)

    def settle(self, local: Iterable[Origin]) -> None:
        """Compares the run with the checkpoints of its directory.

        Raises:
            CheckpointError: They are of another run.
        """
        if self._given and self._noted not in ("", self._given):
            raise CheckpointError(
                f"run is {self._given!r}, and {self._directory} belongs to the run {self._noted!r}: choose another "
                "directory, or omit run to continue that one."
            )
        for found in local:
            self._has_saved = True
            if found.run and not self.origin.run:
                self.origin = self.origin._replace(run=found.run)
            self._compare(found, os.fspath(self._directory))

    def settle_remote(self, url: str, found: Origin) -> None:
        """Compares the run with a remote checkpoint. A run that is new on this host takes that identity.

        Raises:
            CheckpointError: The checkpoint is of another run.
        """
        if found.run and not self.origin.run:
            if found.home != self.origin.home:
                raise CheckpointError(
                    f"{url} holds checkpoints of the run {found.run!r}, which was started in {found.home!r}, and this "
                    f"one is in {self.origin.home!r}. To start another run, choose another URL. To continue that run "
                    f"here, pass run={found.run!r} to Checkpointer."
                )
            self.origin = self.origin._replace(run=found.run)
        self._compare(found, url)

    def begin(self) -> Origin:
        """Notes the identity in the directory, and draws one for a new run."""
        if not self.origin.run:
            self.origin = self.origin._replace(run=secrets.token_hex(8))
        if self._written != (self.origin.run, self._has_saved):
            self._write()
        return self.origin

    def completed(self) -> None:
        """Notes that the run has had a checkpoint."""
        if not self._has_saved:
            self._has_saved = True
            self._write()

    def check_new(self) -> None:
        """Raises CheckpointError if no checkpoint was found, although the run has had one."""
        if self._has_saved:
            raise CheckpointError(
                f"{self._directory} belongs to the run {self.origin.run!r}, and all of its checkpoints were deleted. "
                f"Restore a copy of them. To start from scratch on purpose, delete {self._directory / RUN}."
            )

    def _compare(self, found: Origin, place: str) -> None:
        if found.run and found.run != self.origin.run:
            raise CheckpointError(
                f"{place} holds checkpoints of the run {found.run!r}, and {self._directory} belongs to the run "
                f"{self.origin.run!r}: give each run places of its own."
            )

    def _write(self) -> None:
        note = {"drivetrain": "run", "run": self.origin.run, "has_saved": self._has_saved}
        disk.replace_note(self._directory / RUN, note)
        self._written = self.origin.run, self._has_saved


def _read(directory: Path) -> tuple[str, bool]:
    """Returns the identity in a directory, "" if there is none, and whether the run has had a checkpoint.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = directory / RUN
    try:
        noted = json.loads(path.read_text())
        return str(noted["run"]), bool(noted["has_saved"])
    except (FileNotFoundError, NotADirectoryError):
        return "", False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Delete it if no other run uses {directory}; its checkpoints stay."
        ) from error
