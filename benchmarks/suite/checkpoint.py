"""Measures checkpoints: bandwidth against dd, torch.save and DCP, memory, flipped bits, costs and resumes."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from drivetrain.bench.measure import Row, median_interval
from drivetrain.checkpointing import CheckpointError, Store

from . import checkpoint_resume, checkpoint_steps, checkpoint_survivors

LIMIT_S = 600.0
FLIPS = 1000
SHARE_OF_DD, SHARE_OF_OTHERS = 0.9, 2.0  # targets of bandwidth


def run(directory: Path | None, rounds: int, gib: float) -> list[Row]:
    """Returns the rows of the topic.

    Args:
        directory: Its disk is measured, in a new folder. None takes the folder for temporary files.
        rounds: Timed rounds of each side.
        gib: Size of the model in GiB.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix="drivetrain-bench-") as name:
        folder = Path(name)
        tensors = _model(int(gib * 2**30))
        rows = _memory(folder / "memory", tensors)
        rows += _bandwidth(folder, tensors, rounds)
        del tensors
        rows.append(_flips(folder / "flips"))
        rows += checkpoint_steps.run(folder, min(rounds, 5))
        rows.append(checkpoint_survivors.run(folder, min(rounds, 5)))
        rows += checkpoint_resume.run(folder)
    return rows


