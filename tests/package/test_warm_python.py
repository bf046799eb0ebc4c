"""Tests that the tests' warm interpreter behaves as `python` does, and is one where a fork would not."""

from __future__ import annotations

import marshal
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from namespaces import needs_namespaces
from warm_python import _facts as warm_facts
from warm_python import warm_python

TIMEOUT_S = 60
IS_WARM = "import sys; print('torch' in sys.modules)"


def outcome(python: str, arguments: list[str], folder: Path, **environ: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [python, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import sys; print(sys.argv, sys.path[0], __name__, sys.orig_argv[1:])", "a", "-b"],
        ["script.py", "a", "-b"],
        ["-u", "script.py"],
        ["-m", "module", "a", "-b"],
        ["-c", "print(input())"],
        ["-c", "import sys; sys.exit(3)"],
        ["-c", "import sys; sys.exit('a text')"],
        ["-c", "def f():\n    1 / 0\nf()"],
        ["-c", "raise KeyboardInterrupt"],
        ["-c", "import os; os.kill(os.getpid(), 9)"],
        ["-c", "import os; os.abort()"],
        ["-c", "import atexit, threading; atexit.register(print, 'end'); threading.Thread(target=print).start()"],
        ["-c", "import os; print(os.environ['GIVEN'], os.getcwd())"],
        ["-c", "import torch; print(torch.get_num_threads())"],
        ["-c", "class Last:\n    def __del__(self):\n        print('deleted')\nlast = Last()\nprint('end')"],
        ["-c", "import os, sys; os.close(1); print('lost')"],
        ["-W", "error", "-c", "print(1)"],
        ["no_such_script.py"],
    ],
    ids=str,
)
def test_it_behaves_as_python(arguments: list[str], tmp_path: Path) -> None:
    text = "import sys\nprint(sys.argv, sys.path[0], __name__, __file__, flush=True)\nsys.stdout.write('x')\n1 / 0\n"
    for name in ("script.py", "module.py"):
        (tmp_path / name).write_text(text)
    expected = outcome(sys.executable, arguments, tmp_path, GIVEN="value")
    code, out, error = outcome(warm_python(), arguments, tmp_path, GIVEN="value")
    assert (code, out) == expected[:2]
    assert error == expected[2]


def test_a_whole_end_calls_what_libraries_have_registered() -> None:
    program = "import ctypes\nc = ctypes.CDLL(None)\nc.strdup.restype = ctypes.c_void_p\n"
    program += "c.__cxa_atexit(c.puts, ctypes.c_void_p(c.strdup(b'called')), None)"
    said = [outcome(warm_python(has_whole_end=is_whole), ["-c", program], Path())[1] for is_whole in (False, True)]
    assert said == ["", "called\n"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_it(number: signal.Signals) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(
        [warm_python(), "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        fork = int(process.stdout.readline())
        assert fork != process.pid
        (ignored,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{fork}/status").read_text())
        if int(ignored, 16) >> (number - 1) & 1:  # a shell starts background jobs so, and the server inherits it
            process.kill()
            pytest.skip(f"the server ignores {number.name}, as the job does that started it")
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == -number


def test_it_dies_with_its_program() -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([warm_python(), "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        fork = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        assert not process.stdout.read()  # ends once the fork has closed it
    os.close(fork)


@pytest.mark.parametrize("is_whole", [False, True], ids=["a part of its request", "its request"])
def test_its_server_outlives_a_program_that_has_gone(is_whole: bool) -> None:
    folder = Path(warm_python()).parent
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wanted = (warm_facts(), (False, "-c", ["pass"]), f"{folder}/python", ["-c", "pass"], variables, str(Path.cwd()))
    request = marshal.dumps(wanted)
    with socket.socket(socket.AF_UNIX) as program:
        program.connect(f"{folder}/server")
        socket.send_fds(program, [len(request).to_bytes(8, "little")], [0, 1, 2])
        program.sendall(request if is_whole else request[:9])
    done = subprocess.run([warm_python(), "-c", IS_WARM], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("options", "is_warm"),
    [
        ({}, True),
        ({"start_new_session": True}, True),
        ({"process_group": 0}, False),
        ({"pass_fds": [1]}, True),
        ({"env": {"TORCHINDUCTOR_CACHE_DIR": "/tmp"}}, True),
        ({"env": {"KMP_INIT_AT_FORK": "FALSE", "KMP_DUPLICATE_LIB_OK": "True"}}, True),
        ({"env": {"PYTHONHASHSEED": "0"}}, True),
        ({"env": {"PYTHONHASHSEED": "3"}}, False),
        ({"env": {"LD_PRELOAD": "libm.so.6"}}, False),
        ({"preexec_fn": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)}, False),
        ({"preexec_fn": lambda: os.nice(1)}, False),
        ({"preexec_fn": lambda: os.sched_setaffinity(0, {0})}, False),
    ],
    ids=[
        "plain",
        "session",
        "group",
        "no file",
        "cache",
        "scikit-learn",
        "own hash seed",
        "hash seed",
        "preload",
        "sigterm",
        "nice",
        "affinity",
    ],
)
def test_it_is_plain_python_where_a_fork_would_differ(options: dict[str, Any], is_warm: bool) -> None:
    if "preexec_fn" in options and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one core, to which every process is bound")
    if "env" in options:
        options = {"env": {**os.environ, **options["env"]}}
    done = subprocess.run([warm_python(), "-c", IS_WARM], capture_output=True, text=True, timeout=TIMEOUT_S, **options)
    assert done.stdout.strip() == str(is_warm), done.stderr


@pytest.mark.parametrize(("space", "is_warm"), [("net", True), ("mount", True), ("uts", True), ("ipc", False)])
def test_it_joins_namespaces(space: str, is_warm: bool) -> None:
    enter = ["unshare", f"--{space}"]
    needs_namespaces(*enter, "true")
    name = {"mount": "mnt"}.get(space, space)
    here = os.readlink(f"/proc/self/ns/{name}")  # noqa: PTH115
    code = (
        f"{IS_WARM}; import os; print(os.readlink('/proc/self/ns/{name}') == '{here}', os.getcwd() == '{Path.cwd()}')"
    )
    done = subprocess.run([*enter, warm_python(), "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.split() == [str(is_warm), "False", "True"], done.stderr


def test_it_gets_the_files_that_are_passed_on() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as output:
        subprocess.run(
            [warm_python(), "-c", f"import os; os.write({writer}, b'here')"], pass_fds=[writer], timeout=TIMEOUT_S
        )
        os.close(writer)
        assert output.read() == "here"
