"""Tests encrypted checkpoints: nothing readable without the key, every change and exchange found, keys that rotate."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import aead
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from drivetrain import _C
from drivetrain.checkpointing import (
    Checkpoint,
    CheckpointError,
    Coordinator,
    Encryption,
    EncryptionError,
    Store,
)
from drivetrain.checkpointing.store.layout import CHUNK_BYTES, part_name
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.cli import main
from resumed_training import trained
from warm_python import warm_python

LIMIT_S = 60
MARK = b"a text that must not be readable"
KEYS = {"old": bytes(range(32)), "new": bytes(range(32, 64))}


def kms(name: str) -> Encryption:
    """Returns keys as a key management service gives them; `name` is the current one."""
    return Encryption(key=lambda key_id: (key_id or name, KEYS[key_id or name]))


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        "large": torch.randn((2 * CHUNK_BYTES + 4321) // 4, generator=draw),
        "secret name": torch.frombuffer(bytearray(MARK), dtype=torch.uint8),
        "half": torch.randn(7, 3, generator=draw).to(torch.bfloat16).t(),
        "empty": torch.empty(0, 2),
    }


def saved(directory: Path, encryption: Encryption | None, step: int = 1) -> Checkpoint:
    with Store(directory, encryption=encryption) as store:
        return store.save(step, tensors_of(step), {"note": MARK.decode(), "step": step}).result(LIMIT_S)


def assert_equal(checkpoint: Checkpoint, step: int) -> None:
    found, expected = checkpoint.load(), tensors_of(step)
    assert checkpoint.state(0) == {"note": MARK.decode(), "step": step}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def reseal(path: Path, change: Any) -> None:
    """Changes a record or manifest as an attacker can who knows the format: with a checksum that holds."""
    body = path.read_bytes().rpartition(b',\n"crc32c"')[0]
    changed = change(body)
    assert changed != body
    path.write_bytes(changed + b',\n"crc32c":"%08x"}\n' % _C.crc32c(changed))


def fix_manifest(folder: Path) -> None:
    """Puts the sizes and checksums of the records into the manifest, as an attacker would."""

    def change(body: bytes) -> bytes:
        visible, mark, secret = body.rpartition(b',\n"secret"')
        fields = json.loads(visible + b"}")
        for part in fields["parts"]:
            data = (folder / part["record"]).read_bytes()
            part["record_bytes"], part["record_crc32c"] = len(data), f"{_C.crc32c(data):08x}"
        return json.dumps(fields, separators=(",", ":"))[:-1].encode() + mark + secret

    reseal(folder / "manifest.json", change)


def fix_chunks(folder: Path, rank: int = 0) -> None:
    """Puts the checksums of the tensor file's chunks into its record, and the record's into the manifest."""
    record = folder / json.loads((folder / "manifest.json").read_bytes())["parts"][rank]["record"]
    data = (folder / json.loads(record.read_bytes())["file"]).read_bytes()

    def change(body: bytes) -> bytes:
        sums = [f"{_C.crc32c(data[at : at + CHUNK_BYTES]):08x}" for at in range(0, len(data), CHUNK_BYTES)]
        listed = json.dumps(sums, separators=(",", ":")).encode()
        return re.sub(rb'"chunks":\[[^]]*\]', b'"chunks":' + listed, body, count=1)

    reseal(record, change)
    fix_manifest(folder)


def test_round_trip(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, kms("old"))
    assert checkpoint.key_id == "old"
    assert checkpoint.verify() == []
    assert_equal(checkpoint, 1)
    assert checkpoint.load(["half"])["half"].tolist() == tensors_of(1)["half"].tolist()
    assert_equal(Checkpoint(checkpoint.path, kms("new")), 1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, CHUNK_BYTES + 5000), max_size=5), seed=st.integers(0, 1 << 30))
def test_any_sizes_come_back(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randint(0, 256, (n,), generator=draw, dtype=torch.uint8) for i, n in enumerate(sizes)}
    with Store(tmp_path_factory.mktemp("sizes"), encryption=kms("old")) as store:
        found = store.save(1, tensors, None).result(LIMIT_S).load()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_nothing_is_readable_without_the_key(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, kms("old"))
    plain = saved(tmp_path / "plain", None)
    assert any(MARK in path.read_bytes() for path in plain.path.iterdir())
    for path in checkpoint.path.iterdir():
        data = path.read_bytes()
        assert MARK not in data
        assert b"secret name" not in data
        assert KEYS["old"] not in data
    locked = Checkpoint(checkpoint.path)
    assert locked.key_id == "old"
    assert locked.verify() == []  # checksums need no key
    for read in (lambda: locked.load(), lambda: locked.state(0), lambda: locked.names(), lambda: locked.shapes()):
        with pytest.raises(EncryptionError, match="encrypted with the key old, and no key was given"):
            read()


def test_no_key_and_nonce_pair_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = []

    class Recording:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, real(key)

        def encrypt_into(self, nonce: bytes, data: Any, visible: bytes, out: Any) -> int:
            pairs.append((self._key, nonce))
            return self._cipher.encrypt_into(nonce, data, visible, out)

        def encrypt(self, nonce: bytes, data: bytes, visible: bytes) -> bytes:
            pairs.append((self._key, nonce))
            return self._cipher.encrypt(nonce, data, visible)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._cipher, name)

    real = aead.AESGCM
    monkeypatch.setattr(aead, "AESGCM", Recording)
    with Store(tmp_path, encryption=kms("old")) as store:
        for _ in range(3):  # the same step with the same tensors
            store.save(1, tensors_of(1), None).result(LIMIT_S)
    assert len(pairs) == len(set(pairs)) == 3 * (3 + 1 + 1)  # chunks, record, manifest


def test_changes_with_fitting_checksums_are_found(tmp_path: Path) -> None:
    """An attacker without the key can compute CRC32C, but no tag."""
    checkpoint = saved(tmp_path / "runs", kms("old"))
    other = saved(tmp_path / "runs", kms("old"), step=2)
    file, record = part_name(0, 1, "safetensors"), part_name(0, 1, "json")

    def flip(folder: Path) -> str:
        data = bytearray((folder / file).read_bytes())
        data[CHUNK_BYTES + 5] ^= 1
        (folder / file).write_bytes(data)
        fix_chunks(folder)
        return record

    def swap_chunks(folder: Path) -> str:
        data = (folder / file).read_bytes()
        first, second, rest = data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES], data[2 * CHUNK_BYTES :]
        (folder / file).write_bytes(second + first + rest)
        fix_chunks(folder)
        return record

    def take_record(folder: Path) -> str:
        for name in (file, record):
            shutil.copy(other.path / name, folder / name)
        fix_manifest(folder)
        return "manifest.json"

    def change_step(folder: Path) -> str:
        reseal(folder / "manifest.json", lambda body: body.replace(b'"serial":1', b'"serial":9'))
        return "manifest.json"

    def change_record(folder: Path) -> str:
        reseal(folder / record, lambda body: body.replace(b'"rank":0', b'"rank":1'))
        fix_manifest(folder)
        return "manifest.json"

    for change in (flip, swap_chunks, take_record, change_step, change_record):
        folder = tmp_path / change.__name__ / "step-0000000001"
        shutil.copytree(checkpoint.path, folder)
        blamed = change(folder)
        if change is not take_record:
            assert Checkpoint(folder).verify() == [], change  # without a key the checksums hold
        with pytest.raises(CheckpointError, match="authentication tag does not hold") as error:
            Checkpoint(folder, kms("old"))
        assert blamed in str(error.value) or "manifest.json" in str(error.value)


def test_exchanged_parts_of_an_intact_manifest_are_found(tmp_path: Path) -> None:
    """Even a record whose CRC32C collides with the manifest's must belong to this checkpoint and rank."""
    checkpoint, other = (saved(tmp_path / "runs", kms("old"), step) for step in (1, 2))
    file, record = part_name(0, 1, "safetensors"), part_name(0, 1, "json")
    intact = json.loads((checkpoint.path / "manifest.json").read_bytes())["parts"][0]
    for name in (file, record):
        shutil.copy(other.path / name, checkpoint.path / name)
    data = (checkpoint.path / record).read_bytes()
    assert len(data) == intact["record_bytes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.checkpointing.store.reading.hexadecimal", lambda _: intact["record_crc32c"])
        with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
            Checkpoint(checkpoint.path, kms("old"))


