"""Tests `drivetrain monitor` and `drivetrain run --with-monitor`, and what a terminal, a file and a notebook show."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pty
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import make_batches, make_model, train

from drivetrain.cli import main
from drivetrain.monitor import Monitor, read_events, summarize
from drivetrain.monitor.progress import Progress
from drivetrain.monitor.summary import Summary
from warm_python import warm_python

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert sys.argv[1:] == ["--epochs", "2"]
torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(60, 8), torch.randn(60, 4))
train, test = DataLoader(data, batch_size=6, shuffle=True), DataLoader(data, batch_size=30)
for epoch in range(2):
    for inputs, targets in train:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for inputs, _ in test:
            model(inputs)
print("sum", model.weight.sum().item().hex())
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[f"jsonl:{tmp_path}/a.jsonl"], progress=False) as monitor:
        train(model, optimizer, monitor(make_batches(20)))
    return tmp_path / "a.jsonl"


def slower(path: Path, factor: float) -> Path:
    """Writes the same run with a data phase that takes longer."""
    copy = path.with_name("slower.jsonl")
    with copy.open("w") as file:
        for event in read_events(path):
            if event["type"] == "step":
                added = factor * event["wall_s"]
                event["phases"]["data"] += added
                event["wall_s"] += added
            file.write(json.dumps(event) + "\n")
    return copy


def test_monitor_prints_the_table(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(recorded)]) == 0
    shown = capsys.readouterr().out
    assert "a: 17 steps, median" in shown
    for label in ("waiting for data", "forward and loss", "backward", "clipping and optimizer", "everything else"):
        assert label in shown
    assert "recomputation" not in shown


def test_monitor_compares_runs(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(recorded), str(slower(recorded, 2.0))]) == 0
    shown = capsys.readouterr().out
    (step,) = [line for line in shown.splitlines() if line.split()[:1] == ["step"]]
    assert step.split()[-1] == "3.00"


def test_runs_in_files_of_one_name_are_told_apart(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded.parent)
    for folder in ("before", "after"):
        Path(folder).mkdir()
        shutil.copy(recorded, f"{folder}/run.jsonl")
    assert main(["monitor", "before/run.jsonl", "after/run.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "before/run: 17 steps" in shown
    assert "after/run: 17 steps" in shown


@pytest.mark.parametrize(
    "line",
    [b"[1]", b'{"a":1}', b'{"v":"1","type":"step"}', b'{"v":null}', b'{"v":1}', b'{"v":1,"type":"step"}', b"\xff\xfe"],
)
def test_a_foreign_line_is_named(line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(line + b"\n")
    assert main(["monitor", str(path)]) == 2
    assert "foreign.jsonl, line 1: " in capsys.readouterr().err


def run_script(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [warm_python(), "-m", "drivetrain", "run", *options, str(script), "--epochs", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


def test_run_monitors_an_unedited_script(tmp_path: Path) -> None:
    plain, watched = run_script(tmp_path), run_script(tmp_path, "--with-monitor", "--monitor-to", "jsonl:run.jsonl")
    assert watched.returncode == plain.returncode == 0, watched.stderr
    assert watched.stdout == plain.stdout
    assert "waiting for data" in watched.stderr
    assert "waiting for data" not in plain.stderr
    steps = [event for event in read_events(tmp_path / "run.jsonl") if event["type"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 21))
    for step in steps:
        assert step["complete"]
        assert step["samples"] == 6
        assert all(step["phases"][phase] > 0 for phase in ("data", "forward", "backward", "optimizer"))


@pytest.mark.parametrize(
    ("end", "failed"), [("raise KeyError", True), ("sys.exit(3)", True), ("sys.exit(0)", False), ("pass", False)]
)
def test_the_last_event_says_how_the_script_ended(end: str, failed: bool, tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(ITERATORS + end)
    command = [warm_python(), "-m", "drivetrain", "run", "--monitor-to", "jsonl:run.jsonl", "end.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert "AssertionError" not in done.stderr
    *_, last = read_events(tmp_path / "run.jsonl")
    assert (last["type"], last["failed"]) == ("end", failed), done.stderr
    assert last["step"] == 9


ITERATORS = """
import sys
import torch
from torch.utils.data import DataLoader, dataloader
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(12, 1), batch_size=4)
for _ in range(3):
    batches = iter(loader)
    assert len(batches) == 3 and isinstance(batches, dataloader._SingleProcessDataLoaderIter)
    assert batches._num_yielded == 0 and iter(batches) is batches
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
for batch in loader:
    break
