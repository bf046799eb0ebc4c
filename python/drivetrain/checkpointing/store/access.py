"""Finds out before the training whether this user may continue the run of a directory, such as a colleague's."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from .audit import AUDIT
from .layout import LEFTOVER, LOCK, STEP


def refusal(directory: Path, is_first: bool) -> str | None:
    """Returns why this user cannot save into a directory, and what to do; None if it can.

    Args:
        directory: The directory; it may not exist.
        is_first: True on rank 0, which also deletes old checkpoints and writes the files of the run.
    """
    try:
        refused = next((one for one in _needed(directory, is_first) if not _may(*one)), None)
    except PermissionError as error:  # a folder above cannot be entered
        refused = Path(error.filename), os.R_OK
    except FileNotFoundError:  # another process has deleted something
        return None
    if refused is None:
        return None
    path, mode = refused
    try:
        owner = _name(path.stat().st_uid)
    except OSError:
        owner = "another user"
    what = "write to" if mode & os.W_OK else "read"
    return (
        f"{directory} cannot be continued by {_name(os.geteuid())}, who may not {what} {path}, which belongs to "
        f"{owner}. To share the run in a group, its owner runs `chmod -R g+rwX {directory}`, and from then on all "
        "start it under `umask 002`. Or choose another directory."
    )


def _may(path: Path, mode: int) -> bool:
    if os.access(path, mode, effective_ids=True) or not path.exists():
        return True
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)  # whoever the owner is; each save tells


def _needed(directory: Path, is_first: bool) -> Iterator[tuple[Path, int]]:
    """Yields the paths that a run uses, with the access that it needs."""
    change = os.R_OK | os.W_OK | os.X_OK
    if not directory.is_dir():
        parents = [one for one in directory.parents if one.is_dir()]
        yield from [(parents[0], os.W_OK | os.X_OK)] if parents and not directory.exists() else []
        return
    yield directory, change
    if not is_first:
        return
    for path in sorted(directory.iterdir()):
        is_folder = not path.is_symlink() and path.is_dir()
        if is_folder and (STEP.fullmatch(path.name) or LEFTOVER.fullmatch(path.name)):
            yield path, change
            yield from ((file, os.R_OK) for file in sorted(path.iterdir()))
        elif path.name in (LOCK, AUDIT):
            yield path, os.R_OK | os.W_OK


def share(path: Path, like: Path) -> None:
    """Gives a new file the mode of another one, which was made under the umask and the rules of its folder."""
    wanted = stat.S_IMODE(like.stat().st_mode)
    if stat.S_IMODE(path.stat().st_mode) != wanted:
        path.chmod(wanted)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
