"""Tests that the monitor names the rank, the phase and the line of each kind of hang, with three engines."""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from loops import Kept, make_batches, make_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import drivetrain
from drivetrain.monitor import Monitor
from effort import IS_WHOLE, rounds
from polling import wait_until

LIMIT_S, WAIT_S = 1.0, 30.0
ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "drivetrain": lambda model: drivetrain.DistributedDataParallel(model, report_hang_after=0),
    "torch": nn.parallel.DistributedDataParallel,
    "fsdp": lambda model: fully_shard(model),
}


class Stage:
    """What a kind of hang may use. The door is open once rank 0 has reported the hang."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.door = folder, folder / "door"
        self.group = dist.new_group()  # type: ignore[no-untyped-call]
        self.store = dist.distributed_c10d._get_default_store().clone()

    def is_open(self) -> bool:
        return self.door.exists()

    def when_open(self, action: Callable[[], object]) -> None:
        """Calls the action in a thread, once the door is open."""

        def run() -> None:
            wait_until(self.is_open, "open door", WAIT_S)
            action()

        threading.Thread(target=run, daemon=True).start()


class Kind(NamedTuple):
    place: str  # where rank 1 strikes; "step": between backward and the optimizer, "after": behind its last batch
    stand: Callable[[Stage], None]  # stands still on rank 1 until the door is open
    help: Callable[[Stage], object] = bool  # what rank 0 does once the door is open


# ---- What rank 1 does. The marked line is the one to be named.


def poll(stage: Stage) -> None:
    while not stage.is_open():
        time.sleep(0.01)  # marked: poll


def lock(stage: Stage) -> None:
    held = threading.Lock()
    held.acquire()
    stage.when_open(held.release)
    held.acquire()  # marked: lock


def condition(stage: Stage) -> None:
    event = threading.Event()
    stage.when_open(event.set)
    event.wait()  # marked: condition


def full_queue(stage: Stage) -> None:
    lines: queue.Queue[int] = queue.Queue(1)
    lines.put(1)
    stage.when_open(lines.get)
    lines.put(2)  # marked: full_queue


def joined_thread(stage: Stage) -> None:
    thread = threading.Thread(target=wait_until, args=(stage.is_open, "open door", WAIT_S))
    thread.start()
    thread.join()  # marked: joined_thread


def child_process(stage: Stage) -> None:
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
    subprocess.run([sys.executable, "-S", "-c", code, stage.door], check=True)  # marked: child_process


def silent_server(stage: Stage) -> None:
    ours, theirs = socket.socketpair()
    stage.when_open(lambda: theirs.send(b"answer"))
    ours.recv(6)  # marked: silent_server


def file_lock(stage: Stage) -> None:
    with (stage.folder / "lock").open("w") as ours, (stage.folder / "lock").open("w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        stage.when_open(lambda: fcntl.flock(theirs, fcntl.LOCK_UN))
        fcntl.flock(ours, fcntl.LOCK_EX)  # marked: file_lock


def unread_pipe(stage: Stage) -> None:
    path = stage.folder / "checkpoint"
    os.mkfifo(path)
    stage.when_open(lambda: path.read_bytes())
    path.write_bytes(bytes(8))  # marked: unread_pipe
    path.unlink()


def debugger(stage: Stage) -> None:
    ours, theirs = os.pipe()
    stage.when_open(lambda: os.write(theirs, b"continue\n"))
    os.read(ours, 9)  # marked: debugger


def finalizer(stage: Stage) -> None:
    class Held:
        def __del__(self) -> None:
            while not stage.is_open():
                time.sleep(0.01)  # marked: finalizer

    Held()


def swallowed_error(stage: Stage) -> None:
    while True:
        try:
            return stage.door.read_bytes() and None
        except OSError:
            time.sleep(0.01)  # marked: swallowed_error


def lone_barrier(stage: Stage) -> None:
    dist.barrier(stage.group)  # marked: lone_barrier


def lone_receive(stage: Stage) -> None:
    dist.recv(torch.ones(1), 0, stage.group)  # marked: lone_receive


def missing_key(stage: Stage) -> None:
    stage.store.get(stage.folder.name)  # marked: missing_key


def held_lock(stage: Stage) -> None:
    """Holds Python's lock inside of a C function until a signal comes."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal_when_open(stage, signal.SIGALRM)
    ctypes.PyDLL(None).pause()
    signal.signal(signal.SIGALRM, before)