"""


def test_run_refuses_a_wrong_sink(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--monitor-to", "nowhere")
    assert done.returncode == 2
    assert "to has 'nowhere', expected one of jsonl:FILE" in done.stderr


def step_event(step: int, data_s: float) -> dict[str, Any]:
    from drivetrain.phases import PHASES

    phases = dict.fromkeys(PHASES, 0.001) | {"data": data_s}
    wall_s = sum(phases.values())
    return {"type": "step", "step": step, "wall_s": wall_s, "phases": phases, "samples": 8, "samples_per_s": 8 / wall_s}


def test_lines_without_a_terminal() -> None:
    file = io.StringIO()
    progress = Progress(file=file)
    assert progress.kind == "lines"
    progress.show()
    progress.take(step_event(1, 0.032), (1, 10))
    progress.close()
    assert file.getvalue() == "step 1 (batch 1/10) · 40.0 ms · 200 samples/s · waiting for data 80%, " + (
        "copy to the device 2%, forward and loss 2%\n"
    )


def test_the_rate_belongs_to_the_shown_time() -> None:
    """Workers deliver batches in bursts; the mean of such steps' rates is far above the run's."""
    progress = Progress("lines", file=io.StringIO())
    for step in range(200):
        progress.take(step_event(step, 0.080 if step % 2 else 0.0), (0, 0))
    _, milliseconds, rate, _ = progress.text().split(" · ")
    assert float(rate.split()[0]) == pytest.approx(8 / (1e-3 * float(milliseconds.split()[0])), rel=0.01)


def all_of(terminal: int) -> bytes:
    """Returns what was written to a terminal whose other end is closed, which one read may not return whole."""
    parts = []
    with contextlib.suppress(OSError):  # Linux reports the end as an error
        while part := os.read(terminal, 10_000):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("batches", [0, 10])
def test_a_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as file:
        progress = Progress(file=file)
        assert progress.kind == "live"
        progress.take(step_event(1, 0.032), (5, batches))
        progress.close()
    shown = all_of(ours).decode()
    os.close(ours)
    assert " · 40.0 ms · 200 samples/s" in shown
    assert "\x1b[" in shown
    assert ("━" in shown) == (batches > 0)


def screen(written: str) -> list[str]:
    """Returns the lines that a terminal shows, where nothing but erased lines moves back."""
    return [line.rpartition("\x1b[2K")[2].rstrip("\r") for line in written.split("\n")]


def test_output_of_the_script_goes_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines longer than the terminal, of print, of logging and of another bar, come out as they are."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", buffering=1) as file:
        plain = file.write
        monkeypatch.setattr("sys.stdout", file)
        handler = logging.StreamHandler(file)
        progress = Progress(file=file)

        def show() -> None:
            progress._shown_at = 0.0
            progress.show()

        progress.take(step_event(1, 0.032), (5, 10))
        show()
        print("x" * 300)
        show()
        handler.emit(logging.makeLogRecord({"msg": "careful"}))
        show()
        print("50%", end="")
        show()  # waits for the end of the script's line
        print("\r100%")
        show()
        in_child = os.fork()
        if in_child == 0:
            os._exit(int("above" in file.write.__qualname__))
        assert os.waitpid(in_child, 0)[1] == 0
        progress.close()
        assert file.write == plain
    shown = screen(all_of(ours).decode())
    os.close(ours)
    assert [line.rpartition("\r")[2] for line in shown[:3]] == ["x" * 300, "careful", "100%"]
    assert shown[3].startswith("━━━━━━┄┄┄┄┄┄ step 1 (batch 5/10)")
    assert len(shown[3]) <= 79
    assert shown[4:] == [""]


def test_the_line_gives_back_the_write_that_it_found() -> None:
    """Another library may have replaced it before, and may replace it while the line shows."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as file:
        plain, seen = file.write, []

        def note(text: str) -> int:
            seen.append(text)
            return plain(text)

        file.write = note  # type: ignore[method-assign]
        for replaces in (False, True):
            progress = Progress(file=file)
            progress.take(step_event(1, 0.032), (5, 10))
            progress._shown_at = 0.0
            progress.show()
            if replaces:
                file.write = later = lambda text, above=file.write: above(text)  # type: ignore[method-assign]
            progress.close()
            assert file.write is (later if replaces else note)
        file.write("still")
    os.close(ours)
    assert seen[-1] == "still"


@pytest.mark.parametrize("batches", [0, 10])
def test_a_bar_in_a_notebook(batches: int) -> None:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    progress = Progress("notebook")
    progress.take(step_event(1, 0.032), (5, batches))
    progress.close()
    cell: Any = progress._cell
    assert cell.text.value == progress.text()
    assert (cell.bar.value, cell.bar.max) == ((5, 10) if batches else (1, 1))
    assert (cell.bar.layout.display == "none") == (not batches)


def test_a_summary_shows_itself(recorded: Path) -> None:
    summary = summarize(read_events(recorded), "<b>")
    assert "<b>: 17 steps" in str(summary)
    assert "waiting for data" in str(summary)
    assert repr(summary) == str(summary)
    html = summary._repr_html_()
    assert "&lt;b&gt;: 17 steps" in html
    assert "waiting for data" in html
    assert str(Summary("empty")) == "empty: 0 steps, and the first 3 warm up: no step counts yet"


def test_files_without_steps_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, begun = tmp_path / "empty.jsonl", tmp_path / "begun.jsonl"
    assert main(["monitor", str(empty)]) == 2
    assert "No such file" in capsys.readouterr().err
    empty.touch()
    assert main(["monitor", str(empty)]) == 2
    assert "empty.jsonl has no event yet: no monitor has written to it" in capsys.readouterr().err
    begun.write_text('{"v": 1, "type": "run", "time": 1.0, "rank": 0, "step": 0}\n')
    assert main(["monitor", str(begun)]) == 0
    assert capsys.readouterr().out.strip() == "begun: 0 steps, and the first 3 warm up: no step counts yet"
