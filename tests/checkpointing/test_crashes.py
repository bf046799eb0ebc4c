"""Tests that no crash loses or damages a complete checkpoint: kills, power cuts, failing disks and flipped bits.

`make crashes` runs many more rounds.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint_crashes import harness, moves, resumes, writes
from checkpoint_crashes.contents import problems_after_restart, problems_of, rounds_of, step_of, tensors_of
from checkpoint_crashes.power import Disk
from drivetrain.checkpointing import CheckpointError, Store
from effort import rounds
from warm_python import warm_python

LIMIT_S = 60
SEED = random.Random(23).randrange(1_000_000)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def server(shim: Path) -> Iterator[harness.Server]:
    with harness.Server(shim) as running:
        yield running


@pytest.mark.parametrize(
    ("world_size", "num_rounds", "is_encrypted"),
    [(1, rounds(12, 30), False), (2, rounds(6, 10), False), (1, rounds(6, 15), True), (2, rounds(4, 8), True)],
)
def test_kills_lose_nothing(
    server: harness.Server, tmp_path: Path, world_size: int, num_rounds: int, is_encrypted: bool
) -> None:
    outcomes = list(harness.kill_rounds(server, tmp_path, range(SEED, SEED + num_rounds), world_size, is_encrypted))
    assert [(seed, problems) for seed, _, problems in outcomes if problems] == []
    assert sum(killed for _, killed, _ in outcomes) > num_rounds // 4  # others ended before their random call


def test_a_checkpoint_has_the_values_of_its_step(tmp_path: Path) -> None:
    outcomes = list(writes.write_rounds(tmp_path, range(SEED, SEED + rounds(30, 200))))
    assert [(seed, problems) for seed, _, problems in outcomes if problems] == []


def test_loops_of_strangers_continue_with_the_same_bits(tmp_path: Path) -> None:
    """Takes some of the loops; `make crashes` takes all of them."""
    outcomes = rounds_of(resumes.resume_round, tmp_path, range(SEED, SEED + rounds(5, 64)))
    assert [(seed, problems) for seed, _, problems in outcomes if problems] == []


def test_runs_with_logical_ranks_move_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    outcomes = rounds_of(moves.move_round, tmp_path, range(SEED, SEED + rounds(2, 8)))
    assert [(seed, problems) for seed, _, problems in outcomes if problems] == []


@pytest.mark.parametrize("shard", [None, "gradients"])
def test_survivors_with_logical_ranks_continue_with_the_same_bits(tmp_path: Path, shard: str | None) -> None:
    whole = moves.Training("gpt", tmp_path / "whole")
    left = moves.Training("gpt", tmp_path / "left", in_place=True, shard=shard)
    for of in (whole, left):
        of.folder.mkdir()
    assert moves.live(whole, 0, 8, {}) == [0] * 8
    codes = moves.live(left, 0, 4, {1: (4, 0.0), 3: (4, 0.0)})
    assert codes == [0, -9, 0, -9], (tmp_path / "left" / "errors").read_text()
    assert moves.lines_of(tmp_path / "left") == moves.lines_of(tmp_path / "whole")


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_power_cuts_lose_nothing(server: harness.Server, tmp_path: Path, is_encrypted: bool) -> None:
    directory, calls = harness.record_saves(server, tmp_path, 3, is_encrypted)
    seeds = range(SEED, SEED + rounds(20, 60))
    outcomes = harness.cut_rounds(directory, calls, tmp_path, seeds, is_encrypted)
    assert [(seed, problems) for seed, _, problems in outcomes if problems] == []


@pytest.mark.parametrize("lost", ["files", "folders", "manifest"])
def test_power_cuts_find_a_writer_that_syncs_too_little(server: harness.Server, tmp_path: Path, lost: str) -> None:
    directory, calls = harness.record_saves(server, tmp_path, rounds=3)
    dropped = {
        "files": lambda path: path.endswith((".safetensors", ".json")),
        "folders": lambda path: not path.endswith((".safetensors", ".json")),
        "manifest": lambda path: path.endswith("manifest.json"),
    }[lost]
    fewer = [call for call in calls if call.kind != "fsync" or not dropped(call.path)]
    assert len(fewer) < len(calls)
    disk = Disk(directory)
    problems, acknowledged = [], 0
    draw = random.Random(SEED)
    for index, call in enumerate(fewer):
        disk.replay(call)
        acknowledged = call.number if call.kind == "mark" else acknowledged
        if index % 7 == 0:
            state = tmp_path / f"state-{index}"
            disk.write_state(state, draw)
            problems += problems_of(state, acknowledged)
    assert problems


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_flipped_bits_are_found_and_named(tmp_path: Path, is_encrypted: bool) -> None:
    outcomes = harness.flip_rounds(tmp_path, range(SEED, SEED + rounds(60 if is_encrypted else 20, 60)), is_encrypted)
    assert [(seed, problems) for seed, _, problems in outcomes if problems] == []


def run_under(shim: Path, command: list[str], limit_s: float) -> str:
    """Runs a program under the shim, and returns what it writes."""
    environment = harness.shim_environment(shim)
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_every_failing_call_is_reported_and_harmless(shim: Path, tmp_path: Path) -> None:
    answer = run_under(shim, [warm_python(), "-m", "checkpoint_crashes.failures", str(tmp_path / "runs")], 500)
    assert int(answer.split()[0]) > 50


def test_a_slow_disk_does_not_hold_the_tensors(shim: Path, tmp_path: Path) -> None:
    program = (
        "import ctypes, sys, torch; from drivetrain.checkpointing import CheckpointError, Store\n"
        "shim = ctypes.CDLL(None); shim.shim_arm(sys.argv[1].encode(), b'')\n"
        "store = Store(sys.argv[1]); shim.shim_delay_writes(400_000)\n"
        "x = torch.ones(3 << 20); save = store.save(1, {'x': x}, None)\n"
        "save.wait_copied(60); x.zero_(); assert not save.done()\n"
        "try: save.result(0.01)\n"
        "except CheckpointError as error: told = str(error)\n"
        "else: raise AssertionError('no error')\n"
        "assert 'still being written; the thread that writes is at ' in told, told\n"
        "assert save.result(60).load()['x'].eq(1).all(); store.close()\n"
        "short = Store(sys.argv[1], timeout=0.2); shim.shim_delay_writes(400_000)\n"
        "save = short.save(2, {'x': x}, None)\n"
        "try: save.result(60)\n"
        "except CheckpointError as error: assert 'within 0.2 s' in str(error), error\n"
        "else: raise AssertionError('no error')\n"
        "assert short.latest().step == 1\n"
    )
    directory = tmp_path / "slow"
    directory.mkdir()
    run_under(shim, [sys.executable, "-c", program, str(directory)], LIMIT_S)


def test_a_limit_on_file_sizes_is_reported(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.save(1, {"x": torch.ones(8)}, None).result(LIMIT_S)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"EFBIG.*ulimit -f"):
                store.save(2, {"x": torch.ones(1 << 20)}, None).result(LIMIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert store.latest().step == 1
        assert store.save(3, {"x": torch.ones(1 << 20)}, None).result(LIMIT_S).verify() == []


def _mounted(folder: Path, options: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "drivetrain-test", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode == 0


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    if not _mounted(folder, "size=6m"):
        pytest.skip("mounting a small disk needs root and the right to mount")
    try:
        with Store(folder, keep=1) as store:
            store.save(1, {"x": torch.ones(1 << 18)}, None).result(LIMIT_S)
            with pytest.raises(CheckpointError, match=r"ENOSPC.*Free space"):
                store.save(2, {"x": torch.ones(2 << 20)}, None).result(LIMIT_S)
            assert store.save(3, {"x": torch.ones(1 << 18)}, None).result(LIMIT_S).verify() == []
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, timeout=LIMIT_S)
        with Store(folder) as reader:  # resuming from a read-only directory works
            latest = reader.latest()
            assert latest.step == 3
            assert latest.load()["x"].numel() == 1 << 18
            with pytest.raises(CheckpointError, match=r"EROFS.*Remount"):
                reader.save(4, {}, None).result(LIMIT_S)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=LIMIT_S)


def test_a_vanished_directory_is_reported_and_not_made_again(tmp_path: Path) -> None:
    directory, hidden = tmp_path / "runs", tmp_path / "hidden"
    with Store(directory) as store:
        store.save(1, tensors_of(1), {"count": 1}).result(LIMIT_S)
        directory.rename(hidden)
        with pytest.raises(CheckpointError, match=r"ENOENT.*mounted"):
            store.save(2, {}, None).result(LIMIT_S)
        assert not directory.exists()
        with pytest.raises(CheckpointError, match="cannot be read"):
            store.latest()
        hidden.rename(directory)
        assert store.save(3, {}, None).result(LIMIT_S).step == 3


def test_a_process_that_runs_out_of_memory_for_the_snapshot_goes_on(tmp_path: Path) -> None:
    x = torch.ones(1)
    huge = x.expand(1 << 24, 1 << 24)  # a petabyte, of which one element exists
    with Store(tmp_path) as store:
        with pytest.raises(CheckpointError, match="MemoryError"):
            store.save(1, {"huge": huge}, None).result(LIMIT_S)
        assert store.save(2, {"x": x}, None).result(LIMIT_S).load()["x"] == 1


def test_the_checker_finds_lost_and_changed_checkpoints(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.save(step_of(1), tensors_of(1), {"count": 1}).result(LIMIT_S)
        assert problems_of(tmp_path, 1) == []
        assert "the newest save is 1, but 2" in problems_of(tmp_path, 2)[0]
        store.save(step_of(2), tensors_of(3), {"count": 2}).result(LIMIT_S)
        assert "other tensors" in problems_of(tmp_path, 2)[0]
    assert problems_after_restart(tmp_path, 2)
