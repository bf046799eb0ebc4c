"""`Shadow`: lets a script run that writes nothing, starts no program and reaches no server, and lists what it tried.

Python's own doors to files lead into an `Overlay` while a `Shadow` is active. A write that has no such door meets
Python's audit events, and is refused. This needs no rights and no support of the kernel, so that it holds in containers
and notebooks too.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import ipaddress
import multiprocessing.util
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .overlay import Overlay, is_device, writes

_HIGHER_CLASSES = ("pathlib", "glob", "tempfile", "shutil")  # whose classes hold functions of os
_OF_MODE = {"r": os.O_RDONLY, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}
_READERS = ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr", "chdir")
_CHANGERS = ("mkdir", "rmdir", "remove", "unlink", "truncate", "link", "symlink", "rename", "replace")
_CHANGES = ("remove", "rmdir", "mkdir", "truncate", "chmod", "chown", "utime", "setxattr", "removexattr", "mknod")
_PROGRAMS = ("os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn", "os.system")
_LOCAL = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0")


class Refused(PermissionError):
    """A script did what nothing stands in for, and what it may not do."""


class Shadow:
    """Keeps a script from writing, from `begin` until the process ends, in all threads and in forks of the process.

    Nothing ends it, because threads of a script may write after its main thread was stopped. `lifted` is for the
    caller's own work.

    Files that the script writes, changes, moves and removes are kept in an overlay, where it finds them again. Programs
    that it starts do nothing, print nothing and succeed. Connections are refused as if no server was there. All other
    writes that Python knows of raise `Refused`. Writes of native libraries that open files by themselves are not seen;
    `place` and `read_place` are for stand-ins of those.

    Args:
        folder: An empty folder for what is written.
        whose: Names the script in errors.
    """

    def __init__(self, folder: str, whose: str = "a planned script") -> None:
        self.overlay = Overlay(folder)
        self.programs: list[str] = []
        self.servers: list[str] = []
        self._whose = whose
        self._local = threading.local()

    def begin(self) -> None:
        """Stands in for the doors to files, programs and servers from now on."""
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # rmtree by paths
        rebind(self._replacements())
        subprocess.Popen.__init__ = self._popen_init(subprocess.Popen.__init__)  # type: ignore[method-assign]
        multiprocessing.util.spawnv_passfds = self._spawn(multiprocessing.util.spawnv_passfds)
        sys.dont_write_bytecode = True
        sys.addaudithook(self._audit())

    # ---- For stand-ins.

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Lets this thread reach the machine's files, for the caller's own work."""
        before, self._local.is_lifted = self._is_lifted(), True
        try:
            yield
        finally:
            self._local.is_lifted = before

    def place(self, name: str | os.PathLike[str], flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> str:
        """Returns the file that a library may open in place of the one that it was to write."""
        with self.lifted():
            return self.overlay.opened(os.fspath(name), flags)

    def read_place(self, name: str | os.PathLike[str]) -> str:
        """Returns the file that has the contents of a path."""
        with self.lifted():
            return self.overlay.place(os.fspath(name))

    def note_bytes(self, name: str, num_bytes: int) -> None:
        """Adds bytes to a written file that it would have had."""
        with self.lifted():
            path = self.overlay.path(name)
            self.overlay.unseen_bytes[path] = self.overlay.unseen_bytes.get(path, 0) + num_bytes

    def _is_lifted(self) -> bool:
        return getattr(self._local, "is_lifted", False)

    # ---- Doors to files.

    def _replacements(self) -> dict[Any, Any]:
        overlay = self.overlay

        def read(
            plain: Any, path: str = ".", *args: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **how: Any
        ) -> Any:
            follows = follow_symlinks and plain.__name__ not in ("lstat", "readlink")
            how |= {} if follow_symlinks else {"follow_symlinks": False}
            return plain(overlay.place(path, follows=follows, dir_fd=dir_fd), *args, **how)

        def change(plain: Any, *args: Any, **how: Any) -> None:
            name = {"unlink": "remove", "replace": "rename"}.get(plain.__name__, plain.__name__)
            getattr(overlay, name)(*args, **how)

        stands: dict[str, Callable[..., Any]] = {
            "open": lambda plain, path, flags, mode=0o777, *, dir_fd=None: plain(
                overlay.opened(path, flags, dir_fd), flags, mode
            ),
            "listdir": lambda plain, path=".": overlay.names(path),
            "scandir": self._scandir,
            "getcwd": lambda plain: overlay.seen(plain()),
            "getcwdb": lambda plain: os.fsencode(overlay.seen(os.fsdecode(plain()))),
            "system": lambda plain, command: self._start(command) and 0,
        }
        stands |= dict.fromkeys(_READERS, read) | dict.fromkeys(_CHANGERS, change)
        stands |= dict.fromkeys(("chmod", "chown", "lchown", "utime", "setxattr", "removexattr"), self._set_facts)
        found: dict[Any, Any] = {
            getattr(os, name): self._by_path(getattr(os, name), function)
            for name, function in stands.items()
            if hasattr(os, name)
        }
        found[builtins.open] = self._open(builtins.open)
        return found

    def _by_path(self, plain: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that takes the place of one of `os`. Open files, which are numbers, stay as they are."""
        names = {"path", "src", "dst"}

        @functools.wraps(plain)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            first = (
                args[0] if args else next((kwargs[name] for name in ("path", "src", "command") if name in kwargs), None)
            )
            if self._is_lifted() or isinstance(first, int):
                return plain(*args, **kwargs)
            is_bytes = isinstance(first, bytes)
            args = (*map(_text, args[:2]), *args[2:])
            kwargs = {name: _text(value) if name in names else value for name, value in kwargs.items()}
            with self.lifted():
                result = function(plain, *args, **kwargs)
            if is_bytes and isinstance(result, str):
                return os.fsencode(result)
            return [os.fsencode(each) for each in result] if is_bytes and isinstance(result, list) else result

        return wrapper

    def _open(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def wrapper(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            opener = args[5] if len(args) > 5 else kwargs.get("opener")
            if self._is_lifted() or isinstance(file, int) or not isinstance(mode, str):
                return plain(file, mode, *args, **kwargs)
            if opener is not None:  # it calls os.open, or returns an open file
                self._local.is_announced = True
                try:
                    return plain(file, mode, *args, **kwargs)
                finally:
                    self._local.is_announced = False
            flags = next((_OF_MODE[letter] for letter in mode if letter in _OF_MODE), 0)
            if "+" in mode or flags:
                flags |= os.O_RDWR if "+" in mode else os.O_WRONLY
            with self.lifted():
                place = self.overlay.opened(_text(file), flags)
                kwargs["opener"] = lambda _, flags: os.open(place, flags | os.O_CLOEXEC, 0o666)
                return plain(file, mode, *args[:5], **kwargs)

        return wrapper

    def _scandir(self, plain: Callable[..., Any], path: str = ".") -> Any:
        is_plain = not self.overlay.is_merged(path) and self.overlay.place(path) == self.overlay.path(path)
        return plain(path) if is_plain else _Entries(self, path)

    def _set_facts(self, plain: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> None:
        """Changes modes and times of files of the overlay, and nothing of the machine's, where no script reads them."""
        kwargs.pop("dir_fd", None)
        place = self.overlay.place(path)
        if self.overlay.is_inside(place) or not os.path.lexists(place):
            plain(place, *args, **kwargs)

    # ---- Programs and servers.

    def _start(self, command: object) -> bool:
        parts = command if isinstance(command, (list, tuple)) else [command]
        self.programs.append(" ".join(os.fsdecode(part) if not isinstance(part, str) else part for part in parts))
        return True

    def _popen_init(self, plain: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def init(popen: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_lifted():
                plain(popen, *args, **kwargs)
                return
            given = signature.bind(popen, *args, **kwargs).arguments
            self._start(given["args"])
            for name in ("executable", "preexec_fn", "shell", "cwd", "user", "group", "extra_groups", "pass_fds"):
                given.pop(name, None)
            given["args"] = [shutil.which("true") or "/bin/true"]
            given.pop("self", None)
            with self.lifted():
                plain(popen, **given)
            popen.args = signature.bind(popen, *args, **kwargs).arguments["args"]

        return init

    def _spawn(self, plain: Callable[..., int]) -> Callable[..., int]:
        """Refuses processes of multiprocessing that are no forks: in them, nothing would stand in for anything."""

        def spawn(path: Any, args: Any, passfds: Any) -> int:
            if not self._is_lifted() and not any("resource_tracker" in _text(arg) for arg in args):
                self._refuse("starts a process of multiprocessing by another method than fork")
            return plain(path, args, passfds)

        return spawn

    def _connect(self, _: object, address: object, *__: object) -> None:
        if _is_path(address) and self.overlay.is_inside(_text(address)):
            return  # between the script's own processes
        self.servers.append(_address(address))
        raise ConnectionRefusedError(
            f"{self._whose} reaches no server, and this one connects to {_address(address)}: connections are refused"
        )

    def _look_up(self, host: object, *_: object) -> None:
        if host is not None and _text(host) not in (*_LOCAL, socket.gethostname()) and not _is_number(_text(host)):
            self.servers.append(_text(host))
            raise socket.gaierror(socket.EAI_NONAME, f"{self._whose} reaches no server, and this one looks up {host}")

    # ---- The net.

    def _audit(self) -> Callable[[str, tuple[Any, ...]], None]:
        checks: dict[str, Callable[..., None]] = {
            "open": self._check_open,
            "socket.connect": self._connect,
            "socket.sendto": self._connect,
            "socket.sendmsg": lambda _, address: None if address is None else self._connect(_, address),
            "socket.getaddrinfo": self._look_up,
            "socket.gethostbyname": self._look_up,
            "socket.bind": lambda _, address: self._check("binds a socket to", address) if _is_path(address) else None,
            "sqlite3.connect": lambda name: None if _is_memory(name) else self._check("opens the data base", name),
            "subprocess.Popen": lambda program, *_: self._refuse(f"starts {program!r}"),
            "os.rename": lambda old, new, *_: self._check("moves to", new),
            "os.link": lambda old, new, *_: self._check("links", new),
            "os.symlink": lambda old, new, *_: self._check("links", new),
        }
        for name in _CHANGES:
            checks[f"os.{name}"] = functools.partial(self._check, f"calls os.{name} for")
        for name in _PROGRAMS:
            checks[name] = lambda program, *_: self._refuse(f"starts {program!r}")

        def hook(event: str, args: tuple[Any, ...]) -> None:
            check = checks.get(event)
            if check is not None and not self._is_lifted():
                with self.lifted():
                    check(*args)

        return hook

    def _check_open(self, name: Any, mode: object, flags: Any) -> None:
        if getattr(self._local, "is_announced", False):
            self._local.is_announced = False
        elif isinstance(name, (str, bytes, os.PathLike)) and writes(flags or 0):
            self._check("writes", name)

    def _check(self, what: str, name: Any, *_: object) -> None:
        """Refuses a change outside of the overlay."""
        try:
            place = os.readlink(f"/proc/self/fd/{name}") if isinstance(name, int) else os.path.abspath(_text(name))
        except OSError:
            place = _text(name)
        if self.overlay.is_inside(place.partition(" (deleted)")[0]) or is_device(place):
            return
        self._refuse(f"{what} {name!r}")

    def _refuse(self, what: str) -> None:
        raise Refused(f"{self._whose} changes nothing, and this one {what} in a way that nothing stands in for")


class _Entries:
    """Is what `os.scandir` returns for a folder that differs from the machine's."""

    def __init__(self, shadow: Shadow, path: str) -> None:
        self._entries = iter([_Entry(path, name) for name in shadow.overlay.names(path)])

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class _Entry:
    """Is an `os.DirEntry`, whose answers come from the functions of `os`."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def _is(self, kind: Callable[[int], bool], follows: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follows).st_mode)
        except FileNotFoundError:
            return False


def rebind(replaced: dict[Any, Any]) -> None:
    """Rebinds every name of a module, and of the classes of some, that is a key to its value."""
    by_id = {id(old): new for old, new in replaced.items()}
    for name, module in list(sys.modules.items()):
        namespace = dict(getattr(module, "__dict__", {}))
        holders: list[tuple[Any, str, Any]]
        holders = [(module, alias, value) for alias, value in namespace.items() if id(value) in by_id]
        for each in namespace.values() if name in _HIGHER_CLASSES else ():
            if isinstance(each, type):
                for alias, value in vars(each).items():
                    bare = value.__func__ if type(value) is staticmethod else value
                    if id(bare) in by_id:
                        holders.append((each, alias, bare))
        for holder, alias, bare in holders:
            new = by_id[id(bare)]
            setattr(holder, alias, staticmethod(new) if isinstance(holder, type) else new)


def _text(path: Any) -> Any:
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    return os.fsdecode(path) if isinstance(path, bytes) else path


def _is_path(address: object) -> bool:
    """Returns whether an address of a socket is a file. Those that begin with a zero have only a name."""
    return isinstance(address, (str, bytes)) and bool(address) and address[:1] not in ("\0", b"\0")


def _is_memory(name: Any) -> bool:
    text = _text(name)
    return not text or ":memory:" in text or "mode=ro" in text or "mode=memory" in text


def _is_number(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _address(address: object) -> str:
    return ":".join(map(str, address[:2])) if isinstance(address, tuple) else str(_text(address))