def _model(size: int) -> dict[str, Tensor]:
    """Returns random parameters and moments of that many bytes. Zeros would be unlike weights for some disks."""
    count = max(size // (16 << 20), 1)
    return {f"layers.{i // 3}.{i % 3}": torch.randn(size // count // 4) for i in range(count)}


def _bandwidth(folder: Path, tensors: dict[str, Tensor], rounds: int) -> list[Row]:
    size = sum(tensor.nbytes for tensor in tensors.values())
    raw, memory = folder / "dd", _file_in_memory(folder, size)
    dd_flags: list[tuple[str, ...]] = [("oflag=direct", "conv=fsync"), ("conv=fsync",)]
    store = Store(folder / "ours", keep=1)
    pickle, shards = folder / "torch.pt", folder / "dcp"

    def ours() -> None:
        store.save(store_step(), tensors, None).result(LIMIT_S)

    steps = iter(range(10**9))

    def store_step() -> int:
        return next(steps)

    def torch_save() -> None:
        with pickle.open("wb") as stream:
            torch.save(tensors, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def dcp_save() -> None:
        shutil.rmtree(shards, ignore_errors=True)
        _quietly(
            lambda: state_dict_saver.save(
                dict(tensors), storage_writer=filesystem.FileSystemWriter(shards), no_dist=True
            )
        )

    writes: dict[str, Callable[[], object]] = {
        **{f"dd {' '.join(flags)}": _dd(memory, raw, flags) for flags in dd_flags},
        "torch.save and fsync": torch_save,
        "DCP": dcp_save,
        "ours": ours,
    }
    write_s = _timed(writes, rounds, lambda: raw.unlink(missing_ok=True))
    raw.unlink(missing_ok=True)
    _dd(memory, raw, ())()  # the file that dd reads
    memory.unlink()
    found = store.latest()
    assert found is not None
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    null = Path("/dev/null")
    reads: dict[str, Callable[[], object]] = {
        "dd iflag=direct": _dd(raw, null, ("iflag=direct",)),
        "dd": _dd(raw, null, ()),
        "torch.load": lambda: torch.load(pickle),
        "DCP": lambda: _quietly(
            lambda: state_dict_loader.load(into, storage_reader=filesystem.FileSystemReader(shards), no_dist=True)
        ),
        "ours": found.load,
    }
    read_s = _timed(reads, rounds, lambda: _drop_caches(folder))
    store.close()
    return [*_rows("write", write_s, size), *_rows("read", read_s, size)]


def _timed(
    calls: dict[str, Callable[[], object]], rounds: int, prepare: Callable[[], object]
) -> dict[str, list[float]]:
    """Returns the seconds of each call; the order turns from round to round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for index in range(rounds + 1):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            prepare()
            begin = time.perf_counter()
            calls[name]()
            if index > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def _rows(verb: str, seconds: dict[str, list[float]], size: int) -> list[Row]:
    """Returns a row per rival: its bandwidth, ours, and their ratio. The fastest of dd's variants counts."""
    fastest = min(
        (name for name in seconds if name.startswith("dd")), key=lambda name: statistics.median(seconds[name])
    )
    rows = []
    for name in (fastest, *(name for name in seconds if not name.startswith("dd") and name != "ours")):
        share = SHARE_OF_DD if name == fastest else SHARE_OF_OTHERS
        ratio, low, high = median_interval([a / b for a, b in zip(seconds[name], seconds["ours"], strict=True)])
        theirs, ours = (size / statistics.median(seconds[which]) / 2**20 for which in (name, "ours"))
        what = f"{verb} {size / 2**30:.2f} GiB, bandwidth: {name}"
        rows.append(Row(what, "MiB/s", theirs, ours, ratio, low, high, f">= {share:g}", ratio >= share))
    return rows


def _memory(directory: Path, tensors: dict[str, Tensor]) -> list[Row]:
    """Measures the host memory that a save adds, and the time until the tensors may change again."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    copies_s, clones_s = [], []
    with Store(directory, keep=1) as store:
        before = _resident_bytes()
        peak = 0
        for step in range(4):
            save = store.save(step, tensors, None)
            save.wait_copied(LIMIT_S)
            peak = max(peak, _resident_bytes())
            save.result(LIMIT_S)
            peak = max(peak, _resident_bytes())
            if step > 0 and save.copy_s is not None:  # the first save maps the memory
                copies_s.append(save.copy_s)
        into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _ in range(4):
            begin = time.perf_counter()
            for name, tensor in tensors.items():
                into[name].copy_(tensor)
            clones_s.append(time.perf_counter() - begin)
        torch.set_num_threads(threads)
    extra = peak - before
    target = 1.02  # a few MiB are the allocator's and the threads'
    copy_s, clone_s = statistics.median(copies_s), statistics.median(clones_s[1:])
    return [
        Row(
            "extra host memory of a save: bytes of the tensors",
            "MiB",
            size / 2**20,
            extra / 2**20,
            extra / size,
            target=f"<= {target}",
            met=extra / size <= target,
        ),
        Row(
            "until the tensors may change: torch's copy_, one thread",
            "ms",
            clone_s * 1e3,
            copy_s * 1e3,
            copy_s / clone_s,
        ),
    ]


def _flips(directory: Path) -> Row:
    """Flips random bits of a checkpoint of all its files, one at a time, and counts those that are found."""
    draw = random.Random(0)
    with Store(directory) as store:
        checkpoint = store.save(1, {f"w{i}": torch.randn(1000 + i) for i in range(50)}, {"seed": 1}).result(LIMIT_S)
    files = sorted(checkpoint.path.iterdir())
    found = 0
    for _ in range(FLIPS):
        path = draw.choice(files)
        with path.open("r+b") as stream:
            at = draw.randrange(path.stat().st_size)
            byte = _byte(stream.fileno(), at)
            os.pwrite(stream.fileno(), bytes([byte ^ 1 << draw.randrange(8)]), at)
            found += [fault.file for fault in checkpoint.verify()] == [path.name] and _fails_to_load(checkpoint.path)
            os.pwrite(stream.fileno(), bytes([byte]), at)
    what = "single flipped bits: found by verify() with their file, and by load()"
    return Row(what, "", FLIPS, found, found / FLIPS, target="all", met=found == FLIPS)


def _fails_to_load(path: Path) -> bool:
    from drivetrain.checkpointing import Checkpoint

    try:
        Checkpoint(path).load()
    except CheckpointError:
        return True
    return False


def _byte(descriptor: int, at: int) -> int:
    return os.pread(descriptor, 1, at)[0]


def _dd(source: Path, target: Path, flags: tuple[str, ...]) -> Callable[[], None]:
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", *flags]

    def copy() -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)

    return copy


def _file_in_memory(folder: Path, size: int) -> Path:
    """Writes random bytes where reading them needs no disk."""
    shared = Path("/dev/shm")
    path = (shared if shared.is_dir() else folder) / f"{folder.name}-source"
    with path.open("wb") as stream:
        for at in range(0, size, 4 << 20):
            stream.write(os.urandom(min(4 << 20, size - at)))
    return path


def _drop_caches(folder: Path) -> None:
    """Makes the next reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _quietly(call: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that one process saves without a process group
        call()
