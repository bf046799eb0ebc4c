"""Tests `drivetrain explain`: it names the samples that were planted, and no others."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain.cli import main
from drivetrain.data import LeaveOut, ResumableSampler, SeededSamples
from drivetrain.spikes.record import Batch, RecordedSteps, SeenStep
from drivetrain.spikes.search import Explanation, Runs, Sample, explain, fewest, replacements
from effort import IS_WHOLE, SEED, rounds
from warm_python import installed_frameworks, warm_environ, warm_python

NUM_SAMPLES, BATCH, RANKS = 256, 8, 2
PLANTS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], None]] = {
    "label of another scale": lambda _, targets, index: targets[index].fill_(500.0),
    "nan in a feature": lambda inputs, _, index: inputs[index].fill_(math.nan),
    "broken row": lambda inputs, _, index: inputs[index].mul_(-300.0),
    "infinite label": lambda _, targets, index: targets[index].fill_(math.inf),
}


def training(seed: int, kind: str, planted: Sequence[int], rate: float = 0.01, jump: int = -1) -> Callable[..., Runs]:
    """Returns a training of two ranks in this process, which `explain` runs. Its rate grows at the step `jump`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    targets = inputs[:, :2].sum(1, keepdim=True) + 0.1 * torch.randn(NUM_SAMPLES, 1, generator=generator)
    for index in planted:
        PLANTS[kind](inputs, targets, index)
    order = torch.randperm(NUM_SAMPLES, generator=generator).tolist()
    torch.manual_seed(seed)
    first = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def run(num_steps: int, replaced: Sequence[Sample]) -> Runs:
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        records = [RecordedSteps() for _ in range(RANKS)]
        for step in range(min(num_steps, NUM_SAMPLES // (BATCH * RANKS))):
            optimizer.param_groups[0]["lr"] = rate * (3000.0 if step == jump else 1.0)
            optimizer.zero_grad()
            for rank, record in enumerate(records):
                begin = (step * RANKS + rank) * BATCH
                indices = order[begin : begin + BATCH]
                swaps = replacements(replaced, rank).get(f"0:{step}", {})
                taken = [swaps.get(str(place), index) for place, index in enumerate(indices)]
                loss = torch.nn.functional.mse_loss(model(inputs[taken]), targets[taken])
                (loss / RANKS).backward()
                record.steps.append(SeenStep([float(loss.detach())], rate=rate, batches=[Batch(0, step, 0, indices)]))
            norm = float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]))
            for record in records:
                record.steps[-1].norm = norm
            optimizer.step()
        return records

    run.order = order  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_sample_is_named(kind: str) -> None:
    for seed in range(25 if IS_WHOLE else 6):
        place = random.Random(seed).randrange(8 * BATCH * RANKS, NUM_SAMPLES)
        order = training(seed, kind, ()).order  # type: ignore[attr-defined]
        found = explain(training(seed, kind, [order[place]]), 100, 10.0)
        assert isinstance(found, Explanation)
        assert [one.index for one in found.guilty] == [order[place]]
        assert found.spike.index == found.guilty[0].step == place // (BATCH * RANKS)
        assert found.guilty[0].rank == place // BATCH % RANKS
        assert found.num_runs <= 2 + 2 * math.log2(BATCH * RANKS)


def test_a_spike_that_only_shrinks_stays() -> None:
    """Another sample in the place of one brings the value below the factor, and not to what is usual."""

    def run(num_steps: int, replaced: Sequence[Sample]) -> Runs:
        record = RecordedSteps()
        for step in range(num_steps):
            norm = (1.0 if step < 20 else 8.5 - 0.6 * bool(replaced)) + 0.01 * (step % 3)
            record.steps.append(
                SeenStep([1.0], norm=norm, rate=0.1, batches=[Batch(0, step, 0, [2 * step, 2 * step + 1])])
            )
        return [record]

    found = explain(run, 21, 20.0)
    assert isinstance(found, Explanation)
    assert found.guilty == []


