"""Tests which values are offloaded over a link of known bandwidth, when their copies run, and what the plan reports."""

import dataclasses
import json
import math

import activation_traces
import pytest
import torch
from torch import nn

import drivetrain
from drivetrain import _C
from drivetrain.budget import copies
from drivetrain.budget.copies import Copies, HostLink, Prefetch, copies_of
from drivetrain.budget.plan import ChosenPolicy, PlannedOp, choose
from drivetrain.budget.trace import (
    STORAGE_FORMATS,
    AutogradSave,
    BackwardUse,
    FormatCost,
    Pass,
    Trace,
    TracedOp,
    TracedValue,
)

HOST = STORAGE_FORMATS["host"]
MIB = 1 << 20
EVERYTHING = 1 << 60
LEAST = 1 << 16  # bytes of the smallest value that may be offloaded


def trace_of(recorder: activation_traces.Recorder, seconds_per_byte: float = 1e-6) -> Trace:
    """Returns a trace in which every large value may be offloaded, at the time that its copies take."""
    values, ops, uses = recorder.trace()
    offered = [
        TracedValue(*value[:4], [FormatCost(HOST, 0, value[0] * seconds_per_byte)] if value[0] >= LEAST else [])
        for value in values
    ]
    saves = [AutogradSave(op, value) for op, saved in enumerate(recorder.nodes) for value in saved]
    traced = [TracedOp("aten::op", -1, seconds, reads, writes) for seconds, reads, writes in ops]
    return Trace([Pass(traced, offered, saves, [0] * len(ops))], [BackwardUse(*use) for use in uses], [""])


def gpt2(layers: int = 12) -> activation_traces.Recorder:
    """GPT-2's sizes with 16 sequences of 1024 tokens in 16 bits, and about an H100's times."""
    recorder = activation_traces.Recorder()
    tokens, width = 16 * 1024, 768
    x = recorder.op(0, [recorder.value(0)], [2 * tokens * width])
    for _ in range(layers):
        x = activation_traces._block(recorder, x, tokens, width, 1024, True)
    activation_traces._head(recorder, x, tokens, width, 50304)
    return recorder


def link_at(bytes_per_second: float) -> HostLink:
    return HostLink(bytes_per_second, bytes_per_second, 1e-5)


@pytest.mark.parametrize(("gigabytes", "share"), [(25, 0.5), (25, 0.3), (50, 0.5), (50, 0.3)])
def test_what_a_link_can_hide_is_offloaded(gigabytes: int, share: float) -> None:
    """Priced by the time of its copies alone, nothing would be."""
    link = link_at(1e9 * gigabytes)
    trace = trace_of(gpt2(), 2 / link.out_bytes_per_second)
    budget = int(share * choose(trace, EVERYTHING).peak_bytes)
    alone = choose(trace, budget)
    assert not any(way > 0 for way in alone.policy)
    found = choose(trace, budget, link, EVERYTHING)
    assert found.is_feasible
    assert found.peak_bytes <= budget
    assert found.copies is not None
    assert found.copies.num_bytes >= 100 * MIB
    assert found.copies.exposed_seconds <= 0.06 * found.seconds
    assert found.bound_seconds <= found.seconds < 0.96 * alone.seconds
    assert len(found.copies.prefetches) == found.copies.num_values


def test_nothing_is_offloaded_where_the_link_is_slow() -> None:
    trace = trace_of(gpt2())
    budget = choose(trace, EVERYTHING).peak_bytes // 2
    found = choose(trace, budget, link_at(1e8), EVERYTHING)
    assert found.copies is not None
    assert found.copies.num_values == 0
    assert found.seconds == pytest.approx(choose(trace, budget).seconds)


def test_the_host_has_room_for_what_is_offloaded() -> None:
    trace, link = trace_of(gpt2(6)), link_at(50e9)
    budget = choose(trace, EVERYTHING).peak_bytes // 2
    free = choose(trace, budget, link, EVERYTHING)
    room = free.host_bytes // 3
    found = choose(trace, budget, link, room)
    assert found.is_feasible
    assert found.host_bytes <= room < free.host_bytes


def chain(num_bytes: int, seconds: float, length: int) -> activation_traces.Recorder:
    """Operations that each save what they make, one after the other."""
    recorder = activation_traces.Recorder()
    x = recorder.value(0)
    for _ in range(length):
        x = recorder.op(0, [x], [num_bytes], "w0")
    recorder.ops = [(seconds, reads, writes) for _, reads, writes in recorder.ops]
    return recorder