def test_a_chunk_of_another_file_is_found_and_named(tmp_path: Path) -> None:
    checkpoint, other = (saved(tmp_path, kms("old"), step) for step in (1, 2))
    file = checkpoint.path / part_name(0, 1, "safetensors")
    data, theirs = bytearray(file.read_bytes()), (other.path / file.name).read_bytes()
    data[CHUNK_BYTES : 2 * CHUNK_BYTES] = theirs[CHUNK_BYTES : 2 * CHUNK_BYTES]
    file.write_bytes(data)
    (fault,) = checkpoint.verify()
    assert (fault.file, fault.chunk, fault.tensors) == (file.name, 1, ("large",))
    checkpoint._parts[0].record.chunks[1] = other._parts[0].record.chunks[1]  # as if the checksums collided
    with pytest.raises(CheckpointError, match=r"chunk 1 \(large\): its authentication tag does not hold"):
        checkpoint.load()


def test_keys_rotate(tmp_path: Path) -> None:
    old, new = (base64.b64encode(key).decode() for key in KEYS.values())
    file = tmp_path / "keys"
    file.write_text(f"{old}\n")
    keys = Encryption(key_file=file)
    runs = tmp_path / "runs"
    with Store(runs, encryption=keys, keep=None) as store:
        first = store.save(1, tensors_of(1), {"note": MARK.decode(), "step": 1}).result(LIMIT_S)
        file.write_text(f"# the newest key is first\n{KEYS['new'].hex()}\n{old} # of last year\n")
        second = store.save(2, tensors_of(2), {"note": MARK.decode(), "step": 2}).result(LIMIT_S)
        assert first.key_id != second.key_id
        for step, checkpoint in enumerate(store.checkpoints(), 1):
            assert_equal(checkpoint, step)
    file.write_text(new)
    fresh = Encryption(key_file=file)
    assert [each.step for each in complete_checkpoints(runs, fresh)] == [2]  # the first is passed over
    file.write_text(old)
    fresh = Encryption(key_file=file)
    with pytest.raises(EncryptionError, match=f"expected {second.key_id}"):  # no return to an older state
        complete_checkpoints(runs, fresh)


