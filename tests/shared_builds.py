"""Builds what tests compile once per state of its sources, although the suite has several test processes."""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

FOLDER = Path(__file__).parent.parent / "build" / "tests"


def built_once(name: str, sources: Iterable[Path], build: Callable[[Path], None]) -> Path:
    """Returns the folder `name` after `build(folder)` has filled it, in this or an earlier process or run.

    It is filled again after a change of the sources, of torch or of Python. A process that needs the folder while
    another fills it waits. After a build that failed, the next process tries.
    """
    digest = hashlib.sha256(f"{sys.executable} {torch.__version__} {torch.__file__}".encode())
    for source in sorted(sources):
        digest.update(str(source).encode())
        digest.update(source.read_bytes())
    folder = FOLDER / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file
        finished = folder / "finished"
        if not finished.exists() or finished.read_text() != digest.hexdigest():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            finished.write_text(digest.hexdigest())
    return folder


def files_in(*folders: Path) -> list[Path]:
    """Returns all sources in these folders, for `built_once`."""
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
