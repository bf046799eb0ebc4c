"""Keeps what a script writes, moves and removes in a folder over the machine's files, which are only read."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_MAX_LINKS = 40  # as in the kernel
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TEMPORARY = getattr(os, "O_TMPFILE", 0) & ~getattr(os, "O_DIRECTORY", 0)


def writes(flags: int) -> bool:
    """Returns whether flags of `os.open` ask for more than reading."""
    return bool(flags & _WRITING or flags & _TEMPORARY)


class Overlay:
    """Maps each path that a script sees to the place where its contents are.

    A path is a file or folder of the overlay if it has been written, and one of the machine otherwise. Files are
    copied before they are changed in place or moved. All methods take absolute or relative paths, as `os` does, and
    raise OSError as `os` does. The folder for what is written must be empty.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.unseen_bytes: dict[str, int] = {}  # by path: bytes of tensors without values in a file
        self._removed: set[str] = set()  # paths below which nothing of the machine is seen
        self._gone: dict[str, int] = {}  # files that were written and removed, and their bytes

    # ---- Paths.

    def is_inside(self, place: str) -> bool:
        """Returns whether a place belongs to the overlay."""
        return place == self.folder or place.startswith(self.folder + os.sep)

    def seen(self, place: str) -> str:
        """Returns the path that a script sees for a place."""
        return (place[len(self.folder) :] or os.sep) if self.is_inside(place) else place

    def path(self, name: str, *, follows: bool = True, dir_fd: int | None = None) -> str:
        """Returns the absolute path of a name, in which no part is a symbolic link.

        `follows=False` leaves a link in the last part. A relative path belongs to the open folder `dir_fd`.
        """
        base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        todo = self.seen(os.path.join(base, name)).split(os.sep)[::-1]
        path, links = "", 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                path = os.path.dirname(path).rstrip(os.sep)
                continue
            place = self._place(f"{path}/{part}")
            if (todo or follows) and os.path.islink(place) and not path.startswith("/proc/"):
                links += 1
                if links > _MAX_LINKS:
                    raise _error(errno.ELOOP, name)
                target = os.readlink(place)
                path = "" if target.startswith(os.sep) else path
                todo += target.split(os.sep)[::-1]
                continue
            path = f"{path}/{part}"
        return path or os.sep

    def place(self, name: str, *, follows: bool = True, dir_fd: int | None = None) -> str:
        """Returns where the contents of a path are, for reading."""
        return self._place(self.path(name, follows=follows, dir_fd=dir_fd))

    def _place(self, path: str) -> str:
        upper = self.folder + path
        if os.path.lexists(upper):
            return upper
        return self._lower(path) or upper

    def _lower(self, path: str) -> str | None:
        """Returns where the machine has a path; None if the script has removed it."""
        is_removed = any(path == one or path.startswith(one + os.sep) for one in self._removed)
        return None if is_removed else path

    def _folder_for(self, path: str) -> str:
        """Returns the place of a new file or folder, and makes the folders above it in the overlay."""
        parent = os.path.dirname(path)
        place = self._place(parent)
        if not os.path.isdir(place):
            raise _error(errno.ENOTDIR if os.path.lexists(place) else errno.ENOENT, path)
        os.makedirs(self.folder + parent, exist_ok=True)
        return self.folder + path

    # ---- Files.

    def opened(self, name: str, flags: int, dir_fd: int | None = None) -> str:
        """Returns the place to open for a path and flags of `os.open`. A file that is changed in place is copied."""
        path = self.path(name, follows=not flags & os.O_NOFOLLOW, dir_fd=dir_fd)
        place = self._place(path)
        if not writes(flags) or is_device(place):
            return place
        if flags & _TEMPORARY:
            os.makedirs(self.folder + path, exist_ok=True)
            return self.folder + path
        is_there = os.path.lexists(place)
        if is_there and flags & os.O_EXCL and flags & os.O_CREAT:
            raise _error(errno.EEXIST, name)
        if os.path.isdir(place):
            raise _error(errno.EISDIR, name)
        if not is_there and not flags & os.O_CREAT:
            raise _error(errno.ENOENT, name)
        upper = self._folder_for(path)
        if is_there and place != upper and not flags & os.O_TRUNC:
            shutil.copyfile(place, upper)
        return upper

    # ---- What takes the place of functions of `os` of the same name.

    def truncate(self, path: str, length: int) -> None:
        os.truncate(self.opened(path, os.O_WRONLY), length)

    def remove(self, path: str, *, dir_fd: int | None = None) -> None:
        name, path = path, self.path(path, follows=False, dir_fd=dir_fd)
        place = self._existing(path, name)
        if os.path.isdir(place) and not os.path.islink(place):
            raise _error(errno.EISDIR, name)
        if self.is_inside(place):
            self._gone[path] = os.lstat(place).st_size + self.unseen_bytes.pop(path, 0)
            os.remove(place)
        self._removed.add(path)

    def rename(self, src: str, dst: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        old = self.path(src, follows=False, dir_fd=src_dir_fd)
        new = self.path(dst, follows=False, dir_fd=dst_dir_fd)
        place, there = self._existing(old, src), self._place(new)
        if old == new:
            return
        if new.startswith(old + os.sep):
            raise _error(errno.EINVAL, dst)
        if os.path.isdir(there) and not os.path.islink(there):
            if not os.path.isdir(place):
                raise _error(errno.EISDIR, dst)
            if self.names(new):
                raise _error(errno.ENOTEMPTY, dst)
        elif os.path.lexists(there) and os.path.isdir(place) and not os.path.islink(place):
            raise _error(errno.ENOTDIR, dst)
        upper = self._folder_for(new)
        self._copy(old)
        os.replace(self.folder + old, upper)
        self.unseen_bytes.pop(new, None)
        for path in [each for each in self.unseen_bytes if each == old or each.startswith(old + os.sep)]:
            self.unseen_bytes[new + path[len(old) :]] = self.unseen_bytes.pop(path)
        self._removed |= {old, new}

    def _copy(self, path: str) -> str:
        """Copies what the script sees at a path into the overlay, and returns the place."""
        upper, place = self._folder_for(path), self._place(path)
        if os.path.isdir(place) and not os.path.islink(place):
            os.makedirs(upper, exist_ok=True)
            for name in self.names(path):
                self._copy(f"{path}/{name}")
        elif place != upper:
            shutil.copyfile(place, upper, follow_symlinks=False)
        return upper

    def link(self, src: str, dst: str, **_: object) -> None:
        old = self.path(src)
        self._existing(old, src)
        os.link(self._copy(old), self._new(dst))

    def symlink(self, src: str, dst: str, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        os.symlink(src, self._new(dst, dir_fd))

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        os.mkdir(self._new(path, dir_fd), mode | stat.S_IRWXU)

    def _new(self, name: str, dir_fd: int | None = None) -> str:
        """Returns the place of what is to be made."""
        path = self.path(name, follows=False, dir_fd=dir_fd)
        if os.path.lexists(self._place(path)):
            raise _error(errno.EEXIST, name)
        return self._folder_for(path)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        name, path = path, self.path(path, follows=False, dir_fd=dir_fd)
        if not os.path.isdir(self._existing(path, name)):
            raise _error(errno.ENOTDIR, name)
        if self.names(path):
            raise _error(errno.ENOTEMPTY, name)
        if os.path.isdir(self.folder + path):
            shutil.rmtree(self.folder + path)
        self._removed.add(path)

    def names(self, name: str) -> list[str]:
        """Returns the names in a folder."""
        path = self.path(name)
        found = dict.fromkeys(os.listdir(self._existing(path, name)))
        if self.is_merged(path) and (lower := self._lower(path)) is not None and os.path.isdir(lower):
            found.update(dict.fromkeys(os.listdir(lower)))
        return [each for each in found if os.path.lexists(self._place(os.path.join(path, each)))]

    def is_merged(self, name: str) -> bool:
        """Returns whether a folder differs from the machine's."""
        path = self.path(name)
        return os.path.lexists(self.folder + path) or any(os.path.dirname(each) == path for each in self._removed)

    def _existing(self, path: str, name: str) -> str:
        place = self._place(path)
        if not os.path.lexists(place):
            raise _error(errno.ENOENT, name)
        return place

    # ---- What the script would have changed.

    def changes(self) -> Iterator[tuple[str, str, int]]:
        """Yields what was done, the path and its bytes: "write", "write and remove", "make" (a folder) or "remove".

        Threads of the script may go on to write, move and remove meanwhile.
        """
        for folder, folders, files in os.walk(self.folder):
            for file in sorted(files):
                path = self.seen(os.path.join(folder, file))
                with contextlib.suppress(FileNotFoundError):
                    yield "write", path, os.lstat(self.folder + path).st_size + self.unseen_bytes.get(path, 0)
            for each in sorted(folders):
                path = self.seen(os.path.join(folder, each))
                with contextlib.suppress(FileNotFoundError):
                    if not os.path.isdir(path) and not os.listdir(self.folder + path):
                        yield "make", path, 0
        for path, size in list(self._gone.items()):
            if not os.path.lexists(self._place(path)) and not os.path.lexists(path):
                yield "write and remove", path, size
        for path in sorted(self._removed):
            if os.path.lexists(path) and not os.path.lexists(self.folder + path):
                yield "remove", path, 0


def is_device(place: str) -> bool:
    """Returns whether a place is a device such as /dev/null, or a file of the kernel's, which no write changes."""
    try:
        return stat.S_ISCHR(os.stat(place).st_mode) or Path(place).parts[:2] == ("/", "proc")
    except OSError:
        return False


def _error(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)
