"""Tests bfloat16 on the wire with float32 sums on real ranks: values, rounding errors, other types, and failures."""

import copy
import pickle
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import drivetrain
from ddp_cases import SMALL_BUCKETS, OnRanks, Products, TorchDDP, assert_equal_on_ranks, inputs, make_net, message_of
from drivetrain import _C
from drivetrain import DistributedDataParallel as DDP
from drivetrain.cli import arguments
from drivetrain.ddp import transport
from ranks import run_on

WIRE = {"transport": "torch", "wire_dtype": torch.bfloat16}
# These sizes cover no element, fewer than ranks, pieces of unequal length, tiles with tails, and several messages.
SIZES = [0, 1, 2, 3, 17, 64, 513, 4099, 100_003, 1_500_007]
UNIT = 2.0**-8  # bfloat16's unit roundoff: 8 bits of significand, to nearest


@pytest.fixture(params=[2, 3, 4])
def on_some_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """Runs on two ranks, then on three, then on four."""
    if request.param == 2:
        run_on_two: OnRanks = request.getfixturevalue("on_ranks")
        return run_on_two
    run_on_more: OnRanks = request.getfixturevalue("_more_ranks")[request.param].run
    return run_on_more


def wire_comm() -> _C.Comm:
    return transport.make_comm("torch", dist.group.WORLD, torch.device("cpu"), torch.bfloat16)


def values_of(rank: int, size: int) -> Tensor:
    """Returns values of magnitudes from 1e-8 to 1e8, so that sums cancel and absorb."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    values = torch.randn(size, generator=generator)
    return values * torch.pow(10, torch.rand(size, generator=generator) * 16 - 8)


def reference(tensors: list[Tensor]) -> Tensor:
    """Computes the reference: rounds every value, sums in float32 in rank order, and rounds the sum."""
    rounded = [x.bfloat16().float() for x in tensors]
    return sum(rounded[1:], start=rounded[0]).bfloat16().float()


def bound(tensors: list[Tensor]) -> Tensor:
    """Returns the bound of csrc/ddp/transport/transport.h on the error of each element, in float64."""
    n = len(tensors)
    exact = torch.stack(tensors).double().sum(0).abs()
    size = torch.stack(tensors).double().abs().sum(0)
    before = UNIT * size + (n - 1) * 2.0**-24 * (1 + UNIT) * size
    return before + UNIT * (exact + before) + (n + 1) * 2.0**-134


def check_sums() -> None:
    comm = wire_comm()
    for size in SIZES:
        tensors = [values_of(rank, size) for rank in range(dist.get_world_size())]
        expected = reference(tensors)
        error = (expected.double() - torch.stack(tensors).double().sum(0)).abs()
        assert (error <= bound(tensors)).all(), f"{size} elements"
        for isa in (*_C.available_isas(), ""):  # the last one again
            _C.force_isa(isa)
            flat = tensors[dist.get_rank()].clone()
            comm.all_reduce(flat, mean=False)
            assert torch.equal(flat, expected), f"{size} elements, {isa}"


def test_sums_are_within_two_roundings_of_float64(on_some_ranks: OnRanks) -> None:
    on_some_ranks(check_sums)


# Each row has the value of rank 0, the value of rank 1, and their sum.
LEAST = 2.0**-133  # bfloat16's smallest above 0
SPECIAL = [
    (float("nan"), 1.0, float("nan")),
    (float("inf"), 1.0, float("inf")),
    (float("-inf"), float("inf"), float("nan")),
    (3.4e38, 0.0, float("inf")),  # finite in float32, above bfloat16's largest
    (2.5e38, 2.5e38, float("inf")),
    (3.3e38, -3.3e38, 0.0),
    (-0.0, -0.0, -0.0),
    (0.0, -0.0, 0.0),
    (1 + UNIT, 0.0, 1.0),  # half way: to even, here down
    (1 + 3 * UNIT, 0.0, 1 + 4 * UNIT),  # and here up
    (1 + UNIT, UNIT, 1.0),  # every value is rounded before they are added up
    (LEAST, LEAST, 2 * LEAST),
    (LEAST / 2, LEAST / 2, 0.0),
    (LEAST * 0.75, -0.0, LEAST),
    (2.0**-127, 2.0**-127, 2.0**-126),
]


@run_on(2)
def test_special_values(isa: str) -> None:
    _C.force_isa(isa)
    for repeats in (1, 40):  # one by one, and where loops are vectorized
        columns = [
            torch.tensor(column, dtype=torch.float64).float().repeat(repeats) for column in zip(*SPECIAL, strict=True)
        ]
        flat = columns[dist.get_rank()].clone()
        wire_comm().all_reduce(flat, mean=False)
        nan = columns[2].isnan()
        assert torch.equal(flat.isnan(), nan)
        assert torch.equal(flat[~nan].view(torch.int32), columns[2][~nan].view(torch.int32))
    _C.force_isa("")


def torchs_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Calls torch's hook under another name, as torch refuses its own name outside of NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def errors_of_both() -> tuple[float, float]:
    """Returns the root mean square errors of the mean over ranks, of ours and of torch's hook."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 100_000
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    exact = torch.stack(tensors).double().mean(0)
    ours, theirs = DDP(Products(size), **WIRE), TorchDDP(Products(size))
    theirs.register_comm_hook(None, torchs_hook)
    errors = []
    for model in (ours, theirs):
        model(tensors[rank]).backward()
        errors.append((model.module.weights[0].grad.double() - exact).pow(2).mean().sqrt().item())
    return errors[0], errors[1]


