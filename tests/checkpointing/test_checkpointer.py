"""Tests Checkpointer in this process and on live ranks: what it saves, its errors, its warnings, other world sizes."""

from __future__ import annotations

import collections
import enum
import gc
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import drivetrain
from drivetrain.checkpointing import Checkpointer, CheckpointError, Encryption
from drivetrain.checkpointing.state.data_position import position_of
from drivetrain.checkpointing.state.training_state import split
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.data import ResumableSampler
from resumed_training import newest
from warm_python import warm_python


def small(**options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(40, 30)
    return model, drivetrain.optim.AdamW(model.parameters(), **options)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- What is saved.


@pytest.mark.parametrize(
    "scheduler_of",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 5]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 2)]
        ),
    ],
    ids=["lambda", "multi step", "one cycle", "cosine", "cyclic", "sequential", "chained"],
)
def test_schedulers(scheduler_of: Callable[[Any], Any], tmp_path: Path) -> None:
    def rates(folder: str, stop: int) -> list[float]:
        model, optimizer = small(lr=0.05)
        scheduler = scheduler_of(optimizer)
        found = []
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        with Checkpointer(tmp_path / folder, every=None, **objects) as ckpt:
            for _ in range(ckpt.steps, stop):
                make_step(model, optimizer)
                scheduler.step()
                ckpt.step()
                found.append(optimizer.param_groups[0]["lr"])
        return found

    assert rates("run", 4) + rates("run", 10) == rates("whole", 10)


def test_plateau_scheduler_has_infinities(tmp_path: Path) -> None:
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "every": None}
    with Checkpointer(tmp_path, **options) as ckpt:
        ckpt.step()
    before = scheduler.state_dict()
    scheduler.step(3.0)
    with Checkpointer(tmp_path, **options):
        assert scheduler.state_dict() == before


def test_generators_and_default_random_states(tmp_path: Path) -> None:
    model, optimizer = small()
    own = [torch.Generator().manual_seed(3), np.random.default_rng(3), np.random.RandomState(3), random.Random(3)]

    def draw() -> list[float]:
        torch_one, new, old, plain = own
        defaults = [random.gauss(0, 1), np.random.standard_normal(), torch.randn(()).item()]
        return [*defaults, torch.rand((), generator=torch_one).item(), new.random(), old.rand(), plain.random()]

    with Checkpointer(tmp_path, model=model, optimizer=optimizer, generators=own, every=None) as ckpt:
        draw()
        ckpt.save()
        expected = [draw() for _ in range(3)]
        ckpt.step()
        ckpt._open_saver().begun_step = ckpt._open_saver().saved_step = 1  # no save at the end
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, generators=own, every=None):
        assert [draw() for _ in range(3)] == expected


def test_extra_objects_and_counters(tmp_path: Path) -> None:
    model, optimizer = small()
    average = torch.optim.swa_utils.AveragedModel(model)

    class Counts:
        def __init__(self) -> None:
            self.seen: collections.Counter[Any] = collections.Counter()

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    counts = Counts()
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "extra": {"average": average, "counts": counts}}
    with Checkpointer(tmp_path, every=None, **options) as ckpt:
        for step in range(3):
            make_step(model, optimizer)
            average.update_parameters(model)
            counts.seen[("step", step)] += 1
            ckpt.step()
        elapsed = ckpt.elapsed
    expected = {name: value.clone() for name, value in average.state_dict().items()}
    average.update_parameters(nn.Linear(40, 30))
    counts.seen = collections.Counter()
    with Checkpointer(tmp_path, every=None, **options) as ckpt:
        assert (ckpt.steps, ckpt.restored and ckpt.restored.step) == (3, 3)
        assert ckpt.elapsed >= elapsed
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert counts.seen == {("step", 0): 1, ("step", 1): 1, ("step", 2): 1}