def test_plain_checkpoints_need_consent(tmp_path: Path) -> None:
    saved(tmp_path, None)
    with pytest.raises(EncryptionError, match="not encrypted, and anyone could have written it: pass accept_plain"):
        complete_checkpoints(tmp_path, kms("old"))
    keys = Encryption(key=lambda key_id: ("old", KEYS["old"]), accept_plain=True)
    (accepted,) = complete_checkpoints(tmp_path, keys)
    assert_equal(accepted, 1)


def test_a_plain_record_in_an_encrypted_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint, plain = saved(tmp_path / "a", kms("old")), saved(tmp_path / "b", None)
    for name in (part_name(0, 1, "safetensors"), part_name(0, 1, "json")):
        shutil.copy(plain.path / name, checkpoint.path / name)
    part = json.loads((checkpoint.path / "manifest.json").read_bytes())["parts"][0]
    record = checkpoint.path / part["record"]
    data = record.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.checkpointing.store.reading.hexadecimal", lambda _: part["record_crc32c"])
        reseal(record, lambda body: body + b" " * (part["record_bytes"] - len(data)))
        keys = Encryption(key=lambda key_id: ("old", KEYS["old"]), accept_plain=True)
        with pytest.raises(CheckpointError, match="not the record that the manifest means"):
            Checkpoint(checkpoint.path, keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty, expected a key of 32 bytes"),
        ("# nothing\n", "is empty"),
        ("c2hvcnQ=", "8 characters as key 1, expected 32 bytes as base64 or hexadecimal"),
        (KEYS["old"].hex()[:-2] + "zz", "64 characters as key 1"),
    ],
)
def test_bad_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    monkeypatch.setenv("THE_KEY", text)
    for keys, where in ((Encryption(key_file=file), "key_file"), (Encryption(key_env="THE_KEY"), "variable THE_KEY")):
        with pytest.raises(EncryptionError, match=message) as error:
            keys.current()
        assert where in str(error.value)
        assert not text.strip() or text.strip() not in str(error.value)
        with Store(tmp_path / "runs", encryption=keys) as store, pytest.raises(CheckpointError, match=message):
            store.save(1, tensors_of(1), None).result(LIMIT_S)