def stopped(stage: Stage) -> None:
    signal_when_open(stage, signal.SIGCONT)
    os.kill(os.getpid(), signal.SIGSTOP)


def signal_when_open(stage: Stage, number: int) -> None:
    """Lets another process send the signal, as no thread of this one runs."""
    code = (
        "import os, sys, time\nend = time.monotonic() + 60\n"
        "while not os.path.exists(sys.argv[1]) and time.monotonic() < end: time.sleep(0.02)\n"
        "os.kill(int(sys.argv[2]), int(sys.argv[3]))"
    )
    subprocess.Popen([sys.executable, "-S", "-c", code, stage.door, str(os.getpid()), str(int(number))])


KINDS = {
    "loader": Kind("data", poll),
    "server of a loader": Kind("data", silent_server),
    "child of a loader": Kind("data", child_process),
    "forward": Kind("forward", poll),
    "lock in forward": Kind("forward", lock),
    "finalizer in forward": Kind("forward", finalizer),
    "barrier of one rank": Kind("forward", lone_barrier, lambda stage: dist.barrier(stage.group)),
    "key that nobody sets": Kind("forward", missing_key, lambda stage: stage.store.set(stage.folder.name, "1")),
    "Python's lock in C": Kind("forward", held_lock),
    "stopped process": Kind("forward", stopped),
    "hook in backward": Kind("backward", poll),
    "event in backward": Kind("backward", condition),
    "receive without a send": Kind("backward", lone_receive, lambda stage: dist.send(torch.ones(1), 1, stage.group)),
    "download in the optimizer": Kind("optimizer", swallowed_error),
    "thread in the optimizer": Kind("optimizer", joined_thread),
    "full queue of a logger": Kind("optimizer", full_queue),
    "lock of a file": Kind("step", file_lock),
    "checkpoint that nobody reads": Kind("step", unread_pipe),
    "debugger": Kind("step", debugger),
    "evaluation of one rank": Kind("after", poll),
    "fewer batches": Kind("after", condition),
    "report after the loop": Kind("after", child_process),
}
PLACES = {
    "data": "in the phase 'waiting for data' at",
    "forward": "in the phase 'forward and loss' at",
    "backward": "in the phase 'backward' at",
    "optimizer": "in the phase 'clipping and optimizer' at",
    "step": "in the phase 'everything else' at",
    "after": "outside of a step, at",
}


def expected(kind: Kind) -> str:
    """Returns what rank 0 has to say of rank 1."""
    if kind.stand in (held_lock, stopped):
        return "rank 1 has not been heard of for "
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith(f"# marked: {kind.stand.__name__}"))
    return f"rank 1 is {PLACES[kind.place]} monitor/test_hang_kinds.py:{line} in "


# ---- A loop in which rank 1 stands still once.


class Strike:
    """Stands still at one place of rank 1's fourth step, or behind its third."""

    def __init__(self, stage: Stage, kind: Kind) -> None:
        self.stage, self.kind, self.step, self.is_over = stage, kind, 0, dist.get_rank() != 1

    def at(self, place: str) -> None:
        if not self.is_over and place == self.kind.place and self.step == 3:
            self.is_over = True
            self.kind.stand(self.stage)


class Last(nn.Linear):
    """Strikes in forward and in backward."""

    def __init__(self, strike: Strike) -> None:
        super().__init__(4, 4)
        self.strike_at = strike.at

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.strike_at("forward")
        output = super().forward(input)
        output.register_hook(lambda grad: self.strike_at("backward"))
        return output


class SGD(torch.optim.SGD):
    strike_at: Callable[[str], None]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.strike_at("optimizer")
        return super().step(*args, **kwargs)