def test_error_does_not_grow_with_ranks_as_torchs_hook_s_does(on_some_ranks: OnRanks) -> None:
    results = on_some_ranks(errors_of_both)
    ours, theirs = results[0]
    # The variance of ours counts n roundings of values and n of the sum. That of the hook counts n of values and 2 +
    # ... + n of the partial sums. It also counts n of the values' n-th parts unless n is a power of two.
    n = len(results)
    expected = (2 * n / (n + (n if n == 3 else 0) + n * (n + 1) / 2 - 1)) ** 0.5
    assert ours / theirs == pytest.approx(expected, rel=0.05)


class Mixed(nn.Module):
    """Has weights that travel rounded, and some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 10, sparse=True)
        self.single = nn.Linear(10, 300)
        self.optional = nn.Linear(300, 300)
        self.last = nn.Linear(300, 7, dtype=torch.float64)

    def forward(self, x: Tensor, use_optional: bool) -> Tensor:
        x = self.single(self.table(x)).tanh()
        return self.last((self.optional(x) if use_optional else x).double())


def trains_as_torch() -> None:
    torch.manual_seed(0)
    net = Mixed()
    theirs = TorchDDP(copy.deepcopy(net), find_unused_parameters=True)
    ours = DDP(net, find_unused_parameters=True, check_replicas_every=1, **WIRE, **SMALL_BUCKETS)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    for step in range(4):
        theirs.module.load_state_dict(ours.module.state_dict())
        use_optional = step % 3 != 0 and (step % 3 == 1 or dist.get_rank() == 0)
        batches = [torch.randint(20, (4,)) for _ in range(2)]
        for model in (ours, theirs):
            model.zero_grad()
            with model.no_sync():
                model(batches[0], use_optional).pow(2).sum().backward()
            model(batches[1], use_optional).pow(2).sum().backward()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is None:
                continue
            mine, other = a.grad.to_dense(), b.grad.to_dense()
            rounded = mine.dtype == torch.float32 and not a.grad.is_sparse
            assert torch.equal(mine, mine.bfloat16().to(mine.dtype)) == rounded, name
            scale = other.abs().max().item()
            torch.testing.assert_close(mine, other, rtol=0, atol=(0.02 if rounded else 1e-6) * scale)
        assert_equal_on_ranks([p.grad.to_dense() for p in ours.parameters() if p.grad is not None])
        optimizer.step()


def test_gradients_are_torchs_rounded(on_some_ranks: OnRanks) -> None:
    on_some_ranks(trains_as_torch)


@run_on(2)
def test_weights_are_exact() -> None:
    """Uses a sum of weights that bfloat16 cannot represent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(Products(65), **WIRE)
    weights = [257.0, 514.0, 1.0, 2.0][:world]
    model.backward(model(torch.full((65,), 1.0 if rank < 2 else 0.0)), weight=weights[rank])
    gradient = (256.0 + 512.0) * (1 / sum(weights))  # 257 and 514 are rounded, being gradients; their sum is not
    assert torch.equal(model.module.weights[0].grad, torch.full((65,), gradient, dtype=torch.float64).float())


