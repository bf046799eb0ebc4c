"""Tests that a monitor of a training on a GPU takes the device's times, and neither waits for it nor disturbs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import Kept, make_batches, make_model, train
from torch import nn

from drivetrain import _C
from drivetrain.monitor import Monitor
from drivetrain.monitor.script import ScriptMonitor


def on_device(count: int) -> Iterator[Any]:
    for inputs, targets in make_batches(count):
        yield inputs.pin_memory().to("cuda", non_blocking=True), targets.pin_memory().to("cuda", non_blocking=True)


def plain_model() -> nn.Sequential:
    model = make_model().cuda()
    model[1] = nn.Identity()  # dropout draws from the device's generator, which other tests advance
    return model


@pytest.mark.gpu
def test_a_training_on_a_gpu_is_accounted_without_a_wait() -> None:
    losses = []
    kept = Kept()
    for is_monitored in (False, True):
        model = plain_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = list(on_device(12))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            if is_monitored:
                with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
                    losses.append(train(model, optimizer, monitor(batches)))
            else:
                losses.append(train(model, optimizer, batches))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))
    steps = kept.steps()
    assert [step["step"] for step in steps] == list(range(1, 13))
    for step in steps:
        assert step["complete"]
        assert step["wall_s"] > 0
        assert sum(step["phases"].values()) == pytest.approx(step["wall_s"])
        assert step["phases"]["forward"] > 0
        assert step["phases"]["backward"] > 0
        assert step["phases"]["optimizer"] > 0
    run = next(event for event in kept.events if event["type"] == "run")
    assert run["device"].startswith("cuda")


@pytest.mark.gpu
def test_a_wait_of_the_host_that_the_device_does_not_notice_is_no_wait_for_data() -> None:
    """The device is busy with the first step, while the host waits for the second batch."""
    kept, model = Kept(), plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nap_s = 0.02
    busy = torch.randn(512, 512, device="cuda")

    def batches() -> Iterator[Any]:
        for batch in list(on_device(4)):
            time.sleep(nap_s)
            yield batch

    with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
        for inputs, targets in monitor(batches()):
            host = time.perf_counter()
            done = torch.cuda.Event()
            while True:  # enqueue work that takes the device longer than the nap
                for _ in range(20):
                    busy = (busy @ busy).clamp(-1, 1)
                done.record()
                if time.perf_counter() - host > 2 * nap_s and not done.query():
                    break
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    waits = [step["phases"]["data"] for step in kept.steps()]
    assert len(waits) == 4
    assert waits[0] >= 0.5 * nap_s  # nothing was enqueued yet


@pytest.mark.gpu
def test_a_capture_inside_of_a_step_is_left_alone() -> None:
    kept, model = Kept(), plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = next(on_device(1))
    graph = torch.cuda.CUDAGraph()
    with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
        for number in monitor(range(4)):
            if number == 1:
                with torch.cuda.graph(graph):
                    nn.functional.mse_loss(model(inputs), targets).backward()
            elif number > 1:
                graph.replay()
            else:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    nn.functional.mse_loss(model(inputs), targets).backward()
                torch.cuda.current_stream().wait_stream(side)
                optimizer.zero_grad(set_to_none=True)
                continue
            optimizer.step()
    assert [step["step"] for step in kept.steps()] == [1, 2, 3]


@pytest.mark.gpu
def test_a_script_is_followed_to_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    kept, model = Kept(), plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ScriptMonitor([kept])
    with monitor:
        train(model, optimizer, monitor(list(on_device(6))))
    assert len(kept.steps()) == 6
    assert "times are of the host" not in capsys.readouterr().err
    assert monitor._device.type == "cuda"


def test_devices_without_a_clock_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="meta, where the model is: it takes those of the CPU and of CUDA"):
        Monitor(nn.Linear(2, 2, device="meta"))
    monkeypatch.setattr(_C, "has_cuda", lambda: False)
    monkeypatch.setattr("drivetrain.monitor.monitor._device_of", lambda _: torch.device("cuda", 0))
    with pytest.raises(NotImplementedError, match="built without CUDA, as `drivetrain doctor` shows"):
        Monitor(nn.Linear(2, 2))