def test_a_step_that_is_asked_for_goes_before_earlier_ones() -> None:
    values = {9: 9.0, 13: 99.0}

    def run(num_steps: int, replaced: Sequence[Sample]) -> Runs:
        record = RecordedSteps(restored=100)
        for step in range(min(num_steps, 16)):
            norm = 1.0 if any(one.step == step for one in replaced) else values.get(step, 1.0 + 0.01 * (step % 3))
            record.steps.append(SeenStep([1.0], norm=norm, rate=0.1, batches=[Batch(0, step, 0, [step])]))
        return [record]

    for step, index in ((None, 9), (114, 13), (112, 9), (100, 9), (200, 9)):
        found = explain(run, 100, 10.0, step)
        assert isinstance(found, Explanation)
        assert [sample.step for sample in found.guilty] == [found.spike.index] == [index]


def test_two_samples_of_one_step_are_named() -> None:
    order = training(0, "label of another scale", ()).order  # type: ignore[attr-defined]
    for one, other in ((164, 165), (160, 175), (163, 171)):
        run = training(0, "label of another scale", [order[one], order[other]])
        found = explain(run, 100, 10.0)
        assert isinstance(found, Explanation)
        assert {sample.index for sample in found.guilty} == {order[one], order[other]}
        without = [record.steps[found.spike.index] for record in run(found.spike.index + 1, found.guilty)]
        assert found.after == (max(step.losses[0] for step in without), without[0].norm)


def test_no_sample_is_named_where_none_was_planted() -> None:
    """The rate of one step is too high, so that the parameters after it are wrong for every sample."""
    for seed in range(25 if IS_WHOLE else 8):
        found = explain(training(seed, "label of another scale", (), jump=9), 100, 10.0)
        assert isinstance(found, Explanation), "the rate makes no spike"
        assert found.guilty == []
        assert found.num_tried > BATCH * RANKS


def test_a_healthy_training_has_no_spike() -> None:
    assert not isinstance(explain(training(0, "label of another scale", ()), 100, 10.0), Explanation)


@given(st.integers(1, 40), st.data())
@settings(max_examples=200, deadline=None)
def test_fewest_finds_each_planted_sample(count: int, data: st.DataObject) -> None:
    samples = [Sample(0, 0, 0, 0, 0, place, place, 0) for place in range(count)]
    planted = set(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4)))
    found = fewest(samples, lambda without: planted <= {one.index for one in without})
    assert {one.index for one in found} == planted
    assert len(found) == len(planted)


# ---- Scripts.

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
inputs = torch.randn(128, 8)
targets = inputs[:, :2].sum(1, keepdim=True)
targets[{planted}] *= 1000
data = TensorDataset(inputs, targets)
data.files = [f"rows/{{index}}.txt" for index in range(len(data))]
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=4, sampler=ResumableSampler(data), num_workers={workers})
checkpointer = Checkpointer("run", model=model, optimizer=optimizer, data=loader, every="4 steps", keep=None)
with checkpointer:
    for rows, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(rows), labels)
        loss.backward()
        optimizer.step()
        checkpointer.step()
        if len(sys.argv) > 1 and checkpointer.steps == int(sys.argv[1]):
            break
