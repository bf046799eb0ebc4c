"""Tests the tiers besides the local directory: uploads to remote file systems that fail."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import resumed_training
from drivetrain.checkpointing import Checkpoint, Checkpointer, CheckpointError, Encryption, Remote, Store
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.cli import main
from drivetrain.ddp import DistributedDataParallel
from polling import wait_until
from ranks import RankPool
from warm_python import warm_python

LIMIT_S = 60.0
RUN = [Remote("flaky://run")]


class FlakyFileSystem(MemoryFileSystem):
    """A remote in memory whose calls fail, cut files short, or wait, as a plan says."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    calls: ClassVar[list[str]] = []
    fails: ClassVar[set[int]] = set()  # numbers of put_file calls that raise
    cuts: ClassVar[set[int]] = set()  # numbers of put_file calls that write half of the file and report success
    flips: ClassVar[set[int]] = set()  # numbers of put_file calls that change a bit
    gate = threading.Event()  # put_file waits for it
    is_down = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def put_file(self, lpath: str, rpath: str, **arguments: Any) -> None:
        number = sum(call.startswith("put ") for call in self.calls)
        self.calls.append(f"put {rpath}")
        assert self.gate.wait(LIMIT_S)
        if self.is_down or number in self.fails:
            raise ConnectionError("the network is down")
        data = Path(lpath).read_bytes()
        if number in self.cuts:
            data = data[: len(data) // 2]
        if number in self.flips:
            data = bytes([data[0] ^ 1]) + data[1:]
        self.pipe_file(rpath, data)

    def ls(self, path: str, detail: bool = True, **arguments: Any) -> Any:
        if self.is_down:
            raise ConnectionError("the network is down")
        return super().ls(path, detail, **arguments)

    def cat_file(self, path: str, **arguments: Any) -> bytes:
        if self.is_down:
            raise ConnectionError("the network is down")
        return super().cat_file(path, **arguments)

    def rm_file(self, path: str) -> None:
        self.calls.append(f"rm {path}")
        super().rm_file(path)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyFileSystem]]:
    monkeypatch.setattr("drivetrain.checkpointing.store.remote._FIRST_PAUSE_S", 0.01)
    FlakyFileSystem.clear_instance_cache()
    kind = FlakyFileSystem
    kind.store, kind.pseudo_dirs, kind.calls = {}, [""], []
    kind.fails, kind.cuts, kind.flips, kind.is_down = set(), set(), set(), False
    kind.gate = threading.Event()
    kind.gate.set()
    yield kind
    kind.gate.set()


# One identity, because a host where the run continues may have its directory elsewhere.
trained = functools.partial(resumed_training.trained, run="tested", size=1)


def stored(kind: type[FlakyFileSystem]) -> set[str]:
    return {path.split("/")[2] for path in kind.store if path.endswith("manifest.json")}


