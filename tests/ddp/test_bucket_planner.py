"""Checks the bucket plan: its pure functions on arbitrary sizes and times, and the plan of two real ranks."""

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from drivetrain import _C
from drivetrain import DistributedDataParallel as DDP
from ranks import run_on

OnRanks = Callable[..., list[Any]]
ALIGNMENT = 64
sizes = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2)), min_size=1, max_size=40
)
caps = st.lists(st.integers(1, 20_000), min_size=1, max_size=4)


@given(sizes, caps, st.randoms(use_true_random=False))
def test_every_parameter_once_up_to_the_caps_and_in_order(sizes, caps, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(sizes)))
    random.shuffle(order)
    position = {param: i for i, param in enumerate(order)}
    plan = _C.plan_buckets(sizes, order, caps)

    assert sorted(param for _, _, slots in plan for param, _ in slots) == sorted(order)
    made_of_group: dict[int, int] = {}
    for group, num_bytes, slots in plan:
        end = 0
        for param, offset in slots:
            numel, element_bytes, param_group = sizes[param]
            assert param_group == group
            assert offset % ALIGNMENT == 0
            assert offset == end
            end = -(-(offset + numel * element_bytes) // ALIGNMENT) * ALIGNMENT
        assert num_bytes == end
        cap = caps[min(made_of_group.get(group, 0), len(caps) - 1)]
        assert slots[-1][1] < cap  # the last parameter was still wanted
        is_last_of_group = all(g != group for g, _, _ in plan[plan.index((group, num_bytes, slots)) + 1 :])
        assert num_bytes >= cap or is_last_of_group
        made_of_group[group] = made_of_group.get(group, 0) + 1
    # Within a group gradients keep their order, and buckets come in the order of their completion.
    for group in made_of_group:
        seen = [position[param] for g, _, slots in plan if g == group for param, _ in slots]
        assert seen == sorted(seen)
    last = [max(position[param] for param, _ in slots) for _, _, slots in plan]
    assert last == sorted(last)


def test_the_first_bucket_may_be_smaller() -> None:
    plan = _C.plan_buckets([(256, 4, 0)] * 6, [5, 4, 3, 2, 1, 0], [1024, 3072])
    assert [[param for param, _ in slots] for _, _, slots in plan] == [[5], [4, 3, 2], [1, 0]]


def test_small_parameters_between_large_ones_share_their_buckets() -> None:
    plan = _C.plan_buckets([(1000, 4, 0), (10, 4, 0)] * 3, [5, 4, 3, 2, 1, 0], [2000])
    assert [[param for param, _ in slots] for _, _, slots in plan] == [[5, 4], [3, 2], [1, 0]]


# ---- The sizes that leave the least communication exposed.

Points = list[tuple[int, float]]
times = st.integers(0, 1000).map(lambda ms: ms / 1000)
# Bytes rise and seconds do not fall, as in sorted measurements.
all_costs = st.tuples(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=4, unique=True).map(sorted),
    st.lists(times, min_size=4, max_size=4).map(sorted),
).map(lambda pair: list(zip(*pair, strict=False)))


def seconds_of(costs: Points, num_bytes: int) -> float:
    if len(costs) == 1:
        return costs[0][1]
    i = min(max(bisect_left([b for b, _ in costs], num_bytes), 1), len(costs) - 1)
    (a, at_a), (b, at_b) = costs[i - 1], costs[i]
    return max(0.0, at_a + (at_b - at_a) / (b - a) * (num_bytes - a))


def end_of(buckets: list[list[int]], ready: list[float], num_bytes: list[int], costs: Points, overlaps: bool) -> float:
    """Returns when the last all-reduce ends, if they run one at a time, during backward or instead of it."""
    end = stood_still = latest = 0.0
    for bucket in buckets:
        latest = max([latest, *(ready[param] for param in bucket)])
        duration = seconds_of(costs, sum(num_bytes[param] for param in bucket))
        end = (max(latest, end) if overlaps else latest + stood_still) + duration
        stood_still += duration
    return end