def test_a_state_keeps_a_dtype_that_torch_would_cast(tmp_path: Path) -> None:
    model = nn.Linear(40, 30).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = optimizer.state[model.weight]["momentum_buffer"] = torch.randn(30, 40)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=None) as ckpt:
        ckpt.step()
    optimizer.state.clear()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=None):
        torch.testing.assert_close(optimizer.state[model.weight]["momentum_buffer"], state, rtol=0, atol=0)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_default_device_of_the_script_is_not_that_of_files(is_encrypted: bool, tmp_path: Path) -> None:
    """The device "meta" has no values, so that what was made on it by mistake cannot be saved or restored."""
    options: Any = {"encryption": Encryption(key=lambda _: ("one", b"k" * 32))} if is_encrypted else {}
    model, optimizer = small(state_bits=8)
    make_step(model, optimizer)
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    for is_restored in (False, True):
        with torch.device("meta"), Checkpointer(tmp_path, model=model, optimizer=optimizer, every=1, **options) as ckpt:
            if not is_restored:
                ckpt.step()
        assert ckpt.steps == 1
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), saved, strict=True))
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.zeros(1230), model.parameters())


def test_tied_and_compiled_models(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
            self.last.weight = self.first.weight

    model = Tied()
    compiled: Any = torch.compile(model, backend="eager")
    with Checkpointer(tmp_path, model=compiled, every=None) as ckpt:
        ckpt.step()
    latest = newest(tmp_path)
    assert [name for name in latest.names() if name.startswith("model/")] == ["model/first.weight"]
    expected = model.first.weight.detach().clone()
    other = Tied()
    with Checkpointer(tmp_path, model=other, every=None):
        torch.testing.assert_close(other.last.weight, expected, rtol=0, atol=0)
        assert other.last.weight is other.first.weight


def test_on_a_late_device(repository: Path, late_device: Path) -> None:
    """Runs streams in a random order, which shows missing waits, and counts waits on the host."""
    command = [warm_python(has_whole_end=True), str(repository / "tests/late_device/saves.py"), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "each save has the values of its step" in run.stdout


# ---- Values of scripts that a checkpoint keeps, or that it refuses before the training.


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


def test_config_takes_paths_and_enumerations(tmp_path: Path) -> None:
    config = {"data": Path("/data/rows"), "color": Color.RED, "levels": [Level.LOW], "by": {Color.BLUE: Path("b")}}
    for steps in range(2):
        with Checkpointer(tmp_path, model=nn.Linear(2, 2), config=config, every=None) as ckpt:
            assert ckpt.steps == steps
            ckpt.step()
    other = config | {"color": Color.BLUE, "data": Path("/data/others")}
    message = r"config\.color: Color\.BLUE, was Color\.RED; config\.data: /data/others, was /data/rows"
    with pytest.raises(ValueError, match=message), Checkpointer(tmp_path, model=nn.Linear(2, 2), config=other):
        pytest.fail("the block has begun")


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_a_generator_spawns_the_children_that_it_would_have_spawned(tmp_path: Path, bits: Any) -> None:
    drawn = []
    for seed in (5, 6):  # a script may take its seed from the operating system
        generator = np.random.Generator(bits(seed))
        with Checkpointer(tmp_path, model=nn.Linear(2, 2), generators=[generator], every=None) as ckpt:
            if not ckpt.steps:
                generator.spawn(2)
                ckpt.step()
                ckpt.save()
            children = [*generator.spawn(2), generator, *generator.spawn(1)]
            drawn.append([child.integers(1 << 40) for child in children])
    assert drawn[0] == drawn[1]


class QuantizedLinear(nn.Linear):
    """Saves what belongs to its packed weight under further names and does not load it, as layers of bitsandbytes."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}weight.absmax"] = torch.ones(4)
        destination[f"{prefix}weight.quant_map"] = torch.ones(16)


class LoadingLinear(QuantizedLinear):
    """Loads its further names, as Linear8bitLt of bitsandbytes does."""

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in ("absmax", "quant_map"):
            state.pop(f"{prefix}weight.{name}")
        super()._load_from_state_dict(state, prefix, *args)  # type: ignore[no-untyped-call]
        unexpected = args[3]
        unexpected[:] = [name for name in unexpected if not name.startswith(f"{prefix}weight.")]


class Growing(nn.Linear):
    """Has a buffer that grows, and loads one of any length, as observers of torch.ao do."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("bank", torch.zeros(0, 3))

    def grow(self) -> None:
        self.bank = torch.cat([self.bank, torch.ones(2, 3)])

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        self.bank = self.bank.new_zeros(state[f"{prefix}bank"].shape)
        super()._load_from_state_dict(state, prefix, *args)  # type: ignore[no-untyped-call]


class Counting(nn.Linear):
    """Has an extra state, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("second", self.first)

    def get_extra_state(self) -> Any:
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None: ...


def test_a_model_that_does_not_load_what_it_saves_is_refused_before_the_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), QuantizedLinear(3, 3))
    message = "model saves '1.weight.absmax', which it does not load, so that no checkpoint could be restored. Pass the"
    with pytest.raises(TypeError, match=message), Checkpointer(tmp_path, model=model):
        pytest.fail("the block has begun")
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("kind", [LoadingLinear, Counting])
def test_a_model_that_loads_what_it_adds_is_saved(tmp_path: Path, kind: Any) -> None:
    for steps in range(2):
        layer = kind(3, 3) if kind is LoadingLinear else kind()
        with Checkpointer(tmp_path, model=nn.Sequential(layer), every=None) as ckpt:
            assert ckpt.steps == steps
            ckpt.step()


def test_a_module_that_resizes_its_buffers_is_restored(tmp_path: Path) -> None:
    for steps in range(3):
        growing = Growing()
        with Checkpointer(tmp_path, model=nn.Sequential(growing), every=None) as ckpt:
            assert len(growing.bank) == 2 * steps
            growing.grow()
            ckpt.step()
    with (
        pytest.raises(ValueError, match=r"model does not load its state: KeyError\('0.weight.absmax'\)"),
        Checkpointer(tmp_path, model=nn.Sequential(LoadingLinear(3, 3)), every=None),
    ):
        pytest.fail("the block has begun")


# ---- Failures.


def broken(*_: Any) -> Any:
    raise CheckpointError("the disk is gone")


def make_steps(ckpt: Checkpointer, count: int) -> None:
    """Makes steps that each see the end of the save before."""
    for _ in range(count):
        ckpt.step()
        if (save := ckpt._open_saver()._save) is not None:
            save._ended.wait(30)


def test_a_failed_save_raises_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=2) as ckpt:
        for _ in range(2):
            ckpt.step()
        ckpt._open_saver().wait()
        monkeypatch.setattr("drivetrain.checkpointing.store.commit.Writer.write", broken)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            make_steps(ckpt, 200)
        monkeypatch.undo()
        failed_at = ckpt.steps
        ckpt.step()  # a script that catches the error goes on
    assert failed_at == 5
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [2, 6]


def test_an_error_of_save_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(3, 3), every=None) as ckpt:
        ckpt.step()
        monkeypatch.setattr("drivetrain.checkpointing.store.commit.Writer.write", broken)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            ckpt.save()
        monkeypatch.undo()
        ckpt.step()


def test_a_relative_directory_is_that_of_the_constructor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    ckpt = Checkpointer("run", model=nn.Linear(3, 3), every=None)
    monkeypatch.chdir(tmp_path / "there")
    with ckpt:
        ckpt.step()
    assert complete_checkpoints(tmp_path / "run")


def test_a_failed_save_is_logged_by_choice_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = small()
    monkeypatch.setattr("drivetrain.checkpointing.store.commit.Writer.write", broken)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=1, on_error="log") as ckpt:
        for _ in range(20):
            make_step(model, optimizer)
            ckpt.step()
    assert ckpt.steps == 20
    assert any("goes on without this checkpoint: step 1 was not saved" in record.message for record in caplog.records)
    assert complete_checkpoints(tmp_path) == []


def test_a_long_restore_reads_in_parts_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = small()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=None) as ckpt:
        make_step(model, optimizer)
        ckpt.step()
    expected = model.weight.detach().clone()
    monkeypatch.setattr("drivetrain.checkpointing.restore._SHOWN_FROM_BYTES", 0)
    monkeypatch.setattr("drivetrain.checkpointing.restore._BYTES_AT_ONCE", 1000)
    make_step(model, optimizer)
    with caplog.at_level(logging.INFO, "drivetrain"), Checkpointer(tmp_path, model=model, optimizer=optimizer):
        torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=0)
    told = [record.message.split()[0] for record in caplog.records]
    assert told[:2] == ["loading", "loaded"]
    assert "loaded 0.0 GiB from" in caplog.text


def test_a_save_slower_than_the_grace_period_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = small()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=None, grace=1e-6) as ckpt:
        ckpt.save()
        ckpt.save()
    found = [record for record in caplog.records if "grace period" in record.message]
    assert len(found) == 1
    assert found[0].levelno == logging.WARNING


# ---- Wrong use.


def test_wrong_arguments(tmp_path: Path) -> None:
    model, optimizer = small()
    good: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for options, error, message in [
        ({"on_error": "ignore"}, ValueError, "on_error is 'ignore'"),
        ({"exit_code": 256}, ValueError, "exit_code is 256"),
        ({"timeout": 0.0}, ValueError, "timeout is 0.0"),
        ({"grace": "brief"}, ValueError, "grace is 'brief'"),
        ({"model": optimizer}, TypeError, "model is a AdamW"),
        ({"optimizer": model}, TypeError, "optimizer[0] is a Linear"),
        ({"scaler": 3}, TypeError, "scaler is a int"),
        ({"extra": {"ema": 3}}, TypeError, "extra['ema'] is a int"),
        ({"generators": [3]}, TypeError, "generators[0] is a int"),
        ({"config": {"f": len}}, TypeError, "config/f is a builtins.builtin_function_or_method"),
        ({"cloud": "ibm"}, ValueError, "cloud is 'ibm'"),
        ({"signals": signal.SIGTERM}, TypeError, "SIGTERM: 15>, expected several, such as (signal.SIGTERM,)"),
        ({"signals": (signal.SIGKILL,)}, ValueError, "signals has SIGKILL, which no process can handle"),
        ({"preemption_file": ""}, ValueError, "preemption_file is '', expected a path, or None"),
        ({"directory": os.fsdecode(b"/tmp/\xff")}, ValueError, "directory is '/tmp/\\udcff', expected a name in UTF-8"),
    ]:
        with pytest.raises(error) as raised:
            Checkpointer(**({"directory": tmp_path} | good | options))
        assert message in str(raised.value)


def test_use_outside_of_the_block(tmp_path: Path) -> None:
    model, optimizer = small()
    ckpt = Checkpointer(tmp_path, model=model, optimizer=optimizer, signals=())
    for use in (ckpt.step, ckpt.save):
        with pytest.raises(RuntimeError, match="outside of its block"):
            use()
    with ckpt, pytest.raises(RuntimeError, match="in a with block already"):
        ckpt.__enter__()


def test_state_without_an_encoding_raises_at_the_begin(tmp_path: Path) -> None:
    model, optimizer = small()
    optimizer.param_groups[0]["schedule"] = len
    with (
        pytest.raises(TypeError, match="optimizer/0/param_groups/0/schedule is a builtins"),
        Checkpointer(tmp_path, model=model, optimizer=optimizer),
    ):
        pytest.fail("the block has begun")


def test_another_model_or_optimizer_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = small()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=None) as ckpt:
        ckpt.step()
    wider, halved = nn.Linear(40, 31), nn.Linear(40, 30).bfloat16()
    deeper = nn.Sequential(nn.Linear(40, 30))
    fewer = torch.optim.AdamW([model.weight])
    for other, its, message in [
        (wider, torch.optim.AdamW(wider.parameters()), "model has 'weight' as torch.float32 (31, 40), expected"),
        (halved, torch.optim.AdamW(halved.parameters()), "model has 'weight' as torch.bfloat16"),
        (deeper, torch.optim.AdamW(deeper.parameters()), "model has no 'bias', which is in the checkpoint"),
        (model, fewer, "optimizer[0] has groups of [1] parameters, expected [2] as in the checkpoint: before"),
        (model, None, "optimizer has 0 elements, expected 1"),
    ]:
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with (
            pytest.raises(ValueError, match="checkpoint") as raised,
            Checkpointer(tmp_path, model=other, optimizer=its, every=None),
        ):
            pytest.fail("the block has begun")
        assert message in str(raised.value)
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_another_configuration_warns_and_names_the_differences(tmp_path: Path) -> None:
    model, optimizer = small()
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "every": None}
    options["run"] = "tested"  # says that the run continues with other settings
    with Checkpointer(tmp_path, config={"lr": 0.1, "sizes": (1, 2)}, **options) as ckpt:
        ckpt.step()
    with Checkpointer(tmp_path, config={"lr": 0.1, "sizes": (1, 2)}, **options):
        pass
    with (
        pytest.warns(UserWarning, match=r"config\.depth: 3, was absent; config\.lr: 0\.2, was 0\.1\."),
        Checkpointer(tmp_path, config={"lr": 0.2, "sizes": (1, 2), "depth": 3}, **options),
    ):
        pass


# ---- Ranks.


@given(sizes=st.dictionaries(st.text(max_size=3), st.integers(0, 10**6), max_size=30), world_size=st.integers(1, 9))
def test_shares_of_ranks_are_even(sizes: dict[str, int], world_size: int) -> None:
    owners = split(sizes, world_size)
    assert owners.keys() == sizes.keys()
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(world_size)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def save_on_ranks(folder: str) -> tuple[list[str], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    wrapped = drivetrain.DistributedDataParallel(model)
    optimizer = drivetrain.optim.AdamW(model.parameters())
    with Checkpointer(folder, model=wrapped, optimizer=optimizer, every=None) as ckpt:
        for _ in range(2):
            make_step(wrapped, optimizer)
            ckpt.step()
    dist.barrier()
    (checkpoint,) = complete_checkpoints(Path(folder))
    mine = checkpoint.load(rank=dist.get_rank())
    return sorted(mine), sum(value.nbytes for value in mine.values())


def test_each_rank_saves_its_share(on_ranks: Any, tmp_path: Path) -> None:
    (first, first_bytes), (second, second_bytes) = on_ranks(save_on_ranks, str(tmp_path / "run"))
    assert not set(first) & set(second)
    assert "rank0/model/1.running_mean" in first
    assert "rank1/model/1.running_mean" in second
    assert abs(first_bytes - second_bytes) <= 40 * 30 * 4
    assert {name.split("/")[0] for name in [*first, *second]} == {"model", "optimizer", "rank0", "rank1"}


def fail_on_one_rank(folder: str, on_error: str) -> str:
    model = drivetrain.DistributedDataParallel(nn.Linear(40, 30))
    optimizer = drivetrain.optim.AdamW(model.parameters())
    with Checkpointer(folder, model=model, optimizer=optimizer, every=1, on_error=on_error, timeout=30) as ckpt:
        if dist.get_rank() == 1:
            ckpt._saver.store._writer._write_part = broken  # type: ignore[union-attr,method-assign]
        try:
            for _ in range(300):
                make_step(model, optimizer)
                ckpt.step()
                if (save := ckpt._open_saver()._save) is not None:
                    save._ended.wait(30)
        except CheckpointError as error:
            ckpt._open_saver()._logs_errors = True  # for the save at the end
            return f"{ckpt.steps}: {error}"
    return f"{ckpt.steps}: none"


def test_a_failure_on_one_rank_raises_on_all_at_the_same_step_or_is_logged(on_ranks: Any, tmp_path: Path) -> None:
    found = on_ranks(fail_on_one_rank, str(tmp_path / "run"), "raise")
    assert len({text.split(":")[0] for text in found}) == 1
    assert all("the disk is gone" in text for text in found)
    assert on_ranks(fail_on_one_rank, str(tmp_path / "other"), "log") == ["300: none"] * 2


def call_unequally(folder: str) -> str:
    model = drivetrain.DistributedDataParallel(nn.Linear(40, 30))
    try:
        with Checkpointer(folder, model=model, every=None, timeout=30) as ckpt:
            for _ in range(3 + dist.get_rank()):
                ckpt.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_unequal_numbers_of_steps_raise_on_every_rank(on_ranks: Any, tmp_path: Path) -> None:
    for text in on_ranks(call_unequally, str(tmp_path / "run")):
        assert "every rank must call Checkpointer.step() equally often" in text


def train_on_ranks(folder: str, stop: int, fail: bool = False) -> tuple[list[list[int]], list[str], bool]:
    """Returns the indices of each batch until step `stop` of all restarts, the warnings, and whether it resumed."""
    torch.manual_seed(0)
    wrapped = drivetrain.DistributedDataParallel(nn.Linear(40, 30))
    optimizer = drivetrain.optim.AdamW(wrapped.parameters())
    loader: Any = DataLoader(list(range(48)), batch_size=2, sampler=ResumableSampler(48, seed=2))
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt = Checkpointer(folder, model=wrapped, optimizer=optimizer, data=loader, every=None)
        with ckpt:
            for batch in loader:
                make_step(wrapped, optimizer)
                ckpt.step()
                found.append(batch.tolist())
                if ckpt.steps == stop:
                    break
    dist.barrier()
    return found, [str(one.message) for one in caught], ckpt.restored is not None


def test_other_numbers_of_ranks_continue_with_each_sample_once(
    on_ranks: Any, on_three_ranks: Any, on_four_ranks: Any, tmp_path: Path
) -> None:
    runs = [on_ranks(train_on_ranks, str(tmp_path / "run"), 3)]  # 12 samples
    runs.append(on_three_ranks(train_on_ranks, str(tmp_path / "run"), 5))  # 12 more
    runs.append(on_four_ranks(train_on_ranks, str(tmp_path / "run"), 100))  # the last 24
    seen = sorted(index for ranks in runs for found, _, _ in ranks for batch in found for index in batch)
    assert seen == list(range(48))
    for ranks in runs[1:]:
        assert all(resumed for _, _, resumed in ranks)
        assert any("losses will differ from an uninterrupted run" in text for text in ranks[0][1])


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=6),
    last=st.integers(1, 6),
)
def test_any_sequence_of_world_sizes_draws_each_sample_once(
    length: int, batch_size: int, parts: list[tuple[int, int]], last: int
) -> None:
    state: Any = None
    seen: collections.Counter[int] = collections.Counter()
    for world_size, steps in [*parts, (last, 1000)]:
        states = []
        for rank in range(world_size):
            sampler = ResumableSampler(length, num_replicas=world_size, rank=rank)
            loader: Any = DataLoader(range(length), batch_size, sampler=sampler)  # type: ignore[arg-type]
            position = position_of(loader)
            position.open()
            if state is not None:
                position.check(state, False)
                position.restore(state)
            batches = iter(loader)
            for _ in range(steps):
                batch = next(batches, None)
                if batch is None:
                    break
                seen.update(batch.tolist())
            states.append(position.state())
            position.close()
        assert all(one["sampler"] == states[0]["sampler"] for one in states)
        state = states[0]
        if state["is_exhausted"]:
            break
    assert sorted(seen) == list(range(length))
    assert sum(seen.values()) - length < last + sum(world_size for world_size, _ in parts)


def test_a_loader_and_its_model_are_freed_at_once(tmp_path: Path) -> None:
    """Persistent workers of a loader that waits for garbage collection end 5 s late, one after the other."""
    model, optimizer = small()
    loader = DataLoader(list(range(6)), num_workers=1, persistent_workers=True)
    freed = [weakref.ref(one) for one in (loader, model, optimizer)]
    gc.disable()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, data=loader, every=2) as ckpt:
        for _ in loader:
            make_step(model, optimizer)
            ckpt.step()
    del loader, model, optimizer, ckpt
    left = [one() for one in freed]
    gc.enable()
    assert left == [None] * 3


def test_workers_close_their_files_at_once(tmp_path: Path) -> None:
    """Scripts turn the garbage collector off, and start workers in each epoch."""
    model, optimizer = small()
    loader = DataLoader(list(range(6)), num_workers=1)
    others = set(multiprocessing.active_children())  # such as other tests' ranks
    gc.disable()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, data=loader, every=None) as ckpt:
        for _ in loader:
            workers = [weakref.ref(child._popen) for child in set(multiprocessing.active_children()) - others]
            ckpt.step()
    left = [worker() for worker in workers]
    gc.enable()
    assert left == [None]
