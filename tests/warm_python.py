"""Starts Python in milliseconds, with torch and drivetrain imported, for tests that would call sys.executable.

`warm_python()` returns the path of a program that takes Python's arguments. It asks a server of this test process,
which has imported torch, for a fork. The fork runs the arguments as `python` does. The program passes files, folder,
variables and signals on, and dies as the fork dies. If it dies first, the fork is killed.

A fork joins its threads, calls what is registered for its end, deletes the script's objects and ends there. What a
whole end does on top, such as the destructors of libraries, takes a third of a second: has_whole_end=True has it.

The program becomes a plain `python` where a fork would behave differently: with other options than -u, -c and -m, with
inherited files, with variables that are read at the start, in another namespace of processes or users or under another
resource limit than the server, or if the program leads a group in another's session. A fork joins namespaces of
networks and mounts. A program of another session or group than the server's gets a fork that leads a session of its
own. Signals to the program's group reach the fork, but not what the fork has started, unless the program leads its
session, too.
"""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

_HEADER_BYTES = 8
_SPACES = 1  # the place in _facts() of the namespaces
_JOINED = ("mnt", "net", "uts")  # a fork joins these of its program
_SESSION = 5  # the place in _facts() of the session and the group; None for a process that leads a session
_PROGRAM = 2  # its place in a request
_OWN_GROUP = "a group within a session"  # whoever starts a program so means to signal all that it starts
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    *("TORCH_LOGS", "TORCH_CPP_", "TORCH_SHOW_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
# The fork does what the first four ask for. torch and scikit-learn set the others in a process that imports them. torch
# reads its own at each use, and its runtime of OpenMP reads none of scikit-learn's.
_PASSED_ON = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHON_EXEC", "OMP_NUM_THREADS"),
    *("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
_HASH_SEED = "0"  # of all forks; `drivetrain try` asks for it, and who asks for none gets it as well
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# `import drivetrain` imports these when they are first used.
_LATE = [f"drivetrain.{name}" for name in ("budget", "data", "grad.fuse_wgrad", "planner", "recompute", "swap")]
_folders: dict[tuple[str, ...], str] = {}


def warm_python(*modules: str, has_whole_end: bool = False) -> str:
    """Returns the path of the program, whose forks have imported these modules as well.

    The first call for some modules starts their server, which serves all processes of a test run and ends with it.
    """
    if modules not in _folders:
        _folders[modules] = _start(modules)
    return f"{_folders[modules]}/{'whole' if has_whole_end else 'python'}"


def installed_frameworks() -> list[str]:
    """Returns the modules that scripts under frameworks import, as far as they are installed."""
    import importlib.util

    names = ("accelerate", "lightning", "safetensors", "sklearn.datasets", "torch.utils.tensorboard")
    names += ("torchdata.stateful_dataloader", "transformers.trainer", "wandb")
    return [name for name in names if importlib.util.find_spec(name.partition(".")[0])]


def warm_environ(*modules: str) -> dict[str, str]:
    """Returns this process's variables, and the one that makes torchrun start its ranks with that program."""
    return {**os.environ, "PYTHON_EXEC": warm_python(*modules)}


def warm_context() -> Any:
    """Returns multiprocessing's context whose processes fork from one that has imported torch.

    The preloaded process starts with the first of them and ends with this process.
    """
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", *_LATE, "pytest"])
    return context


def _start(modules: tuple[str, ...]) -> str:
    """Returns the folder of the programs of these modules' server, which the first process of a run starts."""
    import fcntl
    import hashlib
    import tempfile

    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    owner = os.getppid() if is_worker else os.getpid()  # the server ends with it
    run = os.environ["PYTEST_XDIST_TESTRUNUID"] if is_worker else str(owner)
    name = hashlib.sha256(repr((run, sys.executable, modules)).encode()).hexdigest()[:16]
    folder = f"{tempfile.gettempdir()}/warm-python-{name}"
    address = f"{folder}/server"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    # The server's own import path has no folder of this process; a fork adds those of its variables.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONHASHSEED"] = _HASH_SEED
    environment["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported, and no test needs its hub
    with open(f"{folder}/lock", "w") as lock, socket.socket(socket.AF_UNIX) as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(address):
            return folder
        for program in ("python", "whole"):
            with open(f"{folder}/{program}", "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
                file.write(f"#!{sys.executable} -IS\nimport sys\nsys.path.append({os.path.dirname(__file__)!r})\n")
                file.write(f"import warm_python\nwarm_python.run_client({address!r}, sys.argv)\n")
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, __file__, str(listener.fileno()), folder, str(owner), *modules]
        listener.set_inheritable(True)
        os.posix_spawn(
            sys.executable, command, environment, file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        )
    return folder


def _facts() -> tuple[Any, ...]:
    """Returns what a fork has of its server and not of the process that asks for it."""
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in (*_JOINED, "ipc", "pid", "user")}
    started = {
        name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START) and name not in _PASSED_ON
    }
    started.setdefault("PYTHONHASHSEED", _HASH_SEED)
    leads = os.getpid() == os.getpgid(0)
    session = (None if os.getsid(0) == os.getpid() else _OWN_GROUP) if leads else (os.getsid(0), os.getpgid(0))
    return limits, spaces, started, sorted(os.sched_getaffinity(0)), os.getuid(), session, os.nice(0)


def _has_inherited_files() -> bool:
    """Returns whether this process was given files that a fork would not have."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                if os.get_inheritable(int(name)):
                    return True
            except OSError:  # the listing's own, which is closed
                continue
    return False


def _parsed(arguments: list[str]) -> tuple[bool, str, list[str]] | None:
    """Returns whether output is unbuffered, the kind of program and sys.argv; None if only `python` can run it."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if arguments[:1] == ["-u"]:
        is_unbuffered, arguments = True, arguments[1:]
    if arguments[:1] in (["-c"], ["-m"]) and len(arguments) > 1:
        return is_unbuffered, arguments[0], arguments[1:]
    if not arguments or arguments[0].startswith("-") or not os.path.isfile(arguments[0]):
        return None
    return is_unbuffered, "", arguments


# ---- The program.


def run_client(address: str, argv: list[str]) -> NoReturn:
    """Asks the server at the address for a fork that runs the arguments, and ends as the fork ends."""
    program, *arguments = argv
    ignores = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a fork would not
    parsed = None if ignores or _has_inherited_files() else _parsed(arguments)
    with socket.socket(socket.AF_UNIX) as connection:
        if parsed is not None:
            connection.connect(address)
            request = marshal.dumps((_facts(), parsed, program, arguments, dict(os.environ), os.getcwd()))
            header = len(request).to_bytes(_HEADER_BYTES, "little")
            socket.send_fds(connection, [header], [0, 1, 2])
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, lambda number, _: connection.send(bytes([number])) and None)
            connection.sendall(request)
        if parsed is None or connection.recv(1) != b"y":
            for number in _SIGNALS:
                if not ignores or number != signal.SIGTERM:
                    signal.signal(number, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, *arguments])
        status = connection.recv(4)
    if len(status) != 4:
        os.write(2, b"the server of warm_python has ended\n")
        os._exit(255)
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---- The server.


