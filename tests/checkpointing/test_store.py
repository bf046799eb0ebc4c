"""Tests the checkpoint store: what is saved is loaded bit by bit, old checkpoints go, and bad arguments are refused."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from drivetrain import _C
from drivetrain.checkpointing import Checkpoint, CheckpointError, Store
from drivetrain.checkpointing.store import reading
from drivetrain.checkpointing.store.directory import leftovers
from drivetrain.checkpointing.store.layout import CHUNK_BYTES, part_name, temporary_name
from warm_python import warm_python

LIMIT_S = 60
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

PLAIN_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]
# safetensors stores these as another dtype: real parts, or bytes.
MAPPED_DTYPES = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (5, 3), (2, 3, 5), (1, 1031)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of random bits. Bools are 0 or 1."""
    size = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    """Returns the bytes of the elements in row-major order, with NaNs as they are."""
    items = tensor.resolve_conj().resolve_neg().contiguous()
    return items.flatten().view(torch.uint8).numpy().tobytes() if items.numel() else b""


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def saved(directory: Path, tensors: dict[str, Tensor], state: object = None) -> Checkpoint:
    with Store(directory) as store:
        return store.save(1, tensors, state).result(LIMIT_S)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*PLAIN_DTYPES, *MAPPED_DTYPES], ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"a": drawn((3,), torch.int8), "b": drawn(shape, dtype), "c": drawn((2,), torch.float64)}
    checkpoint = saved(tmp_path, tensors)
    assert_same_bits(checkpoint.load(), tensors)
    assert checkpoint.shapes() == {name: tensors[name].shape for name in checkpoint.names()}
    assert checkpoint.dtypes() == {name: tensors[name].dtype for name in checkpoint.names()}
    theirs = load_file(checkpoint.path / part_name(0, 1, "safetensors"))
    assert {name: bits(tensor) for name, tensor in theirs.items()} == {n: bits(t) for n, t in tensors.items()}
    assert theirs["b"].dtype == MAPPED_DTYPES.get(dtype, dtype)


def test_views_come_back_contiguous(tmp_path: Path, isa: str) -> None:
    base = torch.randn(24, 30, 7, dtype=torch.float64)
    tensors = {
        "transposed": base.transpose(0, 2),
        "strided": base[::2, 1::3, ::3],
        "expanded": torch.randn(5, 1).expand(5, 9),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(6, dtype=torch.complex64).conj(),
        "negative": torch.randn(6, dtype=torch.complex64).conj().imag,
        "gradient": torch.randn(3, requires_grad=True),
        "bytes": torch.randint(0, 255, (50, 3), dtype=torch.uint8).t(),
        "shorts": torch.randn(50, 3).to(torch.bfloat16).t(),
    }
    loaded = saved(tmp_path, tensors).load()
    assert_same_bits(loaded, {name: tensor.detach() for name, tensor in tensors.items()})
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in loaded.values())


def test_tensors_that_cross_chunks_come_back(tmp_path: Path, isa: str) -> None:
    tensors = {
        "large": drawn((2 * CHUNK_BYTES + 12345,), torch.uint8),
        "wide": drawn((3, CHUNK_BYTES // 8 + 1), torch.float32).t(),
        "small": drawn((11,), torch.int16),
        "last": drawn((CHUNK_BYTES,), torch.uint8),
    }
    checkpoint = saved(tmp_path, tensors)
    assert checkpoint.verify() == []
    assert_same_bits(checkpoint.load(), tensors)
    for name, tensor in tensors.items():
        assert_same_bits(checkpoint.load([name]), {name: tensor})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda name: name != "__metadata__"),
        unique=True,
        max_size=12,
    ),
    data=st.data(),
)
def test_any_names_come_back(tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject) -> None:
    tensors = {
        name: drawn(data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from([*PLAIN_DTYPES, *MAPPED_DTYPES])))
        for name in names
    }
    checkpoint = saved(tmp_path_factory.mktemp("names"), tensors, names)
    assert set(checkpoint.names()) == set(names)
    assert checkpoint.state(0) == names
    assert_same_bits(checkpoint.load(), tensors)
    some = names[::2]
    assert_same_bits(checkpoint.load(some), {name: tensors[name] for name in some})
    theirs = load_file(checkpoint.path / part_name(0, 1, "safetensors"))
    assert theirs.keys() == tensors.keys()


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(state=_json)
def test_any_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: object) -> None:
    checkpoint = saved(tmp_path_factory.mktemp("state"), {}, state)
    assert checkpoint.state(0) == state
    assert checkpoint.load() == {}


def test_state_is_copied_when_save_returns(tmp_path: Path) -> None:
    state = {"seen": [1, 2]}
    with Store(tmp_path) as store:
        save = store.save(1, {}, state)
        state["seen"].append(3)
        assert save.result(LIMIT_S).state(0) == {"seen": [1, 2]}


