"""Tests that the monitor sends what optimizers measure to every sink, once per measured step."""

import json
import math
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Kept, make_batches, make_model, train

from drivetrain import optim
from drivetrain.monitor import Monitor, read_events
from drivetrain.monitor.sinks.prometheus import Prometheus
from drivetrain.monitor.stream import event
from drivetrain.optim import statistics
from drivetrain.optim.statistics import NoiseScale, ParameterStatistics, StepStatistics
from ports import free_port

ONE = ParameterStatistics(3.0, 0.5, 2.0, 1.0, 0, 100, 25)


def run(to: list[Any], count: int = 8, every: int = 3) -> None:
    model = make_model()
    optimizer = optim.AdamW(model.parameters())
    with optimizer.statistics(every, model), Monitor(model, optimizer, to=to, progress=False) as monitor:
        train(model, optimizer, monitor(make_batches(count)))


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "a step later"])
def test_jsonl_has_the_figures_of_measured_steps(
    is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of a GPU arrive while later steps run. The last ones are awaited at the end."""
    looks: Counter[int] = Counter()

    def has_arrived(pending: Any) -> bool:
        looks[pending.step] += 1
        return looks[pending.step] > 2  # the step's own look, and the monitor's after it

    if is_late:
        monkeypatch.setattr(statistics._Pending, "has_arrived", property(has_arrived))
    run([f"jsonl:{tmp_path}/a.jsonl"], count=7)
    events = [found for found in read_events(tmp_path / "a.jsonl") if found["type"] == "statistics"]
    assert [found["step"] for found in events] == [1, 4, 7]
    names = [name for name, _ in make_model().named_parameters()]
    for found in events:
        assert list(found["parameters"]) == names
        together = math.hypot(*(one["grad_norm"] for one in found["parameters"].values()))
        assert found["all"]["grad_norm"] == pytest.approx(together)
        assert found["noise"] is None


def test_fields_are_json() -> None:
    broken = ParameterStatistics(math.nan, math.inf, 0.0, 1.0, 2, 0, 0)
    fields = StepStatistics(1, {"a": broken}, NoiseScale(2, 0.0, 1.0, 1)).fields()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert fields["parameters"]["a"]["grad_norm"] == "nan"
    assert fields["noise"]["scale"] == "inf"


def test_two_optimizers_send_their_own() -> None:
    model, kept = make_model(), Kept()
    first, *others = model.parameters()
    optimizers = [optim.SGD([("first", first)], lr=0.1), optim.SGD(others, lr=0.1)]
    for optimizer in optimizers:
        optimizer.statistics(every=1)
    with Monitor(model, optimizers, to=[kept], progress=False):
        model(make_batches(1)[0][0]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    sent = [found["parameters"] for found in kept.events if found["type"] == "statistics"]
    assert [next(iter(found)) for found in sent] == ["first", "param_groups[0] 0"]


# TensorBoard's own reader uses what its dependencies have deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_histograms_by_layer_and_depth(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from drivetrain.monitor.sinks.tensorboard import TensorBoard

    parameters = {
        f"h.{depth}.weight": ParameterStatistics(depth + 1.0, 0.5, 2.0, 1.0, 0, 4, depth) for depth in range(4)
    }
    parameters["embedding"] = ParameterStatistics(math.inf, 0.5, 0.0, 1.0, 1, 0, 0)
    sink = TensorBoard(str(tmp_path))
    sink.open()
    sink.write(event("statistics", 0, 7, **StepStatistics(7, parameters, NoiseScale(2, 0.5, 4.0, 3)).fields()))
    sink.close()
    found = EventAccumulator(str(tmp_path), {"histograms": 0})
    found.Reload()
    assert {"all/param_norm", "all/lost_updates", "all/noise_scale"} <= set(found.Tags()["scalars"])
    assert found.Scalars("all/noise_scale")[0].value == 8.0
    (by_layer,) = found.Histograms("parameters/grad_norm")
    assert (by_layer.step, by_layer.histogram_value.num, by_layer.histogram_value.sum) == (7, 4.0, 10.0)
    (by_depth,) = found.Histograms("depth/lost_updates")
    bars = dict(zip(by_depth.histogram_value.bucket_limit, by_depth.histogram_value.bucket, strict=True))
    assert [bars[depth + 0.5] for depth in range(1, 4)] == [0.25, 0.5, 0.75]


def test_prometheus_has_a_gauge_per_parameter_and_quantity() -> None:
    sink = Prometheus(free_port())
    try:
        sink.write(event("statistics", 1, 3, **StepStatistics(3, {"a": ONE}, NoiseScale(2, 0.5, 4.0, 3)).fields()))
        text = urllib.request.urlopen(sink.url, timeout=20).read().decode()
    finally:
        sink.close()
    assert 'drivetrain_parameter{parameter="a",quantity="grad_norm",rank="1"} 3.0' in text
    assert 'drivetrain_parameter{parameter="a",quantity="lost_updates",rank="1"} 0.25' in text
    assert 'drivetrain_gradient_noise_scale{rank="1"} 8.0' in text


def test_torchs_optimizers_send_none() -> None:
    model, kept = make_model(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        train(model, optimizer, monitor(make_batches(2)))
    assert not [found for found in kept.events if found["type"] == "statistics"]
