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

from checkpoint_crashes.contents import KEEP, KEYS, Round, problems_after_restart, problems_of, step_of, tensors_of
from checkpoint_crashes.power import Call, Disk, read_trace
from drivetrain.checkpointing import Encryption, Store
from drivetrain.checkpointing.store.reading import complete_checkpoints, find_checkpoints

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
        self._process.stdin.close()
        self._process.kill()
        self._process.wait(60)
        self._process.stdout.close()

    def run(self, plan: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write((json.dumps(plan) + "\n").encode())
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_LIMIT_S)
            assert ready, f"no answer within {ANSWER_LIMIT_S:g} s to {plan}"
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, f"the server ended in the round {plan}"
            line += piece
        return json.loads(line)


def kill_rounds(
    server: Server, folder: Path, seeds: range, world_size: int, is_encrypted: bool = False
) -> Iterator[Round]:
    """Kills a run once per seed, and restarts it in the same directory. Yields (seed, was killed, problems).

    Three of four rounds kill at a random system call, before, within or after it; the others after a random time. The
    rounds repeat with their first seed and number, except for the order of concurrent writes.
    """
    directory = folder / f"kills-{world_size}-{is_encrypted}"
    directory.mkdir()
    plan = {"directory": str(directory), "world_size": world_size, "is_encrypted": is_encrypted}
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
    yield seeds.stop, False, problems_of(directory, acknowledged, world_size, KEYS if is_encrypted else None)


def record_saves(server: Server, folder: Path, rounds: int, is_encrypted: bool = False) -> tuple[str, list[Call]]:
    """Records the system calls of several runs in one directory, each of three saves. Returns (directory, calls)."""
    directory = folder / f"recorded-{is_encrypted}"
    directory.mkdir()
    calls: list[Call] = []
    for index in range(rounds):
        trace = folder / f"trace-{index}"
        plan = {"directory": str(directory), "world_size": 1, "acknowledged": 3 * index, "first": 3 * index + 1}
        answer = server.run({**plan, "trace": str(trace), "is_encrypted": is_encrypted})
        assert not answer["problems"], answer["problems"]
        calls += read_trace(trace)
        trace.unlink()
    return str(directory), calls


def cut_rounds(
    directory: str, calls: list[Call], folder: Path, seeds: range, is_encrypted: bool = False
) -> Iterator[Round]:
    """Cuts the power at a random call per seed, and restarts from a random disk state."""
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
        problems = problems_after_restart(state, acknowledged, KEYS if is_encrypted else None)
        yield seed, True, [f"call {point}: {problem}" for problem in problems]
        shutil.rmtree(state)


def flip_rounds(folder: Path, seeds: range, is_encrypted: bool = False) -> Iterator[Round]:
    """Flips one random bit of a random file of a checkpoint per seed. Yields (seed, True, problems).

    `verify` or the search for checkpoints must find each flip, and name the file. For a bit of a tensor, `verify` must
    also name the tensor and the chunk, and loading must fail. Without a key, only `verify` finds a bit of a tensor.
    """
    directory, encryption = folder / f"flips-{is_encrypted}", KEYS if is_encrypted else None
    with Store(directory, keep=None, timeout=60, encryption=encryption) as store:
        for count in range(1, KEEP + 3):
            store.save(step_of(count), tensors_of(count), {"count": count}).result(60)
    files = sorted(path for path in directory.glob("step-*/*") if path.is_file())
    for seed in seeds:
        draw = random.Random(seed)
        path = draw.choice(files)
        with path.open("r+b") as stream:
            at = draw.randrange(path.stat().st_size)
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 1 << draw.randrange(8)]))
        problems = [problem for keys in {encryption, None} for problem in _missed_flip(path, at, keys)]
        yield seed, True, [f"{path}, byte {at}: {problem}" for problem in problems]
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes([byte]))
    yield seeds.stop, True, problems_of(directory, KEEP + 2, encryption=encryption)


def _missed_flip(path: Path, at: int, encryption: Encryption | None) -> list[str]:
    directory, name = path.parent.parent, path.name
    errors = [str(found) for found in find_checkpoints(directory, encryption) if isinstance(found, Exception)]
    if errors:
        return [] if len(errors) == 1 and name in errors[0] else [f"the errors do not name it alone: {errors}"]
    if not name.endswith(".safetensors"):
        return ["no error"]
    (checkpoint,) = (found for found in complete_checkpoints(directory, encryption) if found.path == path.parent)
    faults = checkpoint.verify()
    entries = checkpoint._parts[0].entries
    tensors = {tensor for tensor, entry in entries.items() if entry.begin <= at < entry.end}
    if [(fault.file, fault.chunk) for fault in faults] != [(name, at >> 22)] or not tensors <= set(faults[0].tensors):
        return [f"verify() returned {faults}, expected one fault that names {tensors} and chunk {at >> 22}"]
    if not tensors:  # of an encrypted file without a key, or of its header, which the record has
        return [] if checkpoint.key_id is not None else ["no tensor has this byte"]
    (tensor,) = tensors
    try:
        checkpoint.load([tensor])
    except Exception as error:
        return [] if tensor in str(error) and name in str(error) else [f"load() raised {error}"]
    return ["load() raised nothing"]