def uneven_inputs(dtype: torch.dtype) -> None:
    tolerance = 2 * UNIT if dtype == torch.bfloat16 else 3 / 8
    rank, world = dist.get_rank(), dist.get_world_size()
    for by_initial in (True, False):
        model = DDP(Products(5, 1000), **{**WIRE, "wire_dtype": dtype}, **SMALL_BUCKETS)
        seen = []
        with model.join(divide_by_initial_world_size=by_initial):
            for _ in range(2 + rank):
                model.zero_grad()
                model(torch.full((5,), 1.0), torch.full((1000,), 2.0)).backward()
                seen.append([w.grad[0].item() for w in model.module.weights])
        for step, grads in enumerate(seen):
            present = sum(1 for r in range(world) if step < 2 + r)
            mean = present / (world if by_initial else present)
            torch.testing.assert_close(grads, [mean, 2 * mean], rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_uneven_inputs(on_some_ranks: OnRanks, dtype: torch.dtype) -> None:
    on_some_ranks(uneven_inputs, dtype)


def num_threads() -> int:
    """Counts threads except the watchdog's, which come and go."""
    return sum(not thread.name.startswith("drivetrain-watch") for thread in threading.enumerate())


@run_on(2)
def test_copies_and_other_groups() -> None:
    rank = dist.get_rank()
    factors = [torch.full((3,), 1 + UNIT * (1 + rank))]

    def arrives(model: DDP, expected: float) -> None:
        model.zero_grad()
        model(*factors).backward()
        assert torch.equal(model.module.weights[0].grad, torch.full((3,), expected))

    model = DDP(Products(3), **WIRE)
    arrives(model, 1.0)  # the mean of 1 + 2^-8 and 1 + 2^-7 is no bfloat16
    arrives(copy.deepcopy(model), 1.0)
    arrives(pickle.loads(pickle.dumps(model)), 1.0)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    model._update_process_group(alone)
    arrives(model, factors[0][0].item())
    model._update_process_group(dist.new_group([0, 1]))
    arrives(model, 1.0)
    made = num_threads(), len(transport._wire_comms)
    for _ in range(3):
        arrives(DDP(Products(3), **WIRE), 1.0)
    assert (num_threads(), len(transport._wire_comms)) == made
    # Transfers within a host round nothing.
    shared = DDP(Products(3), transport="shm", wire_dtype=torch.bfloat16)
    arrives(shared, 1 + 1.5 * UNIT)


@run_on(3)
def test_ranks_that_know_different_numbers_of_groups() -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank == 0:
        return
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    model = DDP(Products(3), process_group=pair, **WIRE)
    model(torch.full((3,), float(rank))).backward()
    assert model.module.weights[0].grad.tolist() == [1.5] * 3


def unedited_script() -> None:
    drivetrain.install(wire_dtype="torch.bfloat16", transport="torch")
    try:
        model = nn.parallel.DistributedDataParallel(Products(3))
    finally:
        drivetrain.uninstall()
    model(torch.full((3,), 1 + UNIT)).backward()
    assert (model.module.weights[0].grad == 1).all()


def test_unedited_script(on_ranks: OnRanks) -> None:
    on_ranks(unedited_script)
    assert arguments._ddp_default("wire_dtype=bfloat16") == ("wire_dtype", "bfloat16")
    assert arguments._ddp_default("wire_dtype=torch.bfloat16") == ("wire_dtype", "torch.bfloat16")


@run_on(2)
def test_refusals() -> None:
    net = nn.Linear(3, 3)
    for wrong, why in (
        (torch.float16, "largest number, 65504"),
        ("float16", "65504"),
        (torch.int8, "wire_dtype is torch.int8"),
    ):
        with pytest.raises(ValueError, match=why):
            DDP(net, wire_dtype=wrong)
    model = DDP(net, **WIRE)
    for register in (
        lambda: model.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    ):
        message = message_of(NotImplementedError, register)
        assert "does not go together with wire_dtype=torch.bfloat16" in message
    model(torch.ones(1, 3)).sum().backward()  # refused, and otherwise whole
    assert (net.weight.grad == 1).all()
    with pytest.raises(NotImplementedError, match="delay_all_reduce_named_params"):
        DDP(net, delay_all_reduce_named_params=[("bias", net.bias)], param_to_hook_all_reduce=net.weight, **WIRE)
    with pytest.raises(NotImplementedError, match=r"wire_dtype is torch\.bfloat16, the parameters are on cuda:0"):
        transport.make_comm("auto", dist.group.WORLD, torch.device("cuda:0"), torch.bfloat16)
    mine = [None, torch.bfloat16][dist.get_rank()]
    differs = r"wire_dtype.*differs: rank 0: .?None.*; rank 1: .?torch.bfloat16"
    with pytest.raises(RuntimeError, match=differs):
        DDP(net, wire_dtype=mine)
    model = DDP(net, wire_dtype=mine, init_sync=False)
    with pytest.raises(RuntimeError, match=differs):
        model(torch.ones(1, 3)).sum().backward()


@run_on(2)
def test_a_rank_that_does_not_come() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model = DDP(Products(*[70_000] * 40), process_group=group, **WIRE, **SMALL_BUCKETS)

    def step() -> None:
        model(*[torch.ones_like(w) for w in model.module.weights]).backward()

    for _ in range(2):
        step()
    if dist.get_rank() == 1:
        time.sleep(8)
        return
    began = time.monotonic()
    message = message_of(RuntimeError, step)
    assert "the all-reduce of bucket 0 of 40" in message, message
    assert "in synchronized step 3" in message
    assert "the all-reduce of bucket 0 of 40" in message_of(RuntimeError, step)
    assert time.monotonic() - began < 60  # the group's timeout of 2 s, and not one for each of the buckets


@run_on(2)
def test_under_torchs_own_checks() -> None:
    """Enables torch's own check of collectives, which blocks in every call."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group([0, 1])
        model = DDP(make_net(), process_group=group, find_unused_parameters=True, **WIRE, **SMALL_BUCKETS)
        for step in range(3):
            model(inputs(), use_optional=step > 0).sum().backward()
            assert_equal_on_ranks([p.grad for p in model.parameters() if p.grad is not None])
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