def test_tensors_may_change_once_they_are_copied(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(16)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    with Store(tmp_path) as store:
        for step in range(3):
            save = store.save(step, tensors, None)
            save.wait_copied(LIMIT_S)
            for tensor in tensors.values():
                tensor.add_(1)
            assert_same_bits(save.result(LIMIT_S).load(), expected)
            expected = {name: tensor.clone() for name, tensor in tensors.items()}
        assert save.copy_s is not None
        assert save.write_s is not None
        assert save.done()
        assert save.exception() is None
        assert 0 < save.nbytes <= store.memory_bytes <= save.nbytes + (2 << 20)


def test_saves_queue_in_one_snapshot_of_memory(tmp_path: Path) -> None:
    with Store(tmp_path, keep=None) as store:
        saves = [store.save(step, {"x": torch.full((1 << 20,), float(step))}, step) for step in range(6)]
        for step, save in enumerate(saves):
            checkpoint = save.result(LIMIT_S)
            assert (checkpoint.step, checkpoint.state(0)) == (step, step)
            assert torch.equal(checkpoint.load()["x"], torch.full((1 << 20,), float(step)))
        assert store.memory_bytes <= saves[0].nbytes + (2 << 20)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == list(range(6))


def test_keep_deletes_the_oldest(tmp_path: Path) -> None:
    with Store(tmp_path, keep=2) as store:
        for step in (10, 20, 30, 40):
            store.save(step, {"x": torch.ones(3)}, None).result(LIMIT_S)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [30, 40]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "step-0000000030", "step-0000000040"]


def test_the_newest_is_the_last_saved_after_a_return_to_an_earlier_step(tmp_path: Path) -> None:
    with Store(tmp_path, keep=2) as store:
        for step in (10, 20, 30):
            store.save(step, {}, "first").result(LIMIT_S)
        store.save(15, {}, "second").result(LIMIT_S)
        assert store.latest().step == 15
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [30, 15]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for value in range(3):
            store.save(7, {"x": torch.tensor(value)}, value).result(LIMIT_S)
    (checkpoint,) = store.checkpoints()
    assert checkpoint.state(0) == 2
    assert checkpoint.load()["x"] == 2
    assert leftovers(tmp_path) == []


def test_latest_passes_over_damaged_metadata_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store(tmp_path) as store:
        older, newer = (store.save(step, {"x": torch.ones(2)}, None).result(LIMIT_S) for step in (1, 2))
    record = newer.path / part_name(0, 1, "json")
    record.write_bytes(record.read_bytes().replace(b'"state":null', b'"state":true'))
    with caplog.at_level(logging.WARNING, "drivetrain"):
        assert store.latest().path == older.path
    assert record.name in caplog.text
    assert "CRC32C" in caplog.text


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"x": torch.ones(3)}, None).result(LIMIT_S)

    read = reading._read_manifest

    def deleted(path: Path, *options: Any) -> Any:
        if path.name.endswith("1"):
            path.rename(tmp_path / ".trash-step-1")
        return read(path, *options)

    monkeypatch.setattr(reading, "_read_manifest", deleted)
    found = reading.survey(tmp_path)
    assert [one.step for one in found.complete] == [2]
    assert found.damaged == []


def test_latest_of_an_empty_directory_is_none(tmp_path: Path) -> None:
    with Store(tmp_path / "a" / "b") as store:
        assert store.latest() is None
        assert store.checkpoints() == []


def test_leftovers_go_at_the_next_start_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = saved(tmp_path, {"x": torch.ones(2)})
    mine = [tmp_path / temporary_name(5), tmp_path / temporary_name(6, "trash")]
    for folder in mine:
        folder.mkdir()
        (folder / part_name(0, 1, "safetensors")).write_bytes(b"half")
    strange = tmp_path / temporary_name(7)
    strange.mkdir()
    (strange / "notes.txt").write_text("mine")
    others = [tmp_path / "step-1", tmp_path / ".tmp-step-5", tmp_path / "notes"]
    for folder in others:
        folder.mkdir()
    with caplog.at_level(logging.WARNING, "drivetrain"), Store(tmp_path) as store:
        assert [checkpoint.path for checkpoint in store.checkpoints()] == [kept.path]
    assert not any(folder.exists() for folder in mine)
    assert (strange / "notes.txt").read_text() == "mine"
    assert "notes.txt" in caplog.text
    assert all(folder.is_dir() for folder in others)


def test_names_that_several_calls_ask_for(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"x": torch.ones(2), "y": torch.zeros(1)})
    assert list(checkpoint.load(["y", "x", "y"])) == ["y", "x"]
    with pytest.raises(KeyError, match="'z'"):
        checkpoint.load(["x", "z"])
    with pytest.raises(ValueError, match="rank is 1, expected 0 to 0"):
        checkpoint.load(rank=1)
    with pytest.raises(ValueError, match="rank is -1"):
        checkpoint.state(-1)