def test_when_copies_run() -> None:
    """Eight values made a second apart, the first two offloaded; backward takes two seconds for each."""
    trace = trace_of(chain(1000 * MIB, 1.0, 8))
    values = trace.passes[0].values
    values[1:3] = [value._replace(formats=[FormatCost(HOST, 0, 0.0)]) for value in values[1:3]]
    policy = [0, 1, 1, *[0] * 6]
    timeline = _C.activation_simulate(*trace.for_solver(), policy, timeline=True)
    uses = [index for index, use in enumerate(trace.uses) if not use.is_release]
    assert timeline["restored_at"] == [-1, uses[7], uses[6], *[-1] * 6]
    assert timeline["peaks"][0] == 6000 * MIB

    def run(seconds_per_copy: float, budget_mib: int = 8000) -> Copies:
        link = HostLink(1000 * MIB / seconds_per_copy, 1000 * MIB / seconds_per_copy, 0.0)
        return copies_of(trace, policy, timeline["peaks"], timeline["restored_at"], budget_mib * MIB, link)

    # Backward takes values 8 to 1 at 8, 10, ... 22 seconds. Copies start earlier by a quarter of their time.
    quick = run(1.0)
    assert (quick.num_bytes, quick.num_values, quick.exposed_seconds) == (2000 * MIB, 2, 0.0)
    assert quick.prefetches == [Prefetch(2, 3), Prefetch(1, 2)]
    # Copies of four seconds end on the host at 5 and 9 seconds; forward ends at 8.
    slow = run(4.0)
    assert slow.exposed_seconds == 0.0
    assert slow.prefetches == [Prefetch(2, 6), Prefetch(1, 4)]
    # The budget has no room for the copy that is still running at the end of forward, so the step waits a second.
    assert run(4.0, 6000).exposed_seconds >= 1.0
    # Copies of eight seconds cannot be hidden. They end at 9 and 17, and back at 25 and 33, needed at 20 and 22.
    assert run(8.0).exposed_seconds == pytest.approx(11.0)


def test_copies_back_start_where_the_plan_says() -> None:
    """On the CPU copies are made at once, so that their number says when they started."""
    pool = _C.OffloadPool(64 * MIB)
    recorder = _C.ActivationRecorder()
    recorder.set_formats([], pool, EVERYTHING)
    host, kept = [HOST], [0]
    prefetches = [[], [], [[(1, 0), (0, 0)]]]
    recorder.set_plans(
        [
            [
                PlannedOp("aten::exp", form, False, prefetches=starts)
                for form, starts in zip((host, host, kept), prefetches, strict=True)
            ]
        ]
    )
    seen = []
    x = torch.full((1000,), 0.1, requires_grad=True)
    with _C.ActivationScope(recorder):
        y = x.exp()
        z = y.exp()
        w = z.exp()
    assert not recorder.divergence
    assert pool.num_copies == 2
    z.register_hook(lambda grad: seen.append(pool.num_copies))
    w.sum().backward()
    assert seen == [4]  # both, though one ahead would be one
    assert pool.num_copies == 4
    assert pool.bytes_in_use == 0
    x2 = x.detach().requires_grad_()
    x2.exp().exp().exp().sum().backward()
    assert torch.equal(x.grad, x2.grad)


def test_a_plan_with_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, its table and its file contain the assumed link, and a step runs the planned copies."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())])
    x = torch.randn(512, 256)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    expected = [param.grad.clone() for param in model.parameters()]
    monkeypatch.setattr("drivetrain.budget.budget.link_of", lambda model: HostLink(1e12, 1e12, 0.0))
    plan = drivetrain.activation_budget(model, step, "60%", offload="64MiB")
    assert plan.host_link == HostLink(1e12, 1e12, 0.0)
    assert plan.copies is not None
    assert plan.copies.num_values > 0
    assert plan.measured_bytes <= plan.budget_bytes
    copies = plan._pool.num_copies
    step()
    assert plan._pool.num_copies - copies == 2 * plan.copies.num_values
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), expected, strict=True))
    said = " ".join(str(plan).split())
    assert "offload: measured 1000.0 GB/s to the host, 1000.0 GB/s back, 0 us a copy" in said
    assert f"{plan.copies.num_values} tensors of" in said
    saved = json.loads(json.dumps(plan.to_dict()))
    assert saved["host_link"] == dataclasses.asdict(plan.host_link)
    choice = plan._chosen
    plan.remove()
    again = drivetrain.activation_budget(model, plan=saved, offload="64MiB")
    assert again._chosen == choice
    again.remove()


def test_the_cpu_has_no_link() -> None:
    assert copies.link_of(nn.Linear(2, 2)) is None
    old = {
        "keeping": [0],
        "peak_bytes": 1,
        "seconds": 0.0,
        "bound_seconds": 0.0,
        "smallest_bytes": 1,
        "is_feasible": True,
    }
    assert ChosenPolicy.from_dict(old).copies is None  # of a file from before copies were planned


@pytest.mark.gpu
def test_the_link_of_a_gpu_is_measured_once() -> None:
    link = copies.link_of(nn.Linear(2, 2, device="cuda"))
    assert link is not None
    assert link is copies.link_of(nn.Linear(3, 3, device="cuda"))
    for per_second in (link.out_bytes_per_second, link.in_bytes_per_second):
        assert 1e9 < per_second < 1e12
    assert 0 < link.copy_seconds < 1e-3
    assert math.isfinite(link.out_seconds(MIB))
