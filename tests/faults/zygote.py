"""Forks ranks from a process that has imported torch, so that they start in milliseconds instead of seconds.

Speaks lines of JSON with the harness: takes {"folder", "rank", "plan", "room", "host"}, or {"folder", "room_bytes"} for
the process that holds a /dev/shm; answers {"pid"}, and later, when that process has ended, {"pid", "code", "ended"}. A
rank ends as a script does: its exception goes to stderr and the interpreter shuts down.
"""

import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it when they are first used, for more than a second
import torch.profiler

from faults import hosts, room, training
from faults.plan import Round

_PR_SET_PDEATHSIG = 1


def serve() -> dict[str, Any] | None:
    """Answers requests until the harness closes the pipe; then returns None. A forked process returns its task."""
    children: dict[int, int] = {}  # by the descriptor that becomes readable when it ends
    pending = b""
    while True:
        readable, _, _ = select.select([0, *children], [], [])
        for descriptor in readable:
            if descriptor in children:
                pid = children.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                answer(pid=pid, code=code, ended=time.monotonic())
                continue
            data = os.read(0, 65536)
            if not data:
                return end(children)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    for other in children:
                        os.close(other)
                    return json.loads(line)
                children[os.pidfd_open(pid)] = pid
                answer(pid=pid)


def answer(**facts: float) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def end(children: dict[int, int]) -> None:
    for descriptor, pid in children.items():
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.waitpid(pid, 0)


def become(request: dict[str, Any]) -> None:
    """Runs the task of a forked process."""
    folder = Path(request["folder"])
    os.setsid()  # by which the harness finds whatever this process leaves behind
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    name = f"rank-{request['rank']}" if "rank" in request else "room"
    with (folder / f"{name}.txt").open("wb") as output, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if "rank" not in request:
        room.hold(request["room_bytes"], folder)
        return
    if request["room"] is not None:
        room.enter(request["room"])
    if request["host"] is not None:
        hosts.enter(request["host"])
    training.train(Round(**request["plan"]), request["rank"], folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # Otherwise a rank's shutdown spends half a second on the imported objects.
    if (request := serve()) is not None:
        become(request)
    sys.exit()
