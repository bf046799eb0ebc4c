"""Tests the replay of a traced step: it computes what the step computes, and its times are used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.memory import HostMemory
from drivetrain.planner import calibrate as calibration
from drivetrain.planner import replay
from drivetrain.planner.devices import device_of
from drivetrain.planner.trace import FREE, OP, StepTrace
from drivetrain.planner.tracer import trace_steps

_NEVER = math.inf


class _Net(nn.Module):
    """Has convolutions, views, slices of a shared storage, an in-place activation and a parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm((8, 4, 4))
        self.mix = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.conv(images)))
        q, k, v = self.mix(x.flatten(2).transpose(1, 2)).chunk(3, dim=-1)
        x = torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        return self.out(self.out(x)[:, 1:]).mean(dim=1)


def _step(model: nn.Module, batch: tuple[Tensor, Tensor], how: str) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if how == "momentum" else 0.0)
    images, labels = batch

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out = checkpoint(model, images, use_reentrant=False) if how == "checkpoint" else model(images)
            loss = nn.functional.cross_entropy(out.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("how", ["plain", "momentum", "autocast", "checkpoint"])
def test_a_replay_on_the_same_values_computes_the_same_step(how: str) -> None:
    torch.manual_seed(0)
    model = _Net()
    batch = (torch.randn(2, 3, 4, 4), torch.randint(8, (2,)))
    step = _step(model, batch, how)
    step()  # momentum is there from now on, as in the last step of the trace
    trace = trace_steps(model, step)
    again = replay._Replay(trace)
    states = step.__closure__ and [
        cell.cell_contents.state for cell in step.__closure__ if isinstance(cell.cell_contents, torch.optim.SGD)
    ]
    assert states
    parameters = list(model.parameters())
    for index, block in enumerate(trace.blocks):
        if block.op != -1:
            continue
        value: Tensor | None = None
        if block.category == "parameters":
            value = parameters[block.parameter].detach()
        elif block.category == "optimizer states":
            value = states[0][parameters[block.parameter]]["momentum_buffer"]
        elif block.category == "inputs":
            value = next(tensor for tensor in batch if tensor.untyped_storage().nbytes() == block.num_bytes)
        assert value is not None, block
        again._storages[index] = value.clone().untyped_storage()
    assert again.round(_NEVER) is not None
    assert not again.failed
    step()
    for index, block in enumerate(trace.blocks):
        if block.category == "parameters":
            expected = parameters[block.parameter].detach()
            found = torch.empty(0).set_(again._storages[index], 0, expected.shape, expected.stride())
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _mlp_trace(model: nn.Module | None = None) -> StepTrace:
    model = model or nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(8, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trace_steps(model, step)


def test_a_replay_measures_every_operation_and_keeps_the_random_state() -> None:
    trace = _mlp_trace()
    state = torch.get_rng_state()
    seconds = replay.replayed_seconds(trace, _NEVER)
    assert seconds.keys() == {op.signature for op in trace.last_step() if op.signature >= 0}
    assert min(seconds.values()) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert replay.replayed_seconds(trace, time.monotonic()) == {}


def test_memory_of_a_round_dies_with_the_step() -> None:
    trace = _mlp_trace()
    again = replay._Replay(trace)
    again.round(_NEVER)
    first = {block: storage.nbytes() for block, storage in again._storages.items()}
    again.round(_NEVER)
    assert {block: storage.nbytes() for block, storage in again._storages.items()} == first
    assert {trace.blocks[block].category for block in first} <= {"parameters", "optimizer states", "inputs"}
    held = sum(first.values())
    assert held <= replay.replay_bytes(trace)
    assert replay.replay_bytes(trace) > held  # activations and gradients


def test_what_outlives_steps_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making optimizer states in each round would disturb the allocator and the caches."""
    trace = _mlp_trace()
    again = replay._Replay(trace)
    again.round(_NEVER)
    monkeypatch.setattr(again, "_made", lambda *_: pytest.fail("the first round has made it"))
    assert again.round(_NEVER) is not None
    kept = {trace.blocks[block].category for block in again._storages}
    assert kept == {"parameters", "optimizer states", "inputs"}


def test_operations_that_fail_on_made_up_values_are_left_out() -> None:
    class Factor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ torch.linalg.cholesky(self.linear.weight)

    trace = _mlp_trace(Factor())
    seconds = replay.replayed_seconds(trace, _NEVER)
    missing = {op.name for op in trace.last_step() if op.signature >= 0 and op.signature not in seconds}
    assert missing == {"aten::linalg_cholesky_ex"} or missing == {"aten::_linalg_check_errors"}


def test_times_add_up_to_the_lower_quartile_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _mlp_trace()
    count = len(trace.last_step())
    numbers = iter(range(1000))

    def disturbed(*_: object) -> list[float]:
        number = next(numbers)
        times = [1.0 if number < 20 else 2.0] * count  # another program runs in 12 of 30 rounds that count
        times[number % count] += 3.0  # another one in each round, so that no median shows it
        return times

    monkeypatch.setattr(replay._Replay, "round", disturbed)
    seconds = replay.replayed_seconds(trace, _NEVER)
    assert list(seconds.values()) == pytest.approx([(count + 3.0) / count] * len(seconds))


def test_times_in_the_step_count_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _mlp_trace()
    device = device_of("cpu")
    monkeypatch.setattr(calibration, "_figures", dict)
    signatures = {op.signature for op in trace.last_step() if op.signature >= 0}
    monkeypatch.setattr(calibration, "replayed_seconds", lambda *_: dict.fromkeys(signatures, 2.0))
    cache = tmp_path / "kept.json"
    found = calibration.calibrate(trace, device, cache=cache)
    assert set(found.seconds.values()) == {2.0}
    monkeypatch.setattr(calibration, "replayed_seconds", lambda *_: pytest.fail("the step is in the cache"))
    assert calibration.calibrate(trace, device, cache=cache).seconds == found.seconds


def test_a_step_that_does_not_fit_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _mlp_trace()
    monkeypatch.setattr(calibration, "_figures", dict)
    monkeypatch.setattr(calibration, "replayed_seconds", lambda *_: pytest.fail("the memory is short"))
    needed = replay.replay_bytes(trace)
    monkeypatch.setattr(calibration, "host_memory", lambda: HostMemory(8 * needed, needed, None, 0))
    found = calibration.calibrate(trace, device_of("cpu"))
    assert found.seconds == {}


def test_the_limit_of_the_control_group_counts() -> None:
    assert HostMemory(100, 80, None, 0).usable == 80
    assert HostMemory(100, 80, 50, 20).usable == 30
    assert HostMemory(100, 10, 50, 20).usable == 10
    assert HostMemory(100, 80, 1 << 60, 20).usable == 80  # as the first version of control groups says "no limit"


def test_calls_take_what_a_step_takes_beyond_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[StepTrace] = []

    def replayed(trace: StepTrace, *_: object) -> dict[int, float]:
        taken.append(trace)
        return {op.signature: 0.25 for op in trace.last_step() if op.signature >= 0}

    monkeypatch.setattr(calibration, "replayed_seconds", replayed)
    steps = iter([2.0, 1000.0, 1000.0, 1000.0, 5000.0, 0.0])  # two looks at the clock; two steps are disturbed
    monkeypatch.setattr(calibration, "_median", lambda *_, **__: next(steps))
    found = calibration._call_seconds()
    ops = taken[0].last_step()
    of_kernels = 0.25 * sum(op.signature >= 0 for op in ops)
    looks = sum(event.kind in (OP, FREE) for event in taken[0].events[taken[0].begin_of_last_step() :])
    assert found == pytest.approx((1000.0 - of_kernels + looks) / len(ops))
    monkeypatch.setattr(calibration, "_median", lambda *_, **__: 0.0)
    assert calibration._call_seconds() == 0.0