@given(
    st.lists(st.tuples(st.integers(1, 5000), times), min_size=1, max_size=8),
    all_costs,
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_other_buckets_end_earlier(params, costs, overlaps, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(params)))
    random.shuffle(order)
    ready = [seconds for _, seconds in params]
    num_bytes = [-(-4 * numel // ALIGNMENT) * ALIGNMENT for numel, _ in params]
    plan, ends = _C.plan_measured_buckets([(n, 4, 0) for n, _ in params], order, ready, costs, overlaps)
    buckets = [[param for param, _ in slots] for _, _, slots in plan]
    assert [param for bucket in buckets for param in bucket] == order
    assert ends[-1] == pytest.approx(end_of(buckets, ready, num_bytes, costs, overlaps), rel=1e-9, abs=1e-12)

    best, fewest = float("inf"), 0
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        other: list[list[int]] = [[]]
        for param, cut in zip(order, [*cuts, False], strict=True):
            other[-1].append(param)
            if cut:
                other.append([])
        end = end_of(other, ready, num_bytes, costs, overlaps)
        if end < best * (1 - 1e-9) or (end <= best * (1 + 1e-9) and len(other) < fewest):
            best, fewest = end, len(other)
    assert ends[-1] <= best * (1 + 1e-8)
    assert len(buckets) <= fewest


@given(sizes, all_costs, st.booleans(), st.randoms(use_true_random=False))
def test_every_parameter_once_and_types_apart(sizes, costs, overlaps, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(sizes)))
    random.shuffle(order)
    ready = [random.random() for _ in sizes]
    plan, ends = _C.plan_measured_buckets(sizes, order, ready, costs, overlaps)
    assert sorted(param for _, _, slots in plan for param, _ in slots) == sorted(order)
    assert all(sizes[param][2] == group for group, _, slots in plan for param, _ in slots)
    position = {param: i for i, param in enumerate(order)}
    last = [max(position[param] for param, _ in slots) for _, _, slots in plan]
    assert last == sorted(last)
    assert ends == sorted(ends)


def test_plans_many_parameters() -> None:
    count = 10_000
    ready = [i / count for i in range(count)]
    plan, ends = _C.plan_measured_buckets(
        [(64, 4, 0)] * count, list(range(count)), ready, [(1, 1e-3), (10**6, 1.0)], True
    )
    assert [param for _, _, slots in plan for param, _ in slots] == list(range(count))
    assert 1 < len(plan) < count
    one_bucket = seconds_of([(1, 1e-3), (10**6, 1.0)], 256 * count) + ready[-1]
    assert ends[-1] < one_bucket


# ---- On two ranks.


class Products(nn.Module):
    """Has its inputs as gradients, so that every bit is the result of the reduction.

    They come in the reverse of the order in which the weights are registered.
    """

    def __init__(self, numels: tuple[int, ...] = (1000, 300_000, 64, 300_001, 17)) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(n) for n in numels])

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, inputs, strict=True)]).sum()

    def inputs(self) -> list[Tensor]:
        return [torch.randn(w.shape) for w in self.weights]


def names_of(model: DDP) -> list[list[str]]:
    return [bucket.names for bucket in model.reducer.buckets()]


def sleep_before_the_last_gradient(module: Products) -> None:
    module.weights[0].register_hook(lambda grad: time.sleep(0.1))


def trains_through_the_plan(transport: str, set_to_none: bool) -> list[list[str]]:
    torch.manual_seed(dist.get_rank())
    ours, theirs = DDP(Products(), transport=transport), TorchDDP(Products())
    sleep_before_the_last_gradient(ours.module)
    for step in range(8):
        batches = [ours.module.inputs() for _ in range(2)]
        for model in (ours, theirs):
            if step != 4:  # with gradients there the plan is made, and they go on being added to
                model.zero_grad(set_to_none=set_to_none)
            with model.no_sync():
                model(*batches[0]).backward()
            model(*batches[1]).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        plan = ours.bucket_plan()
        assert (plan.why_not == "the first steps are not over") == (step < 4)
        assert plan.measured_exposed_ms is not None
        assert plan.measured_exposed_ms > 0
    assert plan.why_not == "", plan
    assert [list(bucket.names) for bucket in plan.buckets] == names_of(ours)
    end = 0.0
    for bucket in plan.buckets:
        assert end - 1e-6 <= bucket.start_ms <= bucket.end_ms
        assert bucket.ready_ms - 1e-6 <= bucket.start_ms
        end = bucket.end_ms
    assert plan.expected_exposed_ms == pytest.approx(end - plan.buckets[-1].ready_ms)
    assert plan.buckets[-1].ready_ms >= 100
    assert "planned from measurement: latency" in str(plan)
    assert f"expected {plan.expected_exposed_ms:.2f} ms" in str(plan)
    return names_of(ours)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_the_plan_is_the_same_on_every_rank_and_changes_no_bit(
    on_ranks: OnRanks, transport: str, set_to_none: bool
) -> None:
    buckets = on_ranks(trains_through_the_plan, transport, set_to_none)
    assert buckets[0] == buckets[1]
    if (
        transport == "torch"
    ):  # what is there before the pause is reduced during it, in one piece, unless sizes cost alike
        assert buckets[0] != [["weights.4", "weights.3"], ["weights.2", "weights.1", "weights.0"]]


def steps(model: DDP, count: int) -> None:
    for _ in range(count):
        model.zero_grad()
        model(*model.module.inputs()).backward()