def test_a_second_store_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys; from drivetrain.checkpointing import CheckpointError, Store\n"
        "try: Store(sys.argv[1], lock_timeout=0)\n"
        "except CheckpointError as error: print(error)\n"
    )
    with Store(tmp_path):
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
            Store(tmp_path, lock_timeout=0)
        answer = subprocess.run(
            [warm_python(), "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        assert f"in use by process {os.getpid()}" in answer.stdout
    Store(tmp_path, lock_timeout=0).close()


def test_a_forked_child_does_not_hold_the_directory(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from drivetrain.checkpointing import Store\n"
        "store = Store(sys.argv[1]); reader, writer = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.write(writer, b'x'); time.sleep(60); os._exit(0)\n"
        "os.read(reader, 1); print('ready', flush=True); os._exit(0)\n"
    )
    process = subprocess.Popen([warm_python(), "-c", program, str(tmp_path)], stdout=subprocess.PIPE, process_group=0)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    process.wait(LIMIT_S)
    try:
        Store(tmp_path, lock_timeout=0).close()  # the child lives and has inherited the descriptor
    finally:
        os.killpg(process.pid, 9)
        process.stdout.close()


def test_a_closed_store_refuses_saves(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save = store.save(1, {"x": torch.ones(1 << 20)}, None)
    store.close()
    assert save.done()
    assert save.result(0).step == 1
    with pytest.raises(CheckpointError, match="is closed"):
        store.save(2, {}, None)


def test_the_interpreter_completes_the_last_save(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from drivetrain.checkpointing import Store\n"
        "Store(sys.argv[1]).save(3, {'x': torch.ones(1 << 22)}, 'last')\n"
    )
    subprocess.run([warm_python(), "-c", program, str(tmp_path)], check=True, timeout=LIMIT_S)
    with Store(tmp_path) as store:
        latest = store.latest()
    assert latest.state(0) == "last"
    assert latest.verify() == []


@pytest.mark.parametrize(
    ("step", "tensors", "state", "error", "message"),
    [
        (-1, {}, None, ValueError, "step is -1, expected at least 0"),
        (1, {3: torch.ones(1)}, None, TypeError, "tensors has the key 3 of type int, expected a str"),
        (1, {"x": 1.0}, None, TypeError, r"tensors\['x'\] is a float, expected a torch.Tensor"),
        (1, {"__metadata__": torch.ones(1)}, None, ValueError, "reserves"),
        (1, {"\ud800": torch.ones(1)}, None, ValueError, "UTF-8"),
        (1, {"x": torch.ones(1, device="meta")}, None, ValueError, "on meta, expected a strided tensor on the CPU"),
        (1, {"x": torch.eye(2).to_sparse()}, None, ValueError, "torch.sparse_coo tensor"),
        (1, {}, {"a": (1, 2)}, TypeError, r"state\['a'\] is a tuple, expected"),
        (1, {}, {"a": [{2: 1}]}, TypeError, r"state\['a'\]\[0\] has the key 2 of type int, expected a str"),
        (1, {}, [Path()], TypeError, r"state\[0\] is a PosixPath, expected"),
    ],
)
def test_bad_arguments_of_save(
    tmp_path: Path, step: int, tensors: dict[str, Tensor], state: object, error: type[Exception], message: str
) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(error, match=message):
            store.save(step, tensors, state)
        store.save(1, {"x": torch.ones(1)}, None).result(LIMIT_S)  # the store still works
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank is 2, expected 0 to"),
        ({"keep": 0}, "keep is 0, expected at least 1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"world_size": 2}, "coordinator is None and world_size 2"),
    ],
)
def test_bad_arguments_of_the_store(tmp_path: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Store(tmp_path, **arguments)


def test_a_renamed_or_newer_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {})
    moved = checkpoint.path.with_name("step-0000000009")
    checkpoint.path.rename(moved)
    with pytest.raises(CheckpointError, match="it is of step 1: the folder was renamed"):
        Checkpoint(moved)
    manifest = moved / "manifest.json"
    body = manifest.read_bytes().replace(b'"version":1', b'"version":9').rpartition(b',\n"crc32c"')[0]
    manifest.write_bytes(body + b',\n"crc32c":"%08x"}\n' % _C.crc32c(body))
    with pytest.raises(CheckpointError, match="format version 9, expected at most 2: update drivetrain"):
        Checkpoint(moved)
    assert json.loads(manifest.read_bytes())["step"] == 1  # plain JSON


def test_checksums_agree_with_the_definition(isa: str) -> None:
    assert _C.crc32c(b"123456789") == 0xE3069283
    data = os.urandom(10007)
    assert _C.crc32c(data[4000:], _C.crc32c(data[:4000])) == _C.crc32c(data)


def test_copying_threads_need_no_gil() -> None:
    """A thread that asks for the GIL while Python shuts down aborts the process."""
    sleep = ctypes.PyDLL(None).usleep  # a PyDLL keeps the GIL
    tensors = [torch.randn(1000) for _ in range(200)]
    snapshot = _C.Snapshot(_C.Slab(), bytes(4096), tensors)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # this thread then keeps the GIL between the sleeps as well
    try:
        for _ in range(100):
            sleep(50_000)
            if snapshot.copy_seconds is not None:
                return
        pytest.fail("the copy waits for this thread")
    finally:
        sys.setswitchinterval(interval)
