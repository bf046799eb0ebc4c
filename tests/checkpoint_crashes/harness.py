"""Draws rounds of kills, power cuts and flipped bits, runs them, and returns what went wrong."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_crashes.contents import problems_after_restart, problems_of
from checkpoint_crashes.power import Call, Disk, read_trace

HERE = Path(__file__).parent
ANSWER_LIMIT_S = 180.0


def build_shim(folder: Path) -> Path:
    """Compiles the shim with the C compiler that builds the package."""
    library = folder / "disk_shim.so"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler: install gcc, or point CC at yours"
    source = HERE / "disk_shim.c"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=120)
    return library


def shim_environment(library: Path) -> dict[str, str]:
    """Returns the environment of a process under the shim that forks later, and so starts no threads of its own."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, **single, "LD_PRELOAD": str(library), "PYTHONPATH": path}


class Server:
    """Runs rounds in processes under the shim; see work.py."""

    def __init__(self, library: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "checkpoint_crashes.work"],
            env=shim_environment(library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.kill()
        self._process.wait(60)
        self._process.stdout.close()

    def run(self, plan: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write((json.dumps(plan) + "\n").encode())
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_LIMIT_S)
            assert ready, f"no answer within {ANSWER_LIMIT_S:g} s to {plan}"
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, f"the server ended in the round {plan}"
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer


def kill_rounds(server: Server, folder: Path, seeds: range, world_size: int) -> Iterator[tuple[int, bool, list[str]]]:
    """Kills a run once per seed, and restarts it in the same directory. Yields (seed, was killed, problems).

    Three of four rounds kill at a random system call, before, within or after it; the others after a random time. The
    rounds repeat with their first seed and number, except for the order of concurrent writes.
    """
    directory = folder / f"kills-{world_size}"
    directory.mkdir()
    plan = {"directory": str(directory), "world_size": world_size}
    acknowledged, first = 0, 1
    calls = 60
    for seed in seeds:
        draw = random.Random(seed)
        one: dict[str, Any] = {**plan, "acknowledged": acknowledged, "first": first, "seed": seed}
        one["store"] = str(folder / f"store-{world_size}-{seed}")
        if draw.random() < 0.75:
            one["kill"] = {
                "rank": draw.randrange(world_size),
                "at": draw.randrange(calls),
                "phase": draw.choice(("before", "within", "after")),
                "early": draw.random() < 0.5,
            }
        else:
            one["kill_after_s"] = draw.choice((0.02, 0.1))
        answer = server.run(one)
        acknowledged = max(acknowledged, answer["acknowledged"])
        first = acknowledged + 1 + draw.randrange(3)
        calls = max(calls, answer["calls"])
        Path(one["store"]).unlink(missing_ok=True)
        yield seed, answer["killed"] > 0, answer["problems"]
    yield seeds.stop, False, problems_of(directory, acknowledged, world_size)


def record_saves(server: Server, folder: Path, rounds: int) -> tuple[str, list[Call]]:
    """Records the system calls of several runs in one directory, each of three saves. Returns (directory, calls)."""
    directory = folder / "recorded"
    directory.mkdir()
    calls: list[Call] = []
    for index in range(rounds):
        trace = folder / f"trace-{index}"
        plan = {"directory": str(directory), "world_size": 1, "acknowledged": 3 * index, "first": 3 * index + 1}
        answer = server.run({**plan, "trace": str(trace)})
        assert not answer["problems"], answer["problems"]
        calls += read_trace(trace)
        trace.unlink()
    return str(directory), calls


def cut_rounds(directory: str, calls: list[Call], folder: Path, seeds: range) -> Iterator[tuple[int, list[str]]]:
    """Cuts the power at a random call per seed, and restarts from a random disk state. Yields (seed, problems)."""
    points = sorted((random.Random(seed).randrange(len(calls) + 1), seed) for seed in seeds)
    disk, at, acknowledged = Disk(directory), 0, 0
    for point, seed in points:
        while at < point:
            if calls[at].kind == "mark":
                acknowledged = calls[at].number
            disk.replay(calls[at])
            at += 1
        state = folder / f"cut-{seed}"
        draw = random.Random(f"state {seed}")
        disk.write_state(state, draw)
        problems = problems_after_restart(state, acknowledged)
        yield seed, [f"call {point}: {problem}" for problem in problems]
        shutil.rmtree(state)
