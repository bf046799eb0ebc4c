"""Makes a private /dev/shm for a round's ranks, which can be filled up."""

import ctypes
import errno
import os
import signal
from pathlib import Path

SHM = Path("/dev/shm")
FILLER = "filler"
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def hold(size: int, folder: Path) -> None:
    """Makes a /dev/shm of `size` bytes and keeps it until this process is killed. Writes a file to `folder`."""
    try:
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", b"tmpfs", bytes(SHM), b"tmpfs", 0, b"size=%d" % size)
    except OSError as error:
        _leave_word(folder, "no-room", str(error))
        return
    _leave_word(folder, "room", str(os.getpid()))
    while True:
        signal.pause()


def enter(process: int) -> None:
    """Gives this process the /dev/shm that `process` holds. It must not have made a thread yet."""
    enter_namespace(Path(f"/proc/{process}/ns/mnt"), _CLONE_NEWNS)


def enter_namespace(path: Path, kind: int) -> None:
    """Moves this process, which has one thread, to the namespace of that kind (CLONE_NEW...)."""
    space = os.open(path, os.O_RDONLY)
    try:
        _call("setns", space, kind)
    finally:
        os.close(space)


def fill() -> None:
    """Fills the last byte, and checks that none is free."""
    for name in (FILLER, f"{FILLER}-too"):
        with (SHM / name).open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            if name != FILLER and file.tell():
                raise RuntimeError(f"{SHM} took {file.tell()} bytes after it was full")


def left_behind(process: int) -> list[str]:
    """Returns the files in the /dev/shm that `process` holds, except those that fill it."""
    return sorted(p.name for p in Path(f"/proc/{process}/root{SHM}").iterdir() if not p.name.startswith(FILLER))


def _leave_word(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.draft").write_text(text)
    (folder / f"{name}.draft").rename(folder / name)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
