"""Tests float8 on the wire against torch arithmetic: rounded blocks, carried rounding errors, and what drops them."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_cases import SMALL_BUCKETS, OnRanks, Products, assert_equal_on_ranks
from drivetrain import _C, optim
from drivetrain import DistributedDataParallel as DDP
from drivetrain.ddp import transport
from ranks import dawdle_in_hooks, run_on

FLOAT8 = torch.float8_e5m2
WIRE = {"transport": "torch", "wire_dtype": FLOAT8}
BLOCK = 256
MOST = (256 << 10) // 257 * 256  # values of a message from one rank to another
# These sizes cover no element, fewer than ranks, blocks with tails, and pieces of unequal length.
SIZES = [0, 1, 2, 3, 255, 256, 257, 511, 1025, 20_003]
SEVERAL_MESSAGES = 3 * MOST + 1
UNIT = 2.0**-3  # float8 e5m2's unit roundoff: 3 bits of significand, to nearest


# ---- The reference.


def rounded(values: Tensor) -> Tensor:
    """Returns what arrives of a piece that begins a block."""
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    finite = blocks.abs().where(blocks.isfinite(), 0)
    exponents = (finite.amax(1, keepdim=True).view(torch.int32) >> 23).clamp(min=15) if len(values) else finite[:, :1]
    unit = torch.pow(2.0, exponents.double() - 141)
    codes = (blocks.double() / unit).float().to(FLOAT8)
    return (codes.double() * unit).float().view(-1)[: len(values)]


def pieces(numel: int, world: int) -> Iterator[slice]:
    """Yields the ranges of values that one rank sums in one transfer."""
    for begin in range(0, numel, MOST * world):
        size = min(MOST * world, numel - begin)
        for rank in range(world):
            yield slice(begin + size * rank // world, begin + size * (rank + 1) // world)


class Reference:
    """Sums as the ranks do. With `carries`, what is rounded off is added in the next call."""

    def __init__(self, numel: int, world: int, carries: bool) -> None:
        self.carries = carries
        self.pieces = list(pieces(numel, world))
        self.of_values = torch.zeros(world, numel)
        self.of_sums = torch.zeros(numel)

    def sum(self, tensors: list[Tensor]) -> Tensor:
        result = torch.empty_like(self.of_sums)
        for piece in self.pieces:
            total: Tensor | None = None
            for values, rest in zip(tensors, self.of_values, strict=True):
                sent = self._round(values[piece], rest[piece])
                total = sent if total is None else total + sent
            assert total is not None
            result[piece] = self._round(total, self.of_sums[piece])
        return result

    def _round(self, values: Tensor, rest: Tensor) -> Tensor:
        if not self.carries:
            return rounded(values)
        values = values + rest
        sent = rounded(values)
        left = values - sent
        rest.copy_(left.where(left.isfinite(), 0))
        return sent


def bound(tensors: list[Tensor]) -> Tensor:
    """Returns the bound of csrc/ddp/transport/transport.h on the error of each element, in float64."""
    n = len(tensors)
    exact = torch.stack(tensors).double().sum(0).abs()
    size = torch.stack(tensors).double().abs().sum(0)
    largest = size.max() if len(size) else size.sum()
    before = UNIT * size + (n - 1) * 2.0**-24 * (1 + UNIT) * size
    return before + UNIT * (exact + before) + (n + 1) * (2.0**-143 + 2.0**-31 * 2 * largest)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int32), expected[~nan].view(torch.int32))


# ---- Sums.


def wire_comm() -> _C.Comm:
    return transport.make_comm("torch", dist.group.WORLD, torch.device("cpu"), FLOAT8)


def values_of(rank: int, size: int) -> Tensor:
    """Returns values of magnitudes from 1e-8 to 1e8, so that sums cancel, and small values vanish in their block."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    values = torch.randn(size, generator=generator)
    return values * torch.pow(10, torch.rand(size, generator=generator) * 16 - 8)


def all_sums() -> list[bytes]:
    comm, rank, world = wire_comm(), dist.get_rank(), dist.get_world_size()
    results = []
    for isa in (*_C.available_isas(), ""):
        _C.force_isa(isa)
        for size in SIZES if isa else [SEVERAL_MESSAGES]:
            tensors = [values_of(r, size) for r in range(world)]
            plain, carrying = (Reference(size, world, carries) for carries in (False, True))
            flat = tensors[rank].clone()
            held = comm.carry_errors(flat)
            for _ in range(3):
                flat.copy_(tensors[rank])
                comm.all_reduce(flat, mean=False)
                assert_same_bits(flat, carrying.sum(tensors))
            del held
            for _ in range(2):  # nothing is carried any more
                flat.copy_(tensors[rank])
                comm.all_reduce(flat, mean=False)
                assert_same_bits(flat, plain.sum(tensors))
            error = (flat.double() - torch.stack(tensors).double().sum(0)).abs()
            assert (error <= bound(tensors)).all(), f"{size} elements"
            results.append(flat.numpy().tobytes())
    return results