def test_checkpoints_are_uploaded_and_continued_elsewhere(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    tiers: list[Remote] = [Remote("flaky://run", keep=2)]
    ckpt = trained(tmp_path / "a", 5, tiers=tiers, keep=1)
    (status,) = ckpt.status()
    assert status == ("flaky://run", 5, (), None, ())
    assert "step-0000000005" in stored(remote)
    assert len(stored(remote)) <= 2
    again = trained(tmp_path / "b", 2, tiers=tiers)  # the first directory is gone
    assert again.steps == 7
    assert again.restored.path.parent == tmp_path / "b"
    assert "step-0000000007" in stored(remote)
    local = complete_checkpoints(tmp_path / "b")[-1]
    for path in local.path.iterdir():
        assert remote.store[f"/run/{local.path.name}/{path.name}"].getvalue() == path.read_bytes()


def test_the_manifest_comes_last_and_goes_first(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    trained(tmp_path, 4, tiers=[Remote("flaky://run", keep=1)], keep=1)
    puts = [call.split("/")[-2:] for call in remote.calls if call.startswith("put ")]
    removed = [call.split("/")[-2:] for call in remote.calls if call.startswith("rm ")]
    for calls, at in ((puts, -1), (removed, 0)):
        for step in {step for step, _ in calls}:
            files = [file for each, file in calls if each == step]
            assert len(files) == 3
            assert files[at] == "manifest.json"


@pytest.mark.parametrize("kind", ["fails", "cuts", "flips"])
def test_faults_are_found_and_repeated(tmp_path: Path, remote: type[FlakyFileSystem], kind: str) -> None:
    setattr(remote, kind, {0, 1, 3, 4, 7})
    ckpt = trained(tmp_path / "a", 3, tiers=[Remote("flaky://run", attempts=4)])
    assert ckpt.status()[0].newest == 3
    assert ckpt.status()[0].error is None
    assert trained(tmp_path / "b", 1, tiers=RUN).steps == 4


def test_an_outage_is_reported_and_the_training_goes_on(
    tmp_path: Path, remote: type[FlakyFileSystem], caplog: pytest.LogCaptureFixture
) -> None:
    remote.fails = set(range(1000))
    tiers: list[Remote] = [Remote("flaky://run", attempts=2)]
    with pytest.raises(CheckpointError, match="not every tier has the last step: attempt 2 of 2 to upload flaky://run"):
        trained(tmp_path, 3, tiers=tiers)
    assert "attempt 1 of 2" in caplog.text
    assert complete_checkpoints(tmp_path)[-1].step == 3
    shown = json.loads((tmp_path / "tiers.json").read_text())["remotes"][0]
    assert 3 in shown["failed"]
    ckpt = trained(tmp_path, 1, tiers=tiers, on_error="log")  # still down
    assert ckpt.steps == 4
    assert ckpt.status()[0].failed
    remote.fails = set()
    assert trained(tmp_path, 0, tiers=tiers).steps == 4  # uploads what the last run could not
    assert stored(remote) == {"step-0000000004"}


def test_an_unreachable_remote_never_starts_again(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    tiers: list[Remote] = [Remote("flaky://run", attempts=2)]
    trained(tmp_path / "a", 2, tiers=tiers)
    remote.is_down = True
    with pytest.raises(
        CheckpointError, match="has no intact checkpoint, and flaky://run, which may have one, cannot be read"
    ):
        trained(tmp_path / "b", 1, tiers=tiers)
    assert trained(tmp_path / "a", 1, tiers=tiers, on_error="log").steps == 3  # what is here is continued


def test_what_is_uploaded_is_not_deleted(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    remote.gate.clear()
    model = nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model, tiers=RUN, every=1, keep=1) as ckpt:
        for step in range(1, 6):
            ckpt.step()
            ckpt._saver.wait()  # type: ignore[union-attr]
            wait_until(lambda: bool(remote.calls), "upload")
            steps = [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)]
            assert 1 in steps  # its upload has begun
            assert step in steps
        assert len(steps) <= 3  # only the newest one waits
        pending = ckpt.status()[0].pending
        assert pending[0] == 1
        assert len(pending) == 2
        remote.gate.set()
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)][-1] == 5
    assert "step-0000000005" in stored(remote)


