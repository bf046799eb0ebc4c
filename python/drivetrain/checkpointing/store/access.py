"""Finds out before the training whether this user may continue the run of a directory, such as a colleague's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .audit import AUDIT
from .directory import user_name
from .errors import CheckpointError
from .layout import LEFTOVER, LOCK, step_of

_CHANGE = os.R_OK | os.W_OK | os.X_OK  # of a folder


def check_access(directory: Path, is_first: bool) -> None:
    """Raises CheckpointError if this user cannot save into a directory, which may not exist, with what to do.

    Rank 0, for which `is_first` is True, also deletes old checkpoints and writes the files of the run.
    """
    try:
        refused = next((one for one in _needed(directory, is_first) if not _may(*one)), None)
    except PermissionError as error:  # a folder above cannot be entered
        refused = Path(error.filename), os.R_OK
    except FileNotFoundError:  # another process has deleted something
        return
    if refused is None:
        return
    path, mode = refused
    try:
        owner = user_name(path.stat().st_uid)
    except OSError:
        owner = "another user"
    raise CheckpointError(
        f"{directory} cannot be continued by {user_name(os.geteuid())}, who may not "
        f"{'write to' if mode & os.W_OK else 'read'} {path}, which belongs to {owner}. To share the run in a group, "
        f"its owner runs `chmod -R g+rwX {directory}`, and from then on all start it under `umask 002`. Or choose "
        "another directory."
    )


def _may(path: Path, mode: int) -> bool:
    if os.access(path, mode, effective_ids=True) or not path.exists():
        return True
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)  # whoever the owner is; each save tells


def _needed(directory: Path, is_first: bool) -> Iterator[tuple[Path, int]]:
    """Yields the paths that a run uses, with the access that it needs."""
    if not directory.is_dir():
        parents = [one for one in directory.parents if one.is_dir()]
        yield from [(parents[0], os.W_OK | os.X_OK)] if parents and not directory.exists() else []
        return
    yield directory, _CHANGE
    for path in sorted(directory.iterdir()) if is_first else ():
        if path.name in (LOCK, AUDIT):
            yield path, os.R_OK | os.W_OK
            continue
        is_ours = step_of(path.name) is not None or LEFTOVER.fullmatch(path.name)
        if is_ours and path.is_dir() and not path.is_symlink():
            yield path, _CHANGE
            yield from ((file, os.R_OK) for file in sorted(path.iterdir()))