def not_planned(what: str) -> str:
    if what == "sizes":
        model = DDP(Products(), bucket_cap_mb=1)
    elif what == "unused":
        model = DDP(Products(), find_unused_parameters=True)
    elif what == "joined":
        model = DDP(Products())
        with model.join():
            steps(model, 2 + 5 * dist.get_rank())
    else:
        model = DDP(Products())
        if what == "hook":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        kept = []
        for step in range(6):
            steps(model, 1)
            if what == "reference" and dist.get_rank() == 1 and step == 3:
                kept = [model.module.weights[0].grad, model.module.weights[1].grad[5:]]
        del kept
    steps(model, 2)
    assert model.bucket_plan().why_not in str(model.bucket_plan())
    assert model.bucket_plan().measured_exposed_ms is not None
    return model.bucket_plan().why_not


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("sizes", "bucket sizes were given"),
        ("unused", "find_unused_parameters=True"),
        ("joined", "a rank ran out of inputs"),
        ("hook", "a communication hook reduces"),
        ("reference", "on rank 1 the script keeps references to .grad"),
    ],
)
def test_why_nothing_is_planned(on_ranks: OnRanks, what: str, why: str) -> None:
    reasons = on_ranks(not_planned, what)
    assert why in reasons[0]
    assert reasons[0] == reasons[1]


@run_on(2)
def test_backwards_alone_say_why_nothing_is_planned() -> None:
    """Reduces each backward at its end, so that no gradient's time is seen."""
    model = DDP(Products())

    def backward() -> None:
        with model.no_sync():
            loss = model(*model.module.inputs())
        loss.backward()

    for _ in range(4):
        model.zero_grad()
        backward()
    assert model.bucket_plan().why_not == "the first steps are not over"
    backward()
    assert "no forward prepared a backward" in model.bucket_plan().why_not


def forwards_of_one_rank_alone(static_graph: bool) -> str:
    model = DDP(Products(), static_graph=static_graph)
    for _ in range(7):
        steps(model, 1)
        for rank in range(2):
            if rank == dist.get_rank():  # an evaluation that forgets torch.no_grad()
                model(*model.module.inputs())
                with model.no_sync():
                    model(*model.module.inputs())
            dist.barrier()
    return model.bucket_plan().why_not


@pytest.mark.parametrize("static_graph", [False, True])
def test_no_forward_takes_part_in_planning(on_ranks: OnRanks, static_graph: bool) -> None:
    assert on_ranks(forwards_of_one_rank_alone, static_graph) == ["", ""]


def runs_out(first_steps: int) -> list[list[str]]:
    torch.manual_seed(dist.get_rank())
    ours, theirs = DDP(Products(), transport="shm"), TorchDDP(Products())
    for model in (ours, theirs):
        torch.manual_seed(dist.get_rank())
        with model.join():
            for _ in range(first_steps + 4 * dist.get_rank()):
                model.zero_grad()
                model(*ours.module.inputs()).backward()
    if dist.get_rank() == 1:
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    steps(ours, 2)
    return names_of(ours)


@pytest.mark.parametrize("first_steps", [0, 1, 2, 4])
def test_a_rank_without_inputs_rebuilds_with_the_others(on_ranks: OnRanks, first_steps: int) -> None:
    buckets = on_ranks(runs_out, first_steps)
    assert buckets[0] == buckets[1]


def backward_that_raises_at_its_end() -> list[list[str]]:
    """Raises on one rank once all its gradients have come. It goes on, and must count its steps as the others do."""
    model = DDP(Products())
    start = torch.ones((), requires_grad=True)

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    for step in range(6):
        model.zero_grad()
        scale = start * 1
        if step in (0, 3) and dist.get_rank() == 1:
            scale.register_hook(fail)
            with pytest.raises(ArithmeticError):
                model(*[x * scale for x in model.module.inputs()]).backward()
        else:
            model(*[x * scale for x in model.module.inputs()]).backward()
    assert model.bucket_plan().why_not == ""
    return names_of(model)


def test_a_step_that_raised_at_its_end_counts(on_ranks: OnRanks) -> None:
    buckets = on_ranks(backward_that_raises_at_its_end)
    assert buckets[0] == buckets[1]


def parameters_of_other_sizes() -> str:
    numels = (10, 20) if dist.get_rank() == 0 else (20, 10)  # the first step's only bucket has as many bytes
    model = DDP(Products(numels), init_sync=False)
    steps(model, 1)
    with pytest.raises(RuntimeError) as error:
        steps(model, 1)
    return str(error.value)


def test_buckets_that_differ_between_ranks_are_found(on_ranks: OnRanks) -> None:
    for message in on_ranks(parameters_of_other_sizes):
        assert "rank 0 and rank 1 make different buckets of the same plan" in message


def first_step() -> bool:
    model = DDP(Products(), transport="torch")
    sleep_before_the_last_gradient(model.module)
    steps(model, 1)
    times = model.reducer.times()
    return times.comm_start < times.backward_end - 20e6


def test_communication_begins_during_the_first_backward(on_ranks: OnRanks) -> None:
    assert on_ranks(first_step) == [True, True]