def test_a_store_of_the_script_saves_after_the_block(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    with Store(tmp_path) as store:
        with Checkpointer(store, model=nn.Linear(1, 1), every=None, tiers=RUN) as ckpt:
            ckpt.step()
        assert store.save(2, {}, None).result(LIMIT_S).step == 2
    assert stored(remote) == {"step-0000000001"}


def test_a_torn_upload_is_no_checkpoint(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    trained(tmp_path / "a", 2, tiers=RUN, every=None)
    for path in [path for path in remote.store if path.startswith("/run/step-0000000002/")]:
        remote.store[path.replace("0000000002", "0000000009")] = remote.store[path]
    del remote.store["/run/step-0000000009/manifest.json"]
    assert trained(tmp_path / "b", 1, tiers=RUN, every=None).steps == 3
    assert not any("0000000009" in path for path in remote.store)


def test_a_damaged_remote_checkpoint_is_passed_over(
    tmp_path: Path, remote: type[FlakyFileSystem], caplog: pytest.LogCaptureFixture
) -> None:
    tiers: list[Remote] = [Remote("flaky://run", keep=None)]
    for steps in (2, 1):
        trained(tmp_path / "a", steps, tiers=tiers, every=None)

    def damage(step: int, file: str) -> None:
        stored = remote.store[f"/run/step-{step:010d}/{file}"]
        data = bytearray(stored.getvalue())
        data[-9] ^= 1
        stored.seek(0)
        stored.write(data)

    damage(3, "rank-00000-of-00001.safetensors")
    with pytest.warns(
        UserWarning, match="continues with step 2, because newer .*step-0000000003: rank-00000-of-00001.s"
    ):
        found = trained(tmp_path / "b", 0, tiers=tiers, every=None)
    assert found.steps == 2
    assert "step-0000000003: rank-00000-of-00001.safetensors, chunk 0: its header has the CRC32C" in caplog.text
    damage(2, "rank-00000-of-00001.json")
    if "step-0000000003" in stored(remote):
        damage(3, "manifest.json")
    with pytest.raises(CheckpointError, match="has no intact checkpoint, and no remote one is intact"):
        trained(tmp_path / "c", 0, tiers=tiers, every=None)


def test_a_damaged_checkpoint_is_not_uploaded(
    tmp_path: Path, remote: type[FlakyFileSystem], caplog: pytest.LogCaptureFixture
) -> None:
    large = {"large": nn.Linear(50, 100)}  # lies in chunks of its own
    trained(tmp_path, 2, tiers=[], extra=large)
    path = tmp_path / "step-0000000002" / "rank-00000-of-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.warns(UserWarning, match="continues with step 1, because newer .*step-0000000002"):
        (status,) = trained(tmp_path, 0, tiers=RUN, every=None, extra=large).status()
    assert status == ("flaky://run", 1, (), None, ())
    assert stored(remote) == {"step-0000000001"}
    assert "not every tier has the last step" not in caplog.text


def test_uploads_can_be_rarer(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    model = nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model, tiers=[Remote("flaky://run", every="1h", keep=None)], every=1) as ckpt:
        for _ in range(5):
            ckpt.step()
            wait_until(lambda: bool(stored(remote)), "upload")
    assert stored(remote) == {"step-0000000001", "step-0000000005"}  # the first and the last


def test_encrypted_checkpoints_are_uploaded_as_they_are(tmp_path: Path, remote: type[FlakyFileSystem]) -> None:
    keys = Encryption(key=lambda key_id: ("k", bytes(32)))
    trained(tmp_path / "a", 2, tiers=RUN, encryption=keys)
    assert trained(tmp_path / "b", 1, tiers=RUN, encryption=keys).steps == 3
    assert Checkpoint(tmp_path / "b" / "step-0000000003").key_id == "k"


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_file_systems_of_fsspec(tmp_path: Path, scheme: str) -> None:
    url = f"file://{tmp_path}/remote" if scheme == "file" else f"memory://{tmp_path.name}"
    tiers: list[Remote] = [Remote(url, keep=1)]
    trained(tmp_path / "a", 4, tiers=tiers)
    assert trained(tmp_path / "b", 1, tiers=tiers).steps == 5
    if scheme == "file":
        (left,) = complete_checkpoints(tmp_path / "remote")
        assert left.step == 5
        assert left.verify() == []


def test_ls_shows_tiers(tmp_path: Path, remote: type[FlakyFileSystem], capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 2, tiers=RUN)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert "flaky://run: step 2 is complete" in capsys.readouterr().out
    remote.fails = set(range(1000))
    with pytest.raises(CheckpointError):
        trained(tmp_path, 1, tiers=[Remote("flaky://run", attempts=1)])
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 3 failed" in shown
    assert "the network is down" in shown


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fsspec'] = None; sys.modules['fsspec.core'] = None\n"
        "from torch import nn; from drivetrain.checkpointing import Checkpointer, Remote\n"
        "try:\n  with Checkpointer(sys.argv[1], model=nn.Linear(1, 1), tiers=[Remote('s3://b/c')]): pass\n"
        "except ImportError as error: assert 'pip install' in str(error), error\n"
        "else: raise AssertionError('no error')\n"
    )
    subprocess.run([warm_python(), "-c", program, str(tmp_path)], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Remote("memory://a", keep=0), ValueError, "keep is 0"),
        (lambda: Remote("memory://a", attempts=0), ValueError, "attempts is 0"),
        (lambda: Remote("memory://a", every="often"), ValueError, "every is 'often'"),
        (
            lambda: Checkpointer("a", model=nn.Linear(1, 1), tiers=["s3://a"]),
            TypeError,
            "tiers has a str, expected Remote",
        ),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_folder_of_this_host_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    trained(tmp_path / "run", 2, tiers=[Remote(f"file://{tmp_path}/remote")], every=None)
    uploaded = {str(path) for path in (tmp_path / "remote").rglob("*")}
    assert len(uploaded) == 4
    assert uploaded | {str(tmp_path / "remote"), str(tmp_path)} <= synced


# ---- A directory in shared memory, with a remote on the disk.

_KILLED = """
import os, signal, sys, torch
from torch import nn
from drivetrain.checkpointing import Checkpointer, Remote
model = nn.Linear(1, 1)
nn.init.zeros_(model.weight)
with Checkpointer(sys.argv[1], model=model, every=None, tiers=[Remote(f"file://{sys.argv[2]}", every="1h")]) as ckpt:
    assert model.weight.item() == ckpt.steps
    print(ckpt.steps, flush=True)
    for _ in range(int(sys.argv[3])):
        with torch.no_grad():
            model.weight.add_(1)
        ckpt.step()
        ckpt.save()
    if sys.argv[4] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run_in_memory(tmp_path: Path, steps: int, end: str) -> tuple[int, int]:
    """Trains in a process of its own. Returns its exit code and the step from which it continued."""
    arguments = [str(tmp_path / "memory" / "run"), str(tmp_path / "disk"), str(steps), end]
    found = subprocess.run(
        [warm_python(), "-c", _KILLED, *arguments], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
    )
    return found.returncode, int(found.stdout)


def test_a_directory_in_memory_outlives_the_process_and_its_remote_the_host(tmp_path: Path) -> None:
    assert run_in_memory(tmp_path, 4, "end") == (0, 0)
    assert run_in_memory(tmp_path, 3, "kill") == (-signal.SIGKILL, 4)
    assert run_in_memory(tmp_path, 2, "kill") == (-signal.SIGKILL, 7)  # no complete step is lost
    newest = complete_checkpoints(tmp_path / "disk")[-1].step
    shutil.rmtree(tmp_path / "memory")  # as after a restart of the host
    assert newest >= 4
    assert run_in_memory(tmp_path, 1, "end") == (0, newest)


# ---- Several ranks.


def _train_on_ranks(directory: str, url: str, steps: int) -> tuple[int, str | None, int]:
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"tiers": [Remote(url)], "every": 2, "timeout": LIMIT_S, "run": "tested"}
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    return ckpt.steps, None if ckpt.restored is None else str(ckpt.restored.path.parent), len(ckpt.status())


def test_ranks_share_tiers(tmp_path: Path) -> None:
    pool = RankPool(2, tmp_path)
    url = f"file://{tmp_path}/remote"
    try:
        first = pool.run(_train_on_ranks, str(tmp_path / "a"), url, 5)
        second = pool.run(_train_on_ranks, str(tmp_path / "b"), url, 1)  # the first directory is gone
    finally:
        pool.close()
    assert first == [(5, None, 1), (5, None, 0)]  # rank 0 alone knows the remote
    assert second == [(6, str(tmp_path / "b"), 1), (6, str(tmp_path / "b"), 0)]
    newest = complete_checkpoints(tmp_path / "remote")[-1]
    assert newest.step == 6
    assert newest.world_size == 2
    assert newest.verify() == []


def test_an_upload_that_ends_after_the_run_does_not_erase_the_status(
    tmp_path: Path, remote: type[FlakyFileSystem]
) -> None:
    ckpt = trained(tmp_path, 2, tiers=RUN)
    before = (tmp_path / "tiers.json").read_text()
    assert "flaky://run" in before
    ckpt._tiers._write_status()  # as the uploader's thread calls it
    assert (tmp_path / "tiers.json").read_text() == before