def _serve(listener: socket.socket, facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forks for every request until the owner ends. Returns in each fork, with its request."""
    import gc
    import selectors
    import shutil

    gc.freeze()
    owner = os.pidfd_open(int(sys.argv[3]))
    waiting = selectors.DefaultSelector()
    children: dict[int, tuple[int, bool]] = {}  # by connection: a process id, and whether its program leads a session
    with listener:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(owner, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fd == owner:
                    for child, _ in children.values():
                        _send(child, signal.SIGKILL, True)
                    shutil.rmtree(sys.argv[2])
                    os._exit(0)
                elif key.fileobj is listener:
                    connection, _ = listener.accept()
                    request, files = _received(connection)
                    if request is None or not _is_alike(request[0], facts):
                        connection.close()
                        _close(files)
                        continue
                    child = os.fork()
                    if child == 0:
                        waiting.close()
                        os.close(owner)
                        _join_spaces(connection, facts[_SPACES])
                        connection.close()
                        for number, file in enumerate(files):
                            os.dup2(file, number)
                        _close(files)
                        if request[0][_SESSION] != facts[_SESSION]:
                            os.setsid()  # it cannot join the program's session
                        return request
                    _close(files)
                    children[connection.fileno()] = child, request[0][_SESSION] is None
                    waiting.register(connection, selectors.EVENT_READ)
                    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))
                    _answer(connection, b"y")
                elif key.data is not None:
                    child, connection = key.data
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitpid(child, 0)[1]
                    if connection.fileno() >= 0:
                        waiting.unregister(connection)
                        del children[connection.fileno()]
                        _answer(connection, status.to_bytes(4, "little"))
                        connection.close()
                elif key.fileobj.fileno() >= 0:  # its fork did not end in this round
                    connection = key.fileobj
                    try:
                        signals = connection.recv(64)
                    except ConnectionError:  # the program has died without reading the answer
                        signals = b""
                    child, leads = children[connection.fileno()]
                    for number in signals or [signal.SIGKILL]:
                        _send(child, number, leads or not signals)
                    if not signals:  # the program has died
                        waiting.unregister(connection)
                        del children[connection.fileno()]
                        connection.close()


def _is_alike(program: tuple[Any, ...], server: tuple[Any, ...]) -> bool:
    """Returns whether a fork of the server has the facts of the program, but for its session and group."""
    differing = {index for index in range(len(server)) if program[index] != server[index]}
    others = [{**facts[_SPACES], **dict.fromkeys(_JOINED)} for facts in (program, server)]
    return differing <= {_SESSION, _SPACES} and others[0] == others[1] and program[_SESSION] != _OWN_GROUP


def _join_spaces(connection: socket.socket, server: dict[str, str]) -> None:
    """Moves this fork into the namespaces of the program at the other end, as far as the server is in others."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    for name in _JOINED:
        path = f"/proc/{pid}/ns/{name}"
        try:
            own = os.readlink(path)
        except FileNotFoundError:  # the program has died meanwhile
            os._exit(1)
        if own != server[name]:
            with open(path, "rb") as file:
                if libc.setns(file.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), f"setns({path})")


