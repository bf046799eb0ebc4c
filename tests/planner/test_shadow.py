"""Tests that planned scripts change no file, start no program and reach no server, and that their loops are found."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from test_script import ran

HEAD = """
import glob, json, logging, os, pickle, shutil, socket, sqlite3, subprocess, tempfile
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
optimizer = torch.optim.Adam(model.parameters())
def train(after):
    for step in range(6):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
"""
WRITERS = {
    "save": "train(lambda step: torch.save(model.state_dict(), 'model.pt'))",
    "resume": """
def after(step):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new.pt")
    state = torch.load("new.pt")
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    assert state["step"] == step
train(after)
""",
    "rotate": """
def after(step):
    os.makedirs(f"ckpt-{step}", exist_ok=True)
    with open(f"ckpt-{step}/a.pt", "wb") as file:
        torch.save(model, file)
    old = sorted(glob.glob("ckpt-*"))
    assert f"ckpt-{step}" in old and "ckpt-old" in old
    while len(old) > 1:
        shutil.rmtree(old.pop())
train(after)
""",
    "rename": """
def after(step):
    torch.save(model.state_dict(), "model.tmp")
    os.replace("model.tmp", "model.pt")
    Path("log.txt").rename("log.1")
    assert Path("log.1").read_text() == "begin\\n" and not Path("log.txt").exists()
    Path("log.txt").write_text("begin\\n")
train(after)
""",
    "log": """
logging.basicConfig(filename="log.txt")
def after(step):
    logging.warning("step")
    with open("log.txt", "a") as file:
        file.write("step\\n")
    assert open("log.txt").read().startswith("begin\\nWARNING") and os.path.getsize("log.txt") > 6
train(after)
""",
    "thread": """
import itertools, threading, time
def write_on():  # also after the planner has stopped the loop
    for number in itertools.count():
        with open(f"late-{number}.txt", "w") as file:
            file.write("late")
        torch.save({"number": number}, f"late-{number}.pt")
        time.sleep(0.001)
threading.Thread(target=write_on, daemon=True).start()
train(lambda step: None)
""",
    "delete": """
os.remove("log.txt"), Path("model.pt").unlink(), shutil.rmtree("ckpt-old")
assert not os.path.exists("ckpt-old/a.pt") and "log.txt" not in os.listdir()
train(lambda step: None)
""",
    "numpy": """
np.save("array.npy", np.ones(3)), np.savez("many.npz", a=np.ones(2)), np.savetxt("table.csv", np.ones(3))
assert np.load("array.npy").sum() == np.loadtxt("table.csv").sum() == np.genfromtxt("table.csv").sum() == 3
mapped = np.memmap("data.bin", dtype=np.uint8, mode="r+"); mapped[:] = 7; mapped.flush()
data = sqlite3.connect("runs.db"); data.execute("create table t (a)"); data.commit()
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "a").touch(), os.symlink("a", folder + "/b"), os.chmod(folder + "/b", 0o600)
os.chmod("model.pt", 0o600), os.utime("model.pt", (1, 1)), os.truncate("log.txt", 0)
train(lambda step: None)
""",
    "best": """
import copy
best = copy.deepcopy(model.state_dict())
def after(step):
    Path("best.json").write_text(json.dumps(step))
    pickle.dump(model, open("model.pt", "wb"))
train(after)
torch.save(best, Path("sub") / "best.pt") if os.path.isdir("sub") else None
""",
    "native": """
import importlib.util
assert importlib.util.find_spec("pyarrow")
import pyarrow, tokenizers, typeshed_client
assert typeshed_client.get_search_context()
Path("table.arrow").write_bytes(b"12")
assert pyarrow.memory_map("table.arrow") == pyarrow.input_stream("table.arrow") == b"12"
pyarrow.memory_map("data.bin", "r+")
assert pyarrow.memory_map("data.bin") == b"9234"
os.makedirs("made"), tokenizers.Tokenizer().save("made/tokenizer.json")
assert tokenizers.Tokenizer.from_file("made/tokenizer.json") == b"9"
train(lambda step: None)
""",
    "programs": """
assert subprocess.run("rm -rf *", shell=True).returncode == 0 and os.system("rm model.pt") == 0
assert subprocess.check_output(["git", "rev-parse", "HEAD"], text=True) == ""
try:
    socket.create_connection(("127.0.0.1", 9))
    raise AssertionError("connected")
except ConnectionRefusedError:
    pass
import multiprocessing, torch.multiprocessing
for method in ("spawn", "forkserver"):
    try:
        torch.multiprocessing.get_context(method).Process(target=os.mkdir, args=("made",)).start()
        raise AssertionError("started")
    except PermissionError as error:
        assert "a planned script changes nothing" in str(error)
forked = multiprocessing.get_context("fork").Process(target=os.mkdir, args=("made",))
forked.start(), forked.join()
assert forked.exitcode == 0
train(lambda step: None)
""",
    "finally": """
try:
    train(lambda step: None)
finally:
    os.rename("ckpt-old", "moved")
    shutil.copy("moved/a.pt", "model.pt")
    assert Path("model.pt").read_text() == "old"
""",
}

# Opens files as native code does, which Python sees nothing of. It stands for several libraries.
NATIVE = """
import ctypes
def native(path, mode="r"):
    libc = ctypes.CDLL(None)
    file, found = libc.open(path.encode(), 0 if mode == "r" else 0o102, 0o600), ctypes.create_string_buffer(9)
    if mode != "r":
        libc.pwrite(file, b"9", 1, 0)
    size = libc.read(file, found, 9)
    return found.raw[:size]
def get_search_context(search_path=None):
    return search_path
memory_map, input_stream, read = [lambda *given: native(*given) for _ in range(3)]
class Tokenizer:
    save = lambda self, path: native(path, "w")
    from_file = staticmethod(read)
"""


def planned(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return ran(folder, "-m", "drivetrain", "plan", "--json", "../plan.json", "--gpu", "cpu", "train.py")


def contents(folder: Path) -> dict[str, object]:
    """Returns every path with its hash, mode and time."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (digest, facts.st_mode, facts.st_mtime_ns)
    return found


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_planned_script_changes_nothing(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    (folder / "ckpt-old").mkdir(parents=True)
    for file, text in (
        ("model.pt", "precious"),
        ("log.txt", "begin\n"),
        ("ckpt-old/a.pt", "old"),
        ("data.bin", "1234"),
        ("pyarrow.py", NATIVE),
        ("tokenizers.py", NATIVE),
        ("typeshed_client.py", NATIVE),
    ):
        (folder / file).write_text(text)
    (folder / "train.py").write_text(HEAD + WRITERS[name])
    before = contents(folder)
    done = planned(folder, HEAD + WRITERS[name])
    assert done.returncode == 0, done.stderr
    after = contents(folder)
    before.pop("train.py"), after.pop("train.py")
    assert after == before
    kept = json.loads((tmp_path / "plan.json").read_text())["kept_from"]
    if name == "save":
        assert [line for line in kept if line.startswith("write model.pt (35")], kept  # KiB of 301 * 300 + 602 floats
    if name == "programs":
        assert {"start rm -rf *", "start git rev-parse HEAD", "connect to 127.0.0.1:9"} <= set(kept)
    if name == "delete":
        assert {"remove log.txt", "remove model.pt", "remove ckpt-old"} <= set(kept)
