"""Tests saves of several ranks: real processes over torch's stores, and ranks that fail, differ or share no disk."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpointing import CheckpointError, Coordinator, Save, Store
from drivetrain.checkpointing.store import commit, directory
from drivetrain.processes import this_process
from ranks import RankPool

LIMIT_S = 60
Opened = Callable[..., list[Store]]


def _save_on_ranks(folder: str) -> list[Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with Store(folder, rank=rank, world_size=world_size, keep=2, timeout=LIMIT_S) as store:
        for step in range(4):
            tensors = {"shared": torch.full((3,), float(step)), f"part.{rank}": torch.full((rank + 1,), float(step))}
            checkpoint = store.save(step, tensors, {"rank": rank, "step": step}).result(LIMIT_S)
            assert checkpoint.verify() == []
        dist.barrier()  # rank 0 deletes old ones after the last result
        latest = store.latest()
        states = [latest.state(each) for each in range(world_size)]
        return [latest.step, latest.names(), states, latest.load(rank=rank)["shared"].tolist()]


def _fail_on_one_rank(folder: str) -> list[str]:
    rank = dist.get_rank()
    messages = []
    with Store(folder, rank=rank, world_size=2, timeout=LIMIT_S) as store:
        for step, tensors in enumerate([{"x": torch.ones(2)}, {"x": 1.0 if rank else torch.ones(2)}, {}]):
            try:
                store.save(step, tensors, None).result(LIMIT_S)  # type: ignore[arg-type]
                messages.append("saved")
            except (CheckpointError, TypeError) as error:
                messages.append(str(error))
        dist.barrier()
        messages.append(str([checkpoint.step for checkpoint in store.checkpoints()]))
    return messages


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def test_ranks_save_and_load(pool: RankPool, tmp_path: Path) -> None:
    for rank, (step, names, states, shared) in enumerate(pool.run(_save_on_ranks, str(tmp_path / "runs"))):
        assert step == 3
        assert names == ["shared", "part.0", "part.1"]
        assert states == [{"rank": 0, "step": 3}, {"rank": 1, "step": 3}]
        assert shared == [3.0] * 3, rank
    with Store(tmp_path / "runs") as reader:
        assert [checkpoint.step for checkpoint in reader.checkpoints()] == [2, 3]
        latest = reader.latest()
        with pytest.raises(ValueError, match="'shared', which ranks 0 and 1 both stored"):
            latest.load()
        assert latest.load(["part.1"])["part.1"].tolist() == [3.0, 3.0]


def test_a_rank_with_bad_arguments_fails_the_save_on_all(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_fail_on_one_rank, str(tmp_path / "runs"))
    assert first[0] == second[0] == "saved"
    assert "rank 1: tensors['x'] is a float" in first[1]
    assert second[1] == "tensors['x'] is a float, expected a torch.Tensor"
    assert first[2] == second[2] == "saved"
    assert first[3] == second[3] == "[0, 2]"


def _stores(kind: str, folder: Path) -> list[Any]:
    """Returns the store of each of two ranks in this process."""
    if kind == "hash":
        return [dist.HashStore()] * 2
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), 2) for _ in range(2)]
    host = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    return [host, dist.TCPStore("127.0.0.1", host.port, 2, is_master=False, timeout=timedelta(seconds=LIMIT_S))]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Yields what opens the stores of ranks in this process, which are closed at the end of the test."""
    ranks = []

    def open_ranks(stores: list[Any], folders: list[Path], timeout: float = LIMIT_S) -> list[Store]:
        size = len(stores)
        ranks[:] = [
            Store(folder, rank=rank, world_size=size, coordinator=Coordinator(store, rank, size), timeout=timeout)
            for rank, (store, folder) in enumerate(zip(stores, folders, strict=True))
        ]
        return list(ranks)

    yield open_ranks
    for rank in ranks:
        rank.close()


def _outcome(save: Save) -> str:
    try:
        save.result(LIMIT_S)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_every_store_of_torch_coordinates(kind: str, opened: Opened, tmp_path: Path) -> None:
    stores = _stores(kind, tmp_path)
    for generation in range(2):  # a second pair of coordinators in one store sees none of the first one's keys
        ranks = opened(stores, [tmp_path / "runs"] * 2)
        for step in range(3):
            saves = [
                rank.save(step, {f"w{i}": torch.full((5,), float(step))}, generation) for i, rank in enumerate(ranks)
            ]
            assert [_outcome(save) for save in saves] == ["saved", "saved"]
        for rank in ranks:
            rank.close()
        latest = ranks[0].latest()
        assert latest.state(1) == generation
        assert latest.load(["w0", "w1"])["w1"].tolist() == [2.0] * 5


