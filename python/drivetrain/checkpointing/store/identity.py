"""Gives a run an identity, so that no run continues the checkpoints of another one."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import NamedTuple

from . import directory as disk
from .errors import CheckpointError
from .manifest import Manifest

RUN = "run.json"


class Origin(NamedTuple):
    """The identity of a run, "" in checkpoints of versions that knew none, and the directory that began it."""

    run: str = ""
    home: str = ""


class Identity:
    """The identity of a run, which is drawn for its first save and noted in its directory. Only rank 0 uses one.

    `home` is the directory as the script names it, and `run` the identity that the script gives, or None.
    """

    def __init__(self, directory: Path, home: str, run: str | None) -> None:
        self._directory, self._path = directory, directory / RUN
        noted, self._has_saved = self._written = self._read()
        if run and noted not in ("", run):
            raise CheckpointError(
                f"run is {run!r}, and {directory} belongs to the run {noted!r}: choose another directory, or omit run "
                "to continue that one."
            )
        self.origin = Origin(run or noted, home)

    def settle(self, found: Manifest, url: str | None = None) -> None:
        """Compares the run with a checkpoint in its directory or below a URL, and takes its identity if it has none."""
        self._has_saved |= url is None
        if found.run and not self.origin.run:
            if url is not None and found.home != self.origin.home:
                raise CheckpointError(
                    f"{url} holds checkpoints of the run {found.run!r}, which was started in {found.home!r}, and this "
                    f"one is in {self.origin.home!r}. To start another run, choose another URL. To continue that run "
                    f"here, pass run={found.run!r} to Checkpointer."
                )
            self.origin = self.origin._replace(run=found.run)
        if found.run not in ("", self.origin.run):
            raise CheckpointError(
                f"{url or self._directory} holds checkpoints of the run {found.run!r}, and {self._directory} belongs "
                f"to the run {self.origin.run!r}: give each run places of its own."
            )

    def begin(self) -> Origin:
        """Notes the identity in the directory, and draws one for a new run."""
        if not self.origin.run:
            self.origin = self.origin._replace(run=secrets.token_hex(8))
        self._write()
        return self.origin

    def completed(self) -> None:
        """Notes that the run has had a checkpoint."""
        self._has_saved = True
        self._write()

    def check_new(self) -> None:
        """Raises CheckpointError if no checkpoint was found, although the run has had one."""
        if self._has_saved:
            raise CheckpointError(
                f"{self._directory} belongs to the run {self.origin.run!r}, and all of its checkpoints were deleted. "
                f"Restore a copy of them. To start from scratch on purpose, delete {self._path}."
            )

    def _write(self) -> None:
        if self._written != (self.origin.run, self._has_saved):
            self._written = self.origin.run, self._has_saved
            note = {"drivetrain": "run", "run": self.origin.run, "has_saved": self._has_saved}
            disk.replace_note(self._path, note)

    def _read(self) -> tuple[str, bool]:
        """Returns the noted identity, "" if there is none, and whether the run has had a checkpoint."""
        try:
            noted = json.loads(self._path.read_text())
            return str(noted["run"]), bool(noted["has_saved"])
        except (FileNotFoundError, NotADirectoryError):
            return "", False
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {error}. Delete it if no other run uses {self._directory}; its "
                "checkpoints stay."
            ) from error
