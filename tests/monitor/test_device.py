"""Tests that a monitor of a training on a GPU takes the device's times, and neither waits for it nor disturbs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import Kept, make_batches, make_model, train, working
from torch import nn

from drivetrain import _C
from drivetrain.monitor import Monitor
from drivetrain.monitor.trainers import ScriptMonitor
from waits import no_waiting


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
        with no_waiting():
            if is_monitored:
                with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
                    losses.append(train(model, optimizer, monitor(batches)))
            else:
                losses.append(train(model, optimizer, batches))
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
@pytest.mark.parametrize("slow", ["copy", "forward", "backward", "optimizer", "host"])
def test_time_of_the_device_is_found_where_its_work_was_enqueued(slow: str) -> None:
    """The host only enqueues, and is done at once."""
    num_cycles, least_s = 40_000_000, 0.01

    def work(place: str) -> None:
        if place == slow:
            torch.cuda._sleep(num_cycles)

    Model, SGD = working(work)

    kept, model = Kept(), Model(8, 4).cuda()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
        for inputs, targets in monitor(list(on_device(4))):
            work("copy")
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            work("host")
    assert len(kept.steps()) == 4
    for step in kept.steps():
        assert step["complete"]
        assert step["phases"][slow] >= least_s


@pytest.mark.gpu
def test_a_wait_of_the_host_that_the_device_does_not_notice_is_no_wait_for_data() -> None:
    kept, model = Kept(), plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nap_s, num_cycles = 0.05, 400_000_000  # 0.2 s at 2 GHz
    was_busy = []

    def batches() -> Iterator[Any]:
        for batch in list(on_device(4)):
            done = torch.cuda.current_stream().record_event()
            time.sleep(nap_s)
            was_busy.append(not done.query())
            yield batch

    with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
        for inputs, targets in monitor(batches()):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            torch.cuda._sleep(num_cycles)
    waits = [step["phases"]["data"] for step in kept.steps()]
    assert len(waits) == 4
    assert not was_busy[0]
    assert waits[0] >= nap_s / 2  # the device was idle; it may reach the first mark late
    assert any(was_busy)
    # The device reaches both marks of such a wait one after the other.
    assert all(wait < nap_s for wait, was in zip(waits, was_busy, strict=True) if was)


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
def test_a_look_at_the_device_leaves_the_capture_of_another_thread_alone() -> None:
    """torch.cuda.graph's default mode forbids all threads what might disturb a capture, such as queries of events."""
    kept, model = Kept(), plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = next(on_device(1))
    with Monitor(model, optimizer, to=[kept], progress=False, flops=None) as monitor:
        for number in monitor(range(3)):
            if number == 2:
                assert monitor._collector is not None
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    looking = threading.Thread(target=monitor._collector.poll)
                    looking.start()
                    looking.join()
                    inputs * 2
                continue
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert [step["step"] for step in kept.steps()] == [1, 2]  # the last one made no optimizer step


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
    with pytest.raises(NotImplementedError, match="meta, where the model is: it takes only CPU and CUDA devices"):
        Monitor(nn.Linear(2, 2, device="meta"))
    monkeypatch.setattr(_C, "has_cuda", lambda: False)
    monkeypatch.setattr("drivetrain.monitor.monitor._device_of", lambda _: torch.device("cuda", 0))
    with pytest.raises(NotImplementedError, match="built without CUDA, as `drivetrain doctor` shows"):
        Monitor(nn.Linear(2, 2))
