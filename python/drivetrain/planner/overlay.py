"""Keeps what a script writes, moves and removes in a folder over the machine's files, which are only read."""

from __future__ import annotations

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
    copied before they are changed in place. Renaming copies nothing, because moved paths refer to their source. All
    methods take absolute or relative paths, as `os` does, and raise OSError as `os` does.

    Args:
        folder: An empty folder for what is written.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.unseen_bytes: dict[str, int] = {}  # by path: bytes of tensors without values in a file
        self._source: dict[str, str | None] = {}  # by path: where it was moved from; None: it is removed
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

        Args:
            name: A path.
            follows: False leaves a link in the last part.
            dir_fd: An open folder to which a relative path belongs.
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
        head, rest = path, ""
        while self._source and head != os.sep:
            if head in self._source:
                source = self._source[head]
                return None if source is None else source + rest
            head, _, last = head.rpartition(os.sep)
            head, rest = head or os.sep, f"{os.sep}{last}{rest}"
        return path

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
        if not writes(flags) or _is_device(place):
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

    def truncate(self, name: str, length: int) -> None:
        os.truncate(self.opened(name, os.O_WRONLY), length)

    def remove(self, name: str, dir_fd: int | None = None) -> None:
        path = self.path(name, follows=False, dir_fd=dir_fd)
        place = self._existing(path, name)
        if os.path.isdir(place) and not os.path.islink(place):
            raise _error(errno.EISDIR, name)
        if self.is_inside(place):
            self._gone[path] = os.lstat(place).st_size + self.unseen_bytes.pop(path, 0)
            os.remove(place)
        self._source[path] = None

    def rename(self, source: str, target: str, *, source_fd: int | None = None, target_fd: int | None = None) -> None:
        """Moves a file or folder. A file there is replaced, and so is an empty folder."""
        old, new = (
            self.path(source, follows=False, dir_fd=source_fd),
            self.path(target, follows=False, dir_fd=target_fd),
        )
        place, there = self._existing(old, source), self._place(new)
        if old == new:
            return
        if new.startswith(old + os.sep):
            raise _error(errno.EINVAL, target)
        if os.path.isdir(there) and not os.path.islink(there):
            if not os.path.isdir(place):
                raise _error(errno.EISDIR, target)
            if self.names(target):
                raise _error(errno.ENOTEMPTY, target)
        elif os.path.lexists(there) and os.path.isdir(place) and not os.path.islink(place):
            raise _error(errno.ENOTDIR, target)
        upper = self._folder_for(new)
        if os.path.isdir(upper) and not os.path.islink(upper):
            os.rmdir(upper)
        lower = self._lower(old)
        self._forget(new)
        for path in [each for each in self._source if each.startswith(old + os.sep)]:
            self._source[new + path[len(old) :]] = self._source.pop(path)
        for path in [each for each in self.unseen_bytes if each == old or each.startswith(old + os.sep)]:
            self.unseen_bytes[new + path[len(old) :]] = self.unseen_bytes.pop(path)
        if os.path.lexists(self.folder + old):
            os.replace(self.folder + old, upper)
        elif os.path.lexists(upper):
            os.remove(upper)
        self._source[new] = lower if lower is not None and os.path.lexists(lower) else None
        self._source[old] = None

    def _forget(self, path: str) -> None:
        for each in [each for each in self._source if each == path or each.startswith(path + os.sep)]:
            del self._source[each]
        self.unseen_bytes.pop(path, None)

    def link(self, source: str, target: str) -> None:
        """Makes a second name of a file."""
        old, new = self.path(source), self.path(target, follows=False)
        place = self._existing(old, source)
        if os.path.lexists(self._place(new)):
            raise _error(errno.EEXIST, target)
        upper = self._folder_for(new)
        if self.is_inside(place):
            os.link(place, upper)
        else:
            self._source[new] = place

    def symlink(self, text: str, name: str, dir_fd: int | None = None) -> None:
        path = self.path(name, follows=False, dir_fd=dir_fd)
        if os.path.lexists(self._place(path)):
            raise _error(errno.EEXIST, name)
        os.symlink(text, self._folder_for(path))

    # ---- Folders.

    def mkdir(self, name: str, mode: int = 0o777, dir_fd: int | None = None) -> None:
        path = self.path(name, dir_fd=dir_fd)
        if os.path.lexists(self._place(path)):
            raise _error(errno.EEXIST, name)
        os.mkdir(self._folder_for(path), mode | stat.S_IRWXU)

    def rmdir(self, name: str, dir_fd: int | None = None) -> None:
        path = self.path(name, follows=False, dir_fd=dir_fd)
        if not os.path.isdir(self._existing(path, name)):
            raise _error(errno.ENOTDIR, name)
        if self.names(path):
            raise _error(errno.ENOTEMPTY, name)
        if os.path.isdir(self.folder + path):
            shutil.rmtree(self.folder + path)
        self._source[path] = None

    def names(self, name: str) -> list[str]:
        """Returns the names in a folder."""
        path = self.path(name)
        place = self._existing(path, name)
        found = os.listdir(place)
        lower = self._lower(path)
        if self.is_inside(place) and lower is not None and os.path.isdir(lower):
            found = list(dict.fromkeys([*os.listdir(lower), *found]))
        moved = [each.rpartition(os.sep)[2] for each in self._source if os.path.dirname(each) == path]
        found = list(dict.fromkeys([*found, *moved]))
        return [each for each in found if os.path.lexists(self._place(os.path.join(path, each)))]

    def is_merged(self, name: str) -> bool:
        """Returns whether a folder differs from the machine's."""
        path = self.path(name)
        return os.path.lexists(self.folder + path) or any(os.path.dirname(each) == path for each in self._source)

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
        for path, source in list(self._source.items()):
            if source is None and os.path.lexists(path) and not os.path.lexists(self.folder + path):
                yield "remove", path, 0
            elif source is not None and source != path:
                yield f"move {source} to", path, 0


def _is_device(place: str) -> bool:
    """Returns whether a place is a device such as /dev/null, or a file of the kernel's, which no write changes."""
    try:
        return stat.S_ISCHR(os.stat(place).st_mode) or Path(place).parts[:2] == ("/", "proc")
    except OSError:
        return False


def _error(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)