def test_sources_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(KEYS["old"])
    monkeypatch.setenv("THE_KEY", base64.b64encode(KEYS["old"]).decode())
    name, key = Encryption(key_file=raw).current()
    assert (name, key) == Encryption(key_env="THE_KEY").current()
    assert key == KEYS["old"]
    with pytest.raises(EncryptionError, match="cannot be read: No such file"):
        Encryption(key_file=tmp_path / "none").current()
    with pytest.raises(EncryptionError, match="OTHER is not set"):
        Encryption(key_env="OTHER").current()
    with pytest.raises(EncryptionError, match="the key 'x' was not found: KeyError"):
        kms("old").find("x")
    with pytest.raises(EncryptionError, match="expected the identifier as a str and a key of 32 bytes"):
        Encryption(key=lambda key_id: ("short", b"1")).current()
    for arguments in ({}, {"key_file": raw, "key_env": "THE_KEY"}):
        with pytest.raises(ValueError, match="expected one of key_file, key_env and key"):
            Encryption(**arguments)


def test_a_missing_package_is_named() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from drivetrain.checkpointing import Encryption\n"
        "try: Encryption(key_env='X')\n"
        "except ImportError as error: assert 'pip install' in str(error), error\n"
        "else: raise AssertionError('no error')\n"
    )
    subprocess.run([warm_python(), "-c", program], check=True, timeout=LIMIT_S)


def test_ranks_encrypt_their_parts(tmp_path: Path) -> None:
    hash_store = torch.distributed.HashStore()
    stores = [
        Store(tmp_path, rank=rank, world_size=2, coordinator=Coordinator(hash_store, rank, 2), encryption=kms("new"))
        for rank in range(2)
    ]
    saves = [store.save(5, {f"part.{rank}": torch.full((9,), rank)}, rank) for rank, store in enumerate(stores)]
    for save in saves:
        save.result(LIMIT_S)
    for store in stores:
        store.close()
    checkpoint = Checkpoint(saves[0].result().path, kms("old"))
    assert checkpoint.verify() == []
    assert [checkpoint.state(rank) for rank in range(2)] == [0, 1]
    assert checkpoint.load()["part.1"].tolist() == [1] * 9
    first, second = (checkpoint.path / part_name(rank, 2, "json") for rank in range(2))
    assert json.loads(first.read_bytes())["protection"]["salt"] != json.loads(second.read_bytes())["protection"]["salt"]


def test_the_command_line_exports_plain_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "runs", kms("old"))
    key = tmp_path / "key"
    key.write_text(KEYS["old"].hex())
    saved(tmp_path / "runs", Encryption(key_file=key), step=2)
    out = tmp_path / "model.safetensors"
    directory = str(tmp_path / "runs")
    assert main(["ckpt", "export", directory, "--out", str(out)]) == 2
    assert "no key was given" in capfd.readouterr().err
    assert main(["ckpt", "export", directory, "--key-file", str(key), "--out", str(out)]) == 0
    found = load_file(out)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(2).items())
    capfd.readouterr()
    assert main(["ckpt", "verify", directory, "--step", "2"]) == 0
    assert "checksums only" in capfd.readouterr().out
    assert main(["ckpt", "ls", directory]) == 0
    assert "old" in capfd.readouterr().out
    os.environ["A_KEY"] = KEYS["old"].hex()
    try:
        assert main(["ckpt", "show", directory, "--key-env", "A_KEY", "--step", "2"]) == 0
    finally:
        del os.environ["A_KEY"]
    assert MARK.decode() in capfd.readouterr().out


def test_a_training_does_not_start_again_or_go_back_without_its_key(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert trained(runs, 1).steps == 1
    keys = Encryption(key=lambda key_id: ("old", KEYS["old"]), accept_plain=True)
    assert trained(runs, 1, encryption=keys).steps == 2
    with pytest.raises(EncryptionError, match="no key was given"):
        trained(runs, 1)  # step 1 is plain, and must not be resumed
    lost = Encryption(key=lambda key_id: {None: ("new", KEYS["new"])}[key_id])
    with pytest.raises(EncryptionError, match="the key 'old' was not found"):
        trained(runs, 1, encryption=lost)
    assert trained(runs, 1, encryption=kms("new")).steps == 3