def test_a_rank_that_stops_waiting_keeps_the_files_of_a_checkpoint(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees that a third rank has died, while rank 0 has all parts and completes the checkpoint."""
    ranks = opened(_stores("hash", tmp_path), [tmp_path / "runs"] * 2)
    has_failed, publish, writer = threading.Event(), directory.publish, ranks[1]._writer
    ask = writer.coordinator.ask

    def publish_late(*folders: Path) -> None:
        assert has_failed.wait(LIMIT_S)
        publish(*folders)

    def stop_at_the_end(key: str, *rest: Any) -> Any:
        if key.endswith("/end"):
            raise CheckpointError("the process of rank 2 has ended")
        return ask(key, *rest)

    monkeypatch.setattr(directory, "publish", publish_late)
    monkeypatch.setattr(commit, "_READ_S", 0.1)
    monkeypatch.setattr(writer.coordinator, "ask", stop_at_the_end)
    saves = [rank.save(1, {f"w{i}": torch.ones(3)}, None) for i, rank in enumerate(ranks)]
    assert "the process of rank 2 has ended" in _outcome(saves[1])
    has_failed.set()
    assert _outcome(saves[0]) == "saved"
    assert ranks[0].latest().verify() == []


class _Mute:
    """Passes everything on to a store, except that a rank has read the end of a save."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if "/read/" not in key:
            self._store.set(key, value)


def test_rank_0_waits_until_the_others_know_that_a_save_is_complete(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.checkpointing.store.commit._READ_S", 0.2)
    store = dist.HashStore()
    for generation, mute in enumerate([False, True], start=1):
        ranks = opened([store, _Mute(store) if mute else store], [tmp_path / str(mute)] * 2)
        saves = [rank.save(1, {f"w{i}": torch.ones(2)}, None) for i, rank in enumerate(ranks)]
        assert _outcome(saves[0]) == "saved"
        # Rank 0's process may end now, and the store with it.
        assert store.check([f"drivetrain/checkpoint/{generation}/0/read/1"]) != mute
        assert _outcome(saves[1]) == "saved"
        for rank in ranks:
            rank.close()


def test_ranks_without_a_shared_disk_are_told(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.checkpointing.store.commit._VISIBLE_S", 0.2)
    ranks = opened(_stores("hash", tmp_path), [tmp_path / "host-a", tmp_path / "host-b"])
    saves = [rank.save(1, {"x": torch.ones(2)}, None) for rank in ranks]
    for save in saves:
        assert "the ranks do not share this file system" in _outcome(save)
    for rank in ranks:
        rank.close()
        assert rank.latest() is None
        assert [entry.name for entry in rank.directory.iterdir() if entry.name != ".lock"] == []


def test_ranks_that_save_different_steps_are_told(opened: Opened, tmp_path: Path) -> None:
    ranks = opened(_stores("hash", tmp_path), [tmp_path] * 2)
    saves = [rank.save(step, {}, None) for step, rank in enumerate(ranks)]
    assert "rank 1 saves step 1 while another rank saves step 0" in _outcome(saves[1])
    assert "saves step" in _outcome(saves[0])
    saves = [rank.save(7, {}, None) for rank in ranks]
    assert [_outcome(save) for save in saves] == ["saved", "saved"]


@pytest.mark.parametrize(("absent", "message"), [(1, "rank 1 to write its part"), (0, "rank 0 to begin the save")])
def test_a_rank_that_never_saves_is_named(opened: Opened, tmp_path: Path, absent: int, message: str) -> None:
    ranks = opened(_stores("hash", tmp_path), [tmp_path] * 2, timeout=0.3)
    save = ranks[1 - absent].save(1, {}, None)
    assert message in _outcome(save)


class _BrokenStore:
    """Answers until it is broken, as a TCPStore does whose host process dies."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.is_broken = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self.is_broken:
            raise dist.DistNetworkError("Broken pipe")
        return getattr(self._store, name)  # type: ignore[no-any-return]


def test_a_store_that_does_not_answer_fails_the_save(opened: Opened, tmp_path: Path) -> None:
    store = _BrokenStore()
    ranks = opened([store, store], [tmp_path] * 2)
    store.is_broken = True
    assert "cannot reach the store of torch.distributed" in _outcome(ranks[0].save(1, {}, None))
    store.is_broken = False


def test_the_keys_of_old_saves_are_deleted(opened: Opened, tmp_path: Path) -> None:
    store = dist.HashStore()
    ranks = opened([store, store], [tmp_path] * 2)
    counts = []
    for step in range(4):
        saves = [rank.save(step, {}, None) for rank in ranks]
        assert [_outcome(save) for save in saves] == ["saved", "saved"]
        counts.append(store.num_keys())
    assert counts[1:] == [counts[0]] * 3


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    with Store(tmp_path) as store:
        store.save(1, {"x": torch.ones(3)}, None)
    assert threading.active_count() == before
    assert "drivetrain-checkpoint" not in " ".join(thread.name for thread in threading.enumerate())


def test_a_wait_for_a_rank_whose_process_has_ended_is_over_at_once() -> None:
    """It would last until the timeout otherwise, half an hour by default."""
    store = dist.HashStore()
    alive = Coordinator(store, 0, 2)
    Coordinator(store, 1, 2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        identity = this_process() | {"pid": process.pid, "started": int(started)}
        store.set("drivetrain/checkpoint/1/process/1", json.dumps(identity))
        with pytest.raises(CheckpointError, match="waited 1 s for its part"):
            alive.ask("0/part/1", 1, "its part")
        process.kill()
    with pytest.raises(CheckpointError, match=rf"its part any more: the process {process.pid} of rank 1 has ended"):
        alive.ask("0/part/1", 3600, "its part")