def train(folder: Path, engine: str, name: str, limit_s: float | None) -> tuple[str, float]:
    """Returns rank 0's report that says what is expected, or else its last one, and its seconds of waiting."""
    stage, kind = Stage(folder), KINDS[name]
    strike = Strike(stage, kind)
    model = ENGINES[engine](nn.Sequential(make_model(), Last(strike)))
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.strike_at = strike.at
    kept, batches = Kept(), make_batches(6)

    def loop(batches: Iterable[Any]) -> None:
        for inputs, targets in monitor(batches):
            nn.functional.mse_loss(model(inputs), targets).backward()
            strike.at("step")
            optimizer.step()
            optimizer.zero_grad()
            strike.step += 1

    def stalling(batches: list[Any]) -> Iterator[Any]:
        for batch in batches:
            strike.at("data")
            yield batch

    with Monitor(model, optimizer, to=[kept], progress=False, report_hang_after=limit_s) as monitor:
        if dist.get_rank() == 0:
            has_reported = lambda: monitor.hang is not None and expected(kind) in monitor.hang.text  # noqa: E731
            opener = threading.Thread(target=open_door, args=(stage, kind, has_reported))
            opener.start()
            loop(batches)
            opener.join()
        elif kind.place == "after":
            loop(batches[:3])
            strike.at("after")
            loop(batches[3:])
        else:
            loop(stalling(batches))
    return ("", 0.0) if monitor.hang is None else (monitor.hang.text, monitor.hang.seconds)


def open_door(stage: Stage, kind: Kind, has_reported: Callable[[], bool]) -> None:
    """Opens the door after the report, or after the limit, so that the ranks end."""
    try:
        wait_until(has_reported, "report", WAIT_S)
    finally:
        stage.door.touch()
        kind.help(stage)


def train_all(
    folder: Path, engine: str, names: list[str], limit_s: float | None = LIMIT_S
) -> dict[str, tuple[str, float]]:
    return {name: train(folder / str(number), engine, name, limit_s) for number, name in enumerate(names)}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_kind_of_hang_is_named(on_ranks: Callable[..., list[Any]], tmp_path: Path, engine: str) -> None:
    # All engines meet all kinds in `make test WHOLE=1`, and each kind meets one engine otherwise.
    names = list(KINDS)[0 if IS_WHOLE else list(ENGINES).index(engine) :: 1 if IS_WHOLE else len(ENGINES)]
    reports, _ = on_ranks(train_all, tmp_path, engine, names)
    wrong = {name: text for name, (text, _) in reports.items() if expected(KINDS[name]) not in text}
    assert not wrong


def wait_after_the_loop(folder: Path) -> str:
    """Rank 0 waits outside of a step for rank 1, as for its evaluation."""
    stage, kind, model = Stage(folder), KINDS["evaluation of one rank"], make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, progress=False, report_hang_after=0.3) as monitor:
        for inputs, targets in monitor(make_batches(3)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            has_reported = lambda: monitor.hang is not None and expected(kind) in monitor.hang.text  # noqa: E731
            opener = threading.Thread(target=open_door, args=(stage, kind, has_reported))
            opener.start()
            dist.barrier(stage.group)
            opener.join()
        else:
            kind.stand(stage)
            dist.barrier(stage.group)
    return "" if monitor.hang is None else monitor.hang.text


def test_a_wait_for_ranks_is_reported_outside_of_steps(on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    report, stood = on_ranks(wait_after_the_loop, tmp_path)
    assert re.match(r"rank 0 has stood still for \d+ s in step 4, outside of a step, at monitor/test_hang_k", report)
    assert stood == ""  # it waits for no rank, and may evaluate


# ---- Healthy steps.


def train_in_peace(engine: str, steps: int) -> list[Any]:
    model = ENGINES[engine](make_model())
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), Kept()
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        for inputs, targets in monitor(make_batches(steps)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [event for event in kept.events if event["type"] == "hang"]


@pytest.mark.parametrize("engine", ENGINES)
def test_healthy_steps_are_not_reported(on_ranks: Callable[..., list[Any]], engine: str) -> None:
    assert on_ranks(train_in_peace, engine, rounds(300, 10_000)) == [[], []]