def _answer(connection: socket.socket, data: bytes) -> None:
    """Sends the data. A program that has died gets none: its fork is killed when the server reads its signals."""
    with contextlib.suppress(ConnectionError):
        connection.send(data)


def _send(child: int, number: int, to_group: bool) -> None:
    """Sends a signal to a fork, and to the fork's own group if `to_group` and it leads one."""
    if to_group and os.getpgid(child) == child:
        os.killpg(child, number)
    else:
        os.kill(child, number)


def _received(connection: socket.socket) -> tuple[tuple[Any, ...] | None, list[int]]:
    """Returns the request and the three files of a connection; no request if the program died meanwhile."""
    header, files, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 3)
    missing, parts = int.from_bytes(header, "little"), []
    while missing and (part := connection.recv(missing)):
        parts.append(part)
        missing -= len(part)
    return marshal.loads(b"".join(parts)) if header and not missing else None, files


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


# ---- The fork.


def _become(request: tuple[Any, ...]) -> None:
    """Makes this fork look like a fresh interpreter, and runs the program."""
    import random
    import runpy
    import types

    import numpy as np
    import torch

    _, (is_unbuffered, kind, argv), program, arguments, environment, folder = request
    for file in (0, 1, 2):
        os.set_inheritable(file, True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    np.random.seed()
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"].partition(",")[0]))
    if "TORCH_DISTRIBUTED_DEBUG" in environment:
        torch.distributed.set_debug_level_from_env()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (_output(file, is_unbuffered) for file in (1, 2))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.excepthook = _show
    sys.orig_argv = [sys.executable, *arguments]
    sys.executable = program  # what the program starts is warm, too
    added = environment.get("PYTHONPATH", "")
    sys.path[0:1] = [path or folder for path in added.split(":")] if added else []
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        sys.argv = ["-m", *argv[1:]]
        sys.path.insert(0, folder)
        runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv = ["-c", *argv[1:]]
        sys.path.insert(0, "")
        exec(compile(argv[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
        main.__file__ = argv[0] if os.path.isabs(argv[0]) else os.path.join(folder, argv[0])
        with open(argv[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, main.__dict__)


def _code_of(request: tuple[Any, ...]) -> int:
    """Runs the program, and returns its exit code. What needs an interpreter's own end is raised."""
    try:
        _become(request)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        return error.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends as an interpreter does, without what it and the libraries do to free memory."""
    import gc
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for name, stream in (("<stdout>", sys.stdout), ("<stderr>", sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            code = code or 120
            what = f"<_io.TextIOWrapper name={name!r} mode='w' encoding='utf-8'>"
            print(f"Exception ignored in: {what}\n{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(code & 0xFF)


def _output(file: int, is_unbuffered: bool) -> Any:
    import io

    if is_unbuffered:
        return io.TextIOWrapper(io.FileIO(file, "w", closefd=False), write_through=True)  # type: ignore[type-var]
    buffering = 1 if file == 2 or os.isatty(file) else -1
    return open(file, "w", buffering, errors="backslashreplace" if file == 2 else None, closefd=False)


def _show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints an error without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    import importlib

    facts = _facts()  # before imports, which set variables

    import numpy  # noqa: F401
    import torch._dynamo  # noqa: F401 - torch's optimizers import it on first use, which takes more than a second

    for name in (*_LATE, *sys.argv[4:]):
        importlib.import_module(name)
    request = _serve(socket.socket(fileno=int(sys.argv[1])), facts)
    if request[_PROGRAM].endswith("/whole"):
        _become(request)
    else:
        _end(_code_of(request))