def test_sums_are_the_twins(on_ranks: OnRanks, on_three_ranks: OnRanks) -> None:
    for run in (on_ranks, on_three_ranks):
        first, *others = run(all_sums)
        assert all(other == first for other in others), "the ranks' bits differ"


@run_on(4)
def test_sums_over_hosts_are_the_twins() -> None:
    """Sums over two hosts of two ranks, which divide the tensor into parts of whole transfers."""
    rank, numel = dist.get_rank(), 2 * 2 * MOST + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "host_identity", lambda: (str(rank // 2),))
        comm = transport.make_comm("shm", dist.group.WORLD, torch.device("cpu"), FLOAT8)
    flat = comm.allocate(4 * numel).view(torch.float32)
    held = comm.carry_errors(flat)
    tensors = [values_of(r, numel) for r in range(4)]
    reference = Reference(numel, 2, carries=True)
    for _ in range(3):
        flat.copy_(tensors[rank])
        comm.all_reduce(flat, mean=False)
        if rank == 0:
            assert_same_bits(flat, reference.sum([tensors[0] + tensors[1], tensors[2] + tensors[3]]))
        assert_equal_on_ranks([flat])
    del held


# Each row has the value of rank 0, the value of rank 1, and their sum. Each value is alone in its block.
SPECIAL = [
    (float("nan"), 1.0, float("nan")),
    (float("inf"), 1.0, float("inf")),
    (float("-inf"), float("inf"), float("nan")),
    (float("-inf"), 3.0, float("-inf")),
    (3.3e38, 0.0, float("inf")),  # finite in float32, rounds to 2^128
    (3.1e38, 0.0, 1.75 * 2.0**127),
    (1.75 * 2.0**127, 1.75 * 2.0**127, float("inf")),
    (1.75 * 2.0**127, -1.75 * 2.0**127, 0.0),
    (-0.0, -0.0, -0.0),
    (0.0, -0.0, 0.0),
    (1 + UNIT, 0.0, 1.0),  # half way: to even, here down
    (1 + 3 * UNIT, 0.0, 1 + 4 * UNIT),  # and here up
    (1.99, 0.0, 2.0),  # its exponent grows
    (1 + UNIT, UNIT, 1.0),  # every value is rounded before they are added up
    (2.0**-142, -0.0, 2.0**-142),  # the least number on the wire
    (2.0**-143, -0.0, 0.0),
    (1.5 * 2.0**-143, 0.0, 2.0**-142),
    (2.0**-149, 2.0**-149, 0.0),
]


@run_on(2)
def test_special_values() -> None:
    comm, rank, world = wire_comm(), dist.get_rank(), dist.get_world_size()
    columns = [torch.tensor(column, dtype=torch.float64).float() for column in zip(*SPECIAL, strict=True)]
    for isa in _C.available_isas():
        _C.force_isa(isa)
        for alone in range(len(SPECIAL)):
            flat = columns[rank][alone : alone + 1].clone()
            comm.all_reduce(flat, mean=False)
            assert_same_bits(flat, columns[2][alone : alone + 1])
        # A value that is not finite leaves the others of its block as they are.
        for repeats in (1, 7, 40):
            tensors = [column.repeat(repeats) for column in columns[:2]]
            flat = tensors[rank].clone()
            comm.all_reduce(flat, mean=False)
            assert_same_bits(flat, Reference(len(flat), world, carries=False).sum(tensors))
    _C.force_isa("")


@given(
    st.lists(st.floats(width=32), max_size=600),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=600),
    st.sampled_from(_C.available_isas()),
)
@settings(max_examples=60, deadline=None)
def any_values_on_one_rank(first: list[float], second: list[float], isa: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    comm = _C.wire_comm(group.group_name, group.group_name, FLOAT8)
    _C.force_isa(isa)
    size = max(len(first), len(second))
    reference = Reference(size, 1, carries=True)
    memory = torch.zeros(size)
    held = comm.carry_errors(memory)
    for values in (first, second, first):
        step = torch.tensor(values + [1.0] * (size - len(values)))
        memory.copy_(step)
        comm.all_reduce(memory, mean=False)
        assert_same_bits(memory, reference.sum([step]))
    del held
    _C.force_isa("")


@pytest.mark.usefixtures("process_group")
def test_any_values() -> None:
    any_values_on_one_rank()


# ---- Carried errors.

STEPS = 64


def mean_of_steps(comm: _C.Comm, mine: Tensor, carries: bool) -> Tensor:
    """Returns the mean over steps of the same sum, in float64."""
    flat = mine.clone()
    held = comm.carry_errors(flat) if carries else None
    total = torch.zeros_like(mine, dtype=torch.float64)
    for _ in range(STEPS):
        flat.copy_(mine)
        comm.all_reduce(flat, mean=False)
        total += flat
    del held
    return total / STEPS


@run_on(2, 3)
def test_means_converge() -> None:
    comm, rank, world = wire_comm(), dist.get_rank(), dist.get_world_size()
    tensors = [torch.randn(5000, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    exact = torch.stack(tensors).double().sum(0)
    scale = torch.stack(tensors).double().abs().sum(0)
    errors = [(mean_of_steps(comm, tensors[rank], carries) - exact).abs() for carries in (True, False)]
    # A value's error is at most UNIT of the value with the error before it, and the sum's likewise.
    left = UNIT / (1 - UNIT) * (scale + (1 + UNIT / (1 - UNIT)) * scale)
    assert (errors[0] <= left / STEPS + 1e-6 * scale).all()
    assert (errors[1] > left / STEPS + 1e-6 * scale).double().mean() > 0.5  # it must be the errors that help
    assert errors[0].mean() < errors[1].mean() / 20


@run_on(2)
def test_errors_end_with_their_values() -> None:
    comm, rank, world = wire_comm(), dist.get_rank(), dist.get_world_size()
    tensors = [values_of(r, 2000) for r in range(world)]
    memory = torch.zeros(3000)
    flat = memory[500:2500]

    def step(part: Tensor, values: list[Tensor]) -> Tensor:
        part.copy_(values[rank])
        comm.all_reduce(part, mean=False)
        return part.clone()

    def first(values: list[Tensor]) -> Tensor:
        return Reference(len(values[0]), world, carries=True).sum(values)

    held = comm.carry_errors(memory)
    assert_same_bits(step(flat, tensors), first(tensors))
    assert not torch.equal(step(flat, tensors), first(tensors))
    # Other values take the places.
    held = comm.carry_errors(memory)
    assert_same_bits(step(flat, tensors), first(tensors))
    # A transfer with other bounds has other values, and so has what overlapped with it.
    shorter = [values[:900] for values in tensors]
    assert_same_bits(step(memory[600:1500], shorter), first(shorter))
    assert_same_bits(step(flat, tensors), first(tensors))
    # Tensors elsewhere carry nothing, even where they end in the memory.
    wider = [torch.cat([values, values]) for values in tensors]
    outside = torch.zeros(4000)
    for _ in range(2):
        assert_same_bits(step(outside, wider), Reference(4000, world, carries=False).sum(wider))
    # A step that is not finite leaves no trace, and the others of its elements keep their errors.
    reference = Reference(2000, world, carries=True)
    held = comm.carry_errors(memory)
    spoilt = [values.clone() for values in tensors]
    spoilt[0][3], spoilt[1][700], spoilt[world - 1][1999] = float("inf"), float("nan"), 3.4e38
    for values in (tensors, spoilt, tensors, tensors):
        result = step(flat, values)
        assert_same_bits(result, reference.sum(values))
        assert result.isfinite().all() == (values is tensors)
    del held


# ---- The wrapper.


def train_on(model: DDP, factors: list[Tensor], steps: int) -> list[Tensor]:
    """Returns the mean of the gradients over steps, in float64."""
    weights = list(model.module.weights)
    totals = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
    for _ in range(steps):
        model.zero_grad()
        model(*factors).backward()
        for total, weight in zip(totals, weights, strict=True):
            total += weight.grad
        assert_equal_on_ranks([w.grad for w in weights])
    return [total / steps for total in totals]


@run_on(2, 3)
def test_gradients_converge() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = (1, 65, 70_000, 1000, 40_000)
    tensors = [
        [torch.randn(n, generator=torch.Generator().manual_seed(9 * r + n)) for n in sizes] for r in range(world)
    ]
    model = DDP(Products(*sizes), check_replicas_every=7, **WIRE, **SMALL_BUCKETS)
    train_on(model, tensors[rank], 6)  # until the buckets are as they stay
    for net in (model, copy.deepcopy(model)):
        means = train_on(net, tensors[rank], STEPS)
        for mean, *of_ranks in zip(means, *tensors, strict=True):
            exact = torch.stack(of_ranks).double().mean(0)
            scale = torch.stack(of_ranks).double().abs().mean(0)
            assert ((mean - exact).abs() <= 2 * 0.31 * scale / STEPS + 1e-6 * scale).all()
    # no_sync() rounds nothing, and the sum of both passes is rounded once.
    model.zero_grad()
    with model.no_sync():
        model(*tensors[rank]).backward()
    assert all(torch.equal(w.grad, x) for w, x in zip(model.module.weights, tensors[rank], strict=True))
    model(*tensors[rank]).backward()
    for weight, *of_ranks in zip(model.module.weights, *tensors, strict=True):
        scale = torch.stack(of_ranks).abs().mean(0)
        assert ((weight.grad - 2 * torch.stack(of_ranks).mean(0)).abs() <= 1.2 * scale).all()
    assert_equal_on_ranks([w.grad for w in model.module.weights])


class Backwards(Products):
    """Uses its weights in the reverse of their order, so that buckets are laid out again after the first step."""

    def forward(self, *factors: Tensor) -> Tensor:
        total = torch.zeros(())
        for weight, factor in list(zip(self.weights, factors, strict=True))[::-1]:
            total = total + (weight * factor).sum()
        return total


@run_on(2)
def test_errors_do_not_follow_a_place_to_other_gradients() -> None:
    """Has a large gradient, of which much is rounded off, and small ones that float8 represents."""
    model = DDP(Backwards(*[1024] * 4), **WIRE, bucket_cap_mb=0.004)
    weights = list(model.module.weights)
    factors = [torch.full((1024,), 1.15e6), *[torch.full((1024,), float(n)) for n in (1, 2, 4)]]
    places = []
    for _ in range(4):
        model.zero_grad()
        model(*factors).backward()
        places.append([w.grad.data_ptr() for w in weights])
        for weight, factor in zip(weights[1:], factors[1:], strict=True):
            assert torch.equal(weight.grad, factor)
        assert not torch.equal(weights[0].grad, factors[0])
    assert places[0] != places[-1]
    assert set(places[0]) == set(places[-1])  # the memory is the same


@run_on(2)
def test_steps_in_backward() -> None:
    """Steps in backward, where buckets otherwise share memory."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = (300, 70_000, 40_000, 50_000)
    tensors = [
        [torch.randn(n, generator=torch.Generator().manual_seed(9 * r + n)) for n in sizes] for r in range(world)
    ]
    model = DDP(Products(*sizes), **WIRE, **SMALL_BUCKETS)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    optimizer.step_in_backward(model)
    for _ in range(6):
        model(*tensors[rank]).backward()
    before = [w.detach().clone() for w in model.module.weights]
    for _ in range(STEPS):
        model(*tensors[rank]).backward()
    for weight, start, *of_ranks in zip(model.module.weights, before, *tensors, strict=True):
        mean = (start - weight.detach()).double() / STEPS
        scale = torch.stack(of_ranks).double().abs().mean(0)
        assert ((mean - torch.stack(of_ranks).double().mean(0)).abs() <= 2 * 0.31 * scale / STEPS + 1e-4 * scale).all()


@run_on(2, 4)
def test_two_dtypes_over_one_group() -> None:
    """Has buckets of two wrappers in progress at once, which round to different dtypes over one process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dtypes = (FLOAT8, torch.bfloat16, FLOAT8)
    models = [
        DDP(Products(1, 65, 70_000, 1000), transport="torch", wire_dtype=dtype, **SMALL_BUCKETS) for dtype in dtypes
    ]
    assert set(transport._wire_comms[dist.group.WORLD]) == {FLOAT8, torch.bfloat16}
    weights = [w for model in models for w in model.module.weights]
    dawdle_in_hooks(weights)
    for step in range(30):
        # float8 represents 1 to 4 and their sums over ranks.
        factors = [torch.full_like(w, 2.0 ** ((step * 7 + i * 3) % 5)) for i, w in enumerate(weights)]
        losses = [
            model(*[x * (1 if rank else 3) for x in factors[4 * i : 4 * i + 4]]) for i, model in enumerate(models)
        ]
        sum(losses).backward()
        for weight, x in zip(weights, factors, strict=True):
            assert torch.equal(weight.grad, x * (world + 2) / world), f"step {step}"
        for model in models:
            model.zero_grad()


@run_on(2)
def test_arguments() -> None:
    net = nn.Linear(3, 3)
    for name in (FLOAT8, "float8_e5m2", "torch.float8_e5m2"):
        assert transport.requested_wire_dtype(name) is FLOAT8
    for wrong, why in (
        (torch.float8_e4m3fn, "no infinity"),
        (
            "float8_e4m3fn",
            "wire_dtype is 'float8_e4m3fn', expected torch.bfloat16, torch.float8_e5m2 or None: it has no",
        ),
        ("float8", "wire_dtype is 'float8', expected torch.bfloat16, torch.float8_e5m2 or None"),
        (torch.float32, "wire_dtype is torch.float32"),
        ("load", "wire_dtype is 'load'"),
    ):
        with pytest.raises(ValueError, match=why):
            DDP(net, wire_dtype=wrong)
    mine = [torch.bfloat16, FLOAT8][dist.get_rank()]
    with pytest.raises(RuntimeError, match=r"wire_dtype.*differs: rank 0: .*bfloat16.*; rank 1: .*float8_e5m2"):
        DDP(net, wire_dtype=mine)
