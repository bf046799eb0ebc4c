"""Compares what torch's profiler records of our communication with its records of torch's class over gloo."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import drivetrain
from ranks import run_on

_BUCKET_CAP_MB = 300 / 2**20  # bytes: each layer has a bucket of its own


def _profiled(wrap: Callable[[nn.Module], nn.Module], path: Path) -> tuple[nn.Module, profile, list[dict[str, Any]]]:
    """Profiles one step after the last rebuild of buckets, and returns the profile and the events of its trace."""
    torch.manual_seed(0)
    net = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12)))
    inputs = torch.ones(2, 8)
    for _ in range(6):
        net(inputs).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        net(inputs).sum().backward()
    profiler.export_chrome_trace(str(path))
    return net, profiler, json.loads(path.read_text())["traceEvents"]


def _named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("name") == name]


def _all_reduces(profiler: profile) -> list[Any]:
    return [event for event in profiler.events() or [] if event.name == "gloo:all_reduce"]


@pytest.mark.skipif(not torch.profiler.kineto_available(), reason="torch was built without its profiler (Kineto)")
@run_on(2)
def test_every_bucket_shows_as_torchs_all_reduces_do(tmp_path: Path) -> None:
    path = tmp_path / f"{dist.get_rank()}.json"
    _, profiler, _ = _profiled(lambda net: nn.parallel.DistributedDataParallel(net, bucket_cap_mb=_BUCKET_CAP_MB), path)
    theirs = _all_reduces(profiler)
    assert theirs
    for transport in ("torch", "shm"):
        net, profiler, events = _profiled(
            lambda net, transport=transport: drivetrain.DistributedDataParallel(  # type: ignore[misc]
                net, bucket_cap_mb=_BUCKET_CAP_MB, transport=transport
            ),
            path,
        )
        buckets = net.reducer.buckets()
        assert len(buckets) == 2
        ours = _all_reduces(profiler)
        assert len(ours) == len(buckets), transport
        for event, like in zip(ours, theirs, strict=False):
            assert (event.is_async, len(event.input_shapes)) == (like.is_async, len(like.input_shapes))
        ranges = _named(events, "drivetrain::all_reduce")
        assert [event["args"]["Concrete Inputs"][1] for event in ranges] == ["0", "1"]
        waits = _named(events, "drivetrain::wait")
        assert [event["args"]["Concrete Inputs"] for event in waits] == [["0"], ["1"]]
        if transport == "torch":
            continue
        comms = [event["args"] for event in _named(events, "record_param_comms")]
        for args, event, bucket in zip(comms, ours, buckets, strict=True):
            (numel,) = event.input_shapes[0]
            assert 4 * numel >= bucket.bytes
            assert args["Collective name"] == "allreduce"
            assert (args["In msg nelems"], args["Out msg nelems"], args["dtype"]) == (numel, numel, "Float")
            assert (args["Group size"], args["Process Group Ranks"]) == (2, "[0, 1]")
            assert args["Process Group Name"] == dist.group.WORLD.group_name  # type: ignore[union-attr]