"""


def order_of_sampler() -> list[int]:
    return list(ResumableSampler(128, 1, 0))


def files_in(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_continues_from_its_checkpoint(
    workers: int, in_warm_processes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = order_of_sampler()[4 * 13 + 2]  # of step 14
    Path("train.py").write_text(SCRIPT.format(planted=planted, workers=workers))
    subprocess.run([warm_python(), "train.py", "18"], env=warm_environ(), check=True, timeout=120)
    before = files_in(in_warm_processes)
    assert main(["explain", "train.py"]) == 1
    assert "Nothing spikes in steps 19 to 32." in capsys.readouterr().out
    assert main(["explain", "--step", "14", "--steps", "3", "--json", "found.json", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "Step 14 spikes: the " in said
    assert f"  index {planted} (rows/{planted}.txt): rank 0, step 14, batch 1 of the step, position 2\n" in said
    assert f"drivetrain.data.LeaveOut(dataset, [{planted}])" in said
    assert json.loads(Path("found.json").read_text())["first"] == 4
    Path("found.json").unlink()
    assert files_in(in_warm_processes) == before


def explained_on_two_ranks(folder: Path, script: str, *options: str, modules: Sequence[str] = ()) -> str:
    (folder / "train.py").write_text(script)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "drivetrain", "explain")
    command = [warm_python(*modules), *launch, *options, "train.py"]
    env = {**warm_environ(*modules), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_script_of_two_ranks(tmp_path: Path) -> None:
    planted = order_of_sampler()[4 * 9 + 2 * 1 + 1]  # of rank 1 in step 10
    script = SCRIPT.format(planted=planted, workers=0).replace("batch_size=4", "batch_size=2")
    said = explained_on_two_ranks(tmp_path, script, "--steps", "12")
    assert f"  index {planted} (rows/{planted}.txt): rank 1, step 10, batch 1 of the step, position 1\n" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_stops_at_its_spike(in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = order_of_sampler()[4 * 9]
    script = SCRIPT.format(planted=planted, workers=0).replace(
        "        loss.backward()", "        loss.backward()\n        assert loss < 1000, loss"
    )
    Path("train.py").write_text(script.replace("*= 1000", "*= float('nan')"))
    assert main(["explain", "train.py"]) == 0
    assert f"  index {planted} (" in capsys.readouterr().out


LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(128, 8)
targets = inputs[:, :2].sum(1, keepdim=True)
targets[77] = 500.0
data = TensorDataset(inputs, targets)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def loss_of(rows, labels):
    return nn.functional.mse_loss(model(rows), labels)

def step(batch):
    optimizer.zero_grad()
    loss_of(*batch).backward()
    optimizer.step()

"""
LOOPS = {
    "validates": """
validated = DataLoader(Subset(data, range(96, 128)), batch_size=16)
for batch in DataLoader(Subset(data, range(96)), batch_size=4):
    step(batch)
    with torch.no_grad():
        [loss_of(*one) for one in validated]
""",
    "accumulates": """
for number, batch in enumerate(DataLoader(data, batch_size=2)):
    (loss_of(*batch) / 2).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
    "has closures": """
for batch in DataLoader(data, batch_size=4):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "takes single samples": """
for number, (row, label) in enumerate(DataLoader(data, batch_size=None)):
    (loss_of(row[None], label[None]) / 4).backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "has another loader": """
from torchdata.stateful_dataloader import StatefulDataLoader
for batch in StatefulDataLoader(data, batch_size=4, num_workers=1):
    step(batch)
""",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_strangers(loop: str, in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(LOOP + LOOPS[loop])
    assert main(["explain", "--steps", "22", "train.py"]) == 0
    assert "It goes without this sample:\n  index 77" in (said := capsys.readouterr().out)
    assert "Step 20 spikes: " in said


DRAWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed({seed})
inputs = torch.randn(160, 8)
targets = torch.tanh(inputs[:, :2].sum(1, keepdim=True)) + 0.1 * torch.randn(160, 1)
{plant}
data = TensorDataset(inputs, targets)
order = torch.Generator().manual_seed({seed})
loader = DataLoader(data, batch_size={batch}, shuffle=True, generator=order, num_workers={workers})
model = {model}
optimizer = torch.optim.{optimizer}(model.parameters(), lr={rate})
for step, (rows, labels) in enumerate(loader):
    if {is_hot} and step == {step}:
        optimizer.param_groups[0]["lr"] = 1e4
    loss = nn.functional.{loss}_loss(model(rows), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), {clip})
    optimizer.step()
    optimizer.zero_grad()
    if {is_hot} and step == {step}:
        optimizer.param_groups[0]["lr"] = {rate}
"""
DRAWN_PLANTS = (
    "targets[{index}] *= 4000",
    "targets[{index}] = float('nan')",
    "inputs[{index}, 3] = float('nan')",
    "inputs[{index}] *= -1000; targets[{index}] = 3000",
)
DRAWN_MODELS = (
    "nn.Linear(8, 1)",
    "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))",
    "nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(24, 1))",
    "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 1))",
)


@pytest.mark.parametrize("number", range(rounds(3, 134)))
def test_drawn_scripts(number: int, in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fourth script has no planted sample, and a learning rate that is too high in one step."""
    draw = random.Random(f"{SEED} {number}")
    is_hot, batch = number % 4 == 3, draw.choice([4, 8])  # of two samples, a batch has outliers of its own
    step = draw.randrange(8, 160 // batch - 2)
    loader = DataLoader(range(160), batch, shuffle=True, generator=torch.Generator().manual_seed(number))  # type: ignore[arg-type]
    order = [int(index) for indices in loader for index in indices]
    planted = order[step * batch + draw.randrange(batch)]
    values = {
        "seed": number,
        "plant": "" if is_hot else draw.choice(DRAWN_PLANTS).format(index=planted),
        "batch": batch,
        "workers": draw.choice([0, 0, 2]),
        "model": draw.choice(DRAWN_MODELS),
        "optimizer": draw.choice(["SGD", "AdamW", "RMSprop"]),
        "rate": draw.choice([1e-3, 1e-2]),
        "loss": draw.choice(["mse", "l1"]),
        "clip": draw.choice([1.0, 1e9]),
        "is_hot": is_hot,
        "step": step,
    }
    Path("train.py").write_text(DRAWN.format(**values))
    code = main(["explain", "--json", "found.json", "--steps", "100", "train.py"])
    said = capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    if is_hot:
        # A sample may well make a spike of its own before.
        assert not found["guilty"] or found["spike"]["index"] <= step, (values, said)
        return
    assert code == 0, (values, said)
    guilty = [one["index"] for one in found["guilty"]]
    assert planted in guilty, (values, said)
    assert len(guilty) <= 2, (values, said)


def test_a_rate_that_is_too_high(in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = """
for number, batch in enumerate(DataLoader(data, batch_size=4)):
    optimizer.param_groups[0]["lr"] = 30.0 if number == 14 else 0.01
    step(batch)
"""
    Path("train.py").write_text(LOOP + hot)
    assert main(["explain", "--steps", "18", "train.py"]) == 1
    assert "No sample explains it" in (said := capsys.readouterr().out)
    assert "the last learning rates, 0.01, 0.01, 30, 0.01, and" in said


class Drawn(Dataset[float]):
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def test_a_bad_augmentation(in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sample was harmless in the first epoch. Samples that are loaded with it must keep their random numbers."""
    seeded = """
from drivetrain.data import ResumableSampler, SeededSamples

class Noisy(TensorDataset):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return row * (3000 if torch.rand(()) < 0.003 else 1), label

targets[77] = inputs[77, :2].sum()
sampler = ResumableSampler(data, seed=1)
loader = DataLoader(SeededSamples(Noisy(inputs, targets), sampler), 4, sampler=sampler)
for epoch in range(8):
    sampler.set_epoch(epoch)
    for batch in loader:
        step(batch)
"""
    sampler = ResumableSampler(128, 1, 0, seed=1)
    samples = SeededSamples(Drawn(), sampler)
    sampler.set_epoch(2)
    (planted,) = [int(index) for index in sampler if samples[index] < 0.003]
    Path("train.py").write_text(LOOP + seeded)
    assert main(["explain", "--steps", "96", "train.py"]) == 0
    assert f"It goes without this sample:\n  index {planted}: rank 0, step " in capsys.readouterr().out


def test_samples_without_an_index(in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = """
class Rows(IterableDataset):
    def __iter__(self):
        return iter(zip(inputs, targets))
for batch in DataLoader(Rows(), batch_size=4):
    step(batch)
"""
    Path("train.py").write_text(LOOP + rows)
    assert main(["explain", "--steps", "22", "train.py"]) == 1
    assert "Step 20 spikes: " in (said := capsys.readouterr().out)
    assert "no DataLoader over a dataset with indices" in said


HUGGING_FACE = """
import torch
from transformers import Trainer, TrainingArguments

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, rows, targets):
        return {{"loss": (self.layer(rows).squeeze(-1) - targets).square().mean()}}

torch.manual_seed(0)
inputs = torch.randn(64, 8)
targets = inputs[:, 0].clone()
targets[{planted}] = 500.0
data = [{{"rows": row, "targets": target}} for row, target in zip(inputs, targets)]
arguments = TrainingArguments(
    "out", use_cpu=True, max_steps=20, per_device_train_batch_size=2, report_to="none", disable_tqdm=True, seed=1
)
Trainer(Small(), arguments, train_dataset=data).train()
"""
LIGHTNING = """
import torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, _):
        return (self.layer(batch[0]).squeeze(-1) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

pl.seed_everything(0)
inputs = torch.randn(64, 8)
targets = inputs[:, 0].clone()
targets[{planted}] = 500.0
loader = DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True)
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Small(), loader)
"""


@pytest.mark.parametrize("script", [HUGGING_FACE, LIGHTNING], ids=["hugging_face", "lightning"])
def test_a_trainer(
    script: str, in_warm_processes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = 55 if script is HUGGING_FACE else 62  # of steps 16 and 11, in the order that the trainers draw
    monkeypatch.setattr(sys, "executable", warm_python(*installed_frameworks()))
    Path("train.py").write_text(script.format(planted=planted))
    assert main(["explain", "--steps", "20", "train.py"]) == 0
    said = capsys.readouterr().out
    assert f"It goes without this sample:\n  index {planted}: rank 0, step " in said


@pytest.mark.skipif(not IS_WHOLE, reason="takes half a minute: WHOLE=1 runs it")
@pytest.mark.parametrize("script", [HUGGING_FACE, LIGHTNING], ids=["hugging_face", "lightning"])
def test_a_trainer_on_two_ranks(script: str, tmp_path: Path) -> None:
    planted = 55 if script is HUGGING_FACE else 62
    on_two = script.format(planted=planted).replace('accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp"')
    said = explained_on_two_ranks(tmp_path, on_two, "--steps", "20", modules=installed_frameworks())
    assert f"It goes without this sample:\n  index {planted}: rank 0, step " in said


def test_a_script_that_cannot_be_run(in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "train.py"]) == 2
    assert "there is no file train.py" in capsys.readouterr().err
    Path("train.py").write_text("raise RuntimeError('my own')")
    assert main(["explain", "train.py"]) == 2
    assert "my own" in capsys.readouterr().err


# ---- LeaveOut.


@pytest.mark.parametrize("workers", [0, 2])
def test_left_out_samples_never_come(workers: int) -> None:
    plain = TensorDataset(torch.arange(10))
    loader = DataLoader(LeaveOut(plain, [2, 3, 9]), batch_size=4, num_workers=workers)
    taken = [int(one) for (batch,) in loader for one in batch]
    assert taken == [0, 1, 4, 4, 4, 5, 6, 7, 8, 0]
    assert LeaveOut(plain, [2])[-8] == plain[3]
    assert LeaveOut(plain, [2]).tensors is plain.tensors


def test_wrong_arguments_of_leave_out() -> None:
    plain = TensorDataset(torch.arange(4))
    with pytest.raises(IndexError, match=r"indices has 4, expected 0 to 3 as the dataset has 4 samples"):
        LeaveOut(plain, [1, 4])
    with pytest.raises(ValueError, match=r"indices has all 4 samples of the dataset"):
        LeaveOut(plain, range(4))
    with pytest.raises(TypeError, match="integer"):
        LeaveOut(plain, [1.5])  # type: ignore[list-item]
