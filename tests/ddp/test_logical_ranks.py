"""Tests logical ranks: gradients, parameters, states, norms and buffers with the same bits on any number of ranks."""

import math
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from ddp_cases import Products, message_of
from drivetrain import _C
from drivetrain import DistributedDataParallel as DDP
from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler
from drivetrain.ddp import transport
from drivetrain.ddp.logical_ranks import random_streams
from drivetrain.ddp.logical_ranks.random_streams import Use
from drivetrain.optim import precision
from drivetrain.optim.rule import rule_of
from drivetrain.optim.sharded.step import sums_of_whole_squares
from ranks import RankPool

PARTS, STEPS, WINDOWS = 8, 2, 3  # logical ranks, micro-batches of each per window, windows
SIZES = (1, 2, 4, 8)
CARRIERS = ("shm", "torch")
SEED = 7  # of torch on rank 0, where the model is wrapped
DEVICE = "cpu"  # logical_nccl_ranks.py has another one
Batch = tuple[Tensor, Tensor, float]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    found = {size: RankPool(size, tmp_path_factory.mktemp(f"{size}-logical")) for size in SIZES}
    yield found  # a pool starts with its first call
    for pool in found.values():
        pool.close()


class Model(nn.Module):
    """Has batch statistics, a buffer that forward reads, dropout, and a layer that some micro-batches leave out."""

    average: Tensor
    Norm: type[nn.Module] = nn.BatchNorm1d

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = self.Norm(16)
        self.drop = nn.Dropout(0.3)
        self.optional = nn.Linear(16, 16)
        self.last = nn.Linear(16, 5, bias=False)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor, uses_all: bool = True) -> Tensor:
        x = self.drop(self.norm(self.first(x)).tanh()) + self.average
        self.average = self.average * 0.5 + x.detach().mean(0)
        return self.last(self.optional(x) if uses_all else x)


def make_model(dtype: torch.dtype) -> Model:
    torch.manual_seed(1)
    return Model().to(DEVICE, dtype)


def micro_batch(window: int, logical_rank: int, step: int, dtype: torch.dtype) -> Batch:
    """Returns inputs and targets of uneven sizes, and a weight that is no multiple of a power of two."""
    rng = torch.Generator().manual_seed(10_000 * window + 100 * logical_rank + step)
    count = 2 + (window + 3 * logical_rank + step) % 5
    x = torch.randn(count, 6, generator=rng) * 10 ** (2 * torch.rand(1, generator=rng) - 1)
    targets = torch.randint(5, (count,), generator=rng)
    return x.to(DEVICE, dtype), targets.to(DEVICE), 0.0 if logical_rank == 3 and step else count / 3


def uses_all(window: int, logical_rank: int, step: int) -> bool:
    return window != 1 and (window + logical_rank + step) % 3 > 0


def loss_of(model: nn.Module, window: int, logical_rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    x, targets, weight = micro_batch(window, logical_rank, step, dtype)
    # Python's generator takes part as torch's does.
    return F.cross_entropy(model(x, uses_all(window, logical_rank, step)).float(), targets) * random.random(), weight


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns parameters, buffers and, on rank 0, whole states. Every rank must call it."""
    by_param = drivetrain.optim.full_state_dict(optimizer).get("state", {})
    states = [precision.without_blocks(by_param[key]) for key in sorted(by_param)]
    values = [state[name] for state in states for name in sorted(state)]
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, values)]
    return [value.detach().clone() for value in tensors]


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def train_on_ranks(dtype: torch.dtype, options: dict[str, Any], windows: int = WINDOWS) -> list[Any]:
    """Trains on this rank's logical ranks. Returns each step's gradients, and then everything that was trained."""
    parts = PARTS // dist.get_world_size()
    model = make_model(dtype)
    torch.manual_seed(SEED + dist.get_rank())
    # Other sizes of buckets on other numbers of ranks must not matter.
    caps = {"bucket_cap_mb": 0.0005 * parts}
    wrapped = DDP(model, logical_ranks=PARTS, find_unused_parameters=True, **caps, **options)
    own = random_streams.states()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(grads_of(model)))
    with drivetrain.accumulate(wrapped, optimizer, STEPS, max_grad_norm=0.5) as window:
        for number in range(windows):
            for logical_rank in range(dist.get_rank() * parts, (dist.get_rank() + 1) * parts):
                for step in range(STEPS):
                    loss, weight = loss_of(wrapped, number, logical_rank, step, dtype)
                    stepped = window.backward(loss, weight)
            assert stepped
    after = random_streams.states()
    assert all(torch.equal(state, before) for state, before in zip(after[0], own[0], strict=True))
    assert after[1] == own[1]
    if dist.get_rank() > 0:  # as under torch, ranks have their own batch statistics
        return [*found, values_of(model, optimizer)[: len(list(model.parameters()))]]
    return [*found, values_of(model, optimizer)]


def in_tree(values: list[Any]) -> Any:
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]


def train_in_one_process(dtype: torch.dtype) -> list[Any]:
    """Does what `train_on_ranks` must do, with torch's autograd and optimizer."""
    torch.set_num_threads(1)
    model = make_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for window in range(WINDOWS):
        before = [buffer.clone() for buffer in model.buffers()]
        after: list[Tensor] = []
        of_parts: list[list[Tensor | None]] = []
        weights: list[float] = []
        for logical_rank in range(PARTS):
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            random_streams.begin(Use.MODEL, SEED, logical_rank, window)
            total = 0.0
            for step in range(STEPS):
                loss, weight = loss_of(model, window, logical_rank, step, dtype)
                if weight > 0:
                    (loss * weight).backward()
                total += weight
            weights.append(total)
            of_parts.append(grads_of(model))
            optimizer.zero_grad()
            after = after or [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.copy_(value)
        for param, grads in zip(model.parameters(), zip(*of_parts, strict=True), strict=True):
            if any(grad is not None for grad in grads):
                param.grad = in_tree([torch.zeros_like(param) if grad is None else grad for grad in grads])
                param.grad.mul_(1 / in_tree(weights))
        drivetrain.optim.clip_grad_norm_(model.parameters(), 0.5)
        found.append(grads_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, values_of(model, optimizer)]


def assert_same_bits(got: Any, want: Any, what: str) -> None:
    for row, (mine, other) in enumerate(zip(got, want, strict=True)):
        for index, (a, b) in enumerate(zip(mine, other, strict=False)):
            assert (a is None) == (b is None), f"{what}: {row}, {index}"
            assert a is None or torch.equal(a, b), f"{what}: {row}, {index}"


SHARDED, IN_ROWS = {"shard": "optimizer"}, {"shard": "gradients"}
WAYS = [(dtype, carrier, {}) for dtype in (torch.float32, torch.bfloat16, torch.float64) for carrier in CARRIERS]
WAYS += [(torch.float32, "shm", SHARDED), (torch.bfloat16, "torch", {**SHARDED, "overlap_gather": True})]


@pytest.mark.parametrize(("dtype", "carrier", "options"), WAYS)
def test_bits_of_one_process(
    pools: dict[int, RankPool], dtype: torch.dtype, carrier: str, options: dict[str, Any]
) -> None:
    want = None
    for size, pool in pools.items():
        for rank, got in enumerate(pool.run(train_on_ranks, dtype, {"transport": carrier, **options})):
            want = want or got
            assert any(grad is None for grad in got[1])  # the second window leaves a layer out
            assert_same_bits(got, want, f"{dtype}, rank {rank} of {size}")
    assert_same_bits(want, train_in_one_process(dtype), f"{dtype}, one process")


# ---- The order of sums.


def spread(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns values of magnitudes that make sums depend on their order."""
    rng = torch.Generator().manual_seed(1000 * rank + numel)
    values = torch.randn(numel, generator=rng, dtype=torch.float64)
    return (values * torch.pow(10, torch.rand(numel, generator=rng) * 6 - 3)).to(DEVICE, dtype)


def check_order(carrier: str) -> None:
    comm = transport.make_comm(carrier, dist.group.WORLD, torch.empty(0, device=DEVICE).device, logical_ranks=PARTS)
    assert comm.name.split()[0] == carrier
    size = dist.get_world_size()
    for numel in (1, 3, 17, 1027, 300_001):
        drawn = [spread(rank, numel, torch.float64) for rank in range(size)]
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            tensors = [values.to(dtype) for values in drawn]
            want = in_tree(tensors)
            if numel > 1000 and size > 2:
                assert not torch.equal(want, sum(tensors[1:], tensors[0]))
            for isa in (*_C.available_isas(), "") if DEVICE == "cpu" else ("",):
                _C.force_isa(isa)
                flat = comm.allocate(tensors[0].nbytes, str(tensors[0].device)).view(dtype)
                flat.copy_(tensors[dist.get_rank()])
                comm.all_reduce(flat, mean=False)
                assert torch.equal(flat, want), f"{dtype}, {numel} elements, {isa}"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_transports_sum_in_the_order_of_a_tree(pools: dict[int, RankPool], carrier: str) -> None:
    for size in (2, 4, 8):
        pools[size].run(check_order, carrier)


# ---- Scalers, and optimizers that clip in their step.


def train_scaled(options: dict[str, Any], group_size: int = 0) -> list[Any]:
    """Trains with a scaler and a norm. group_size: of the ranks that share states; 0: all of them do."""
    parts = PARTS // dist.get_world_size()
    model = make_model(torch.float32)
    torch.manual_seed(SEED)
    if group_size:
        starts = range(0, dist.get_world_size(), group_size)
        groups = [dist.new_group(list(range(start, start + group_size))) for start in starts]
        options = {**options, "shard_group": groups[dist.get_rank() // group_size]}
    wrapped = DDP(model, logical_ranks=PARTS, gradient_as_bucket_view=True, **options)
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.01, rounding="nearest")
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**16, growth_interval=1)
    norms = []
    with drivetrain.accumulate(wrapped, optimizer, 1, scaler=scaler, max_grad_norm=0.1) as window:
        for number in range(4):
            for logical_rank in range(dist.get_rank() * parts, (dist.get_rank() + 1) * parts):
                x, targets, _ = micro_batch(number, logical_rank, 0, torch.float32)
                x = x * math.inf if (number, logical_rank) == (1, 2) else x  # one part overflows
                with torch.autocast(DEVICE, torch.bfloat16, enabled=number == 3):
                    loss = F.cross_entropy(wrapped(x), targets)
                window.backward(loss, len(x))
            norm = torch.tensor([optimizer.grad_norm, scaler.get_scale()], dtype=torch.float64)
            norms.append(norm.nan_to_num())
    assert scaler.get_scale() == 2.0**18  # grows three times, and halves once
    values = values_of(model, optimizer)
    return [norms, values if dist.get_rank() == 0 else values[: len(list(model.parameters()))]]


def test_scaler_and_norm(pools: dict[int, RankPool]) -> None:
    results = [got for pool in pools.values() for got in pool.run(train_scaled, {})]
    for options in (SHARDED, IN_ROWS):
        results += [*pools[2].run(train_scaled, options), *pools[4].run(train_scaled, options, 2)]
    for got in results:
        assert_same_bits(got, results[0], "scaled")


class Shapes(nn.Module):
    """Has matrices whose rows are whole blocks of 256 elements, a filter whose channels come last, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 256)
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor, is_scaled: bool) -> Tensor:
        image = self.embed(tokens).tanh().view(-1, 4, 8, 8).contiguous(memory_format=torch.channels_last)
        x = self.head(self.conv(image).mean((2, 3)))
        return x * self.scale if is_scaled else x


def make_two_rules(model: Shapes) -> torch.optim.Optimizer:
    """The native step reads the parameters of a rule together, wherever they are."""
    middle = {"params": [*model.conv.parameters()], "amsgrad": True}
    groups = [{"params": [model.embed.weight]}, middle, {"params": [model.scale, *model.head.parameters()]}]
    return drivetrain.optim.AdamW(groups, lr=0.01, zero_grads_in_step=True)


ALL: dict[str, tuple[torch.dtype, Callable[[Shapes], torch.optim.Optimizer]]] = {
    "8 bits, kahan": (
        torch.bfloat16,
        lambda model: drivetrain.optim.AdamW(model.parameters(), state_bits=8, min_8bit_size=512, rounding="kahan"),
    ),
    "torch": (torch.float32, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)),
    "24 bits": (torch.bfloat16, lambda model: drivetrain.optim.AdamW(model.parameters(), master_bits=24)),
    "two rules": (torch.float32, make_two_rules),
    "LAMB": (torch.float32, lambda model: drivetrain.optim.LAMB(model.parameters())),
    "Adafactor": (torch.float32, lambda model: drivetrain.optim.Adafactor(model.parameters())),
    "Muon": (torch.float32, lambda model: drivetrain.optim.Muon(model.parameters(), fallback={"lr": 0.01})),
}


def train_all(name: str, options: dict[str, Any]) -> list[Any]:
    """Trains with one of the optimizers. Half of the parts leave a parameter out."""
    parts = PARTS // dist.get_world_size()
    dtype, make = ALL[name]
    torch.manual_seed(1)
    model = Shapes().to(DEVICE, dtype)
    wrapped = DDP(model, logical_ranks=PARTS, **options)
    optimizer = make(model)
    norms = []
    with drivetrain.accumulate(wrapped, optimizer, STEPS, max_grad_norm=0.01) as window:
        for number in range(3):
            for micro in range(dist.get_rank() * parts * STEPS, (dist.get_rank() + 1) * parts * STEPS):
                rng = torch.Generator().manual_seed(100 * number + micro)
                tokens, targets = torch.randint(16, (4,), generator=rng), torch.randint(5, (4,), generator=rng)
                output = wrapped(tokens.to(DEVICE), micro // STEPS % 2 > 0)
                window.backward(F.cross_entropy(output.float(), targets.to(DEVICE)), micro + 0.1)
            norms.append(torch.tensor(getattr(optimizer, "grad_norm", 0), dtype=torch.float64))
    return [norms, values_of(model, optimizer)]


@pytest.mark.parametrize("name", ALL)
def test_sharded_optimizers(pools: dict[int, RankPool], name: str) -> None:
    (want,) = pools[1].run(train_all, name, SHARDED)  # divides nothing
    for size, carrier in ((2, "shm"), (4, "shm"), (4, "torch")):
        for options in [SHARDED, IN_ROWS][size == 4 and carrier == "shm" :]:
            for rank, got in enumerate(pools[size].run(train_all, name, {"transport": carrier, **options})):
                assert_same_bits(got, want, f"{name}, rank {rank} of {size}, {carrier}, {options}")


@pytest.mark.parametrize("name", ["two rules", "Adafactor"])
def test_whole_gradients_are_summed_as_in_an_unsharded_step(name: str) -> None:
    model = Shapes()
    optimizer: Any = ALL[name][1](model)
    optimizer.max_grad_norm = math.inf
    model.conv.bias.grad = torch.ones(6)  # the first step has the second rule only
    optimizer.step()
    for seed in range(20):
        for index, param in enumerate(model.parameters()):
            values = spread(seed, param.numel(), param.dtype).view(param.shape) / param.numel() ** 0.5
            param.grad = torch.empty_like(values if seed % 2 and index else param).copy_(values)
        sums = sums_of_whole_squares(rule_of(type(optimizer)), optimizer.param_groups)
        lanes = F.pad(sums, (0, 32 - len(sums)))  # as csrc/formats/total.h adds a group of chunks
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        optimizer.step()
        assert optimizer.grad_norm == math.sqrt(lanes)


# ---- Data and checkpoints.


def of_logical_ranks(length: int, ranks: int, part: int, **options: Any) -> list[list[int]]:
    """Returns each logical rank's indices in the order of the windows."""
    found: list[list[int]] = [[] for _ in range(PARTS)]
    for rank in range(ranks):
        sampler = ResumableSampler(length, ranks, rank, logical_ranks=PARTS, part=part, **options)
        indices = list(sampler)
        assert len(indices) == sampler.num_samples
        for start in range(0, len(indices), part):
            found[rank * (PARTS // ranks) + start // part % (PARTS // ranks)] += indices[start : start + part]
    return found


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_of_logical_ranks(drop_last: bool) -> None:
    want = of_logical_ranks(101, PARTS, 3, drop_last=drop_last)
    assert [len(indices) for indices in want] == [12 if drop_last else 15] * PARTS
    drawn = [index for indices in want for index in indices]
    assert len(set(drawn)) == (96 if drop_last else 101)
    for ranks in (1, 2, 4):
        assert of_logical_ranks(101, ranks, 3, drop_last=drop_last) == want
    plain = [list(ResumableSampler(96, PARTS, rank, seed=3)) for rank in range(PARTS)]
    assert of_logical_ranks(96, 2, 3, seed=3) == plain


def test_a_position_between_windows_holds_on_any_number_of_ranks() -> None:
    begun = ResumableSampler(96, 8, 5, logical_ranks=PARTS, part=3)
    list(begun)
    resumed = ResumableSampler(96, 2, 1, logical_ranks=PARTS, part=3)
    resumed.load_state_dict(begun.state_dict(6))
    assert list(resumed) == list(ResumableSampler(96, 2, 1, logical_ranks=PARTS, part=3))[24:]
    assert "multiple of 12" in message_of(ValueError, lambda: resumed.state_dict(6))
    for options in ({"logical_ranks": 8}, {"part": 3}, {"logical_ranks": 3, "part": 1}):
        with pytest.raises(ValueError, match="logical_ranks"):
            ResumableSampler(96, 2, 1, **options)


DATASET = TensorDataset(torch.randn(80, 6, generator=torch.Generator().manual_seed(3)), torch.arange(80) % 5)


def train_with_checkpoints(directory: Path, until: int, options: dict[str, Any]) -> list[Tensor]:
    """Trains to that step, with the whole training state from the last call."""
    model = make_model(torch.float32)
    torch.manual_seed(SEED + dist.get_rank())
    wrapped = DDP(model, logical_ranks=PARTS, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler = ResumableSampler(DATASET, logical_ranks=PARTS, part=2 * STEPS)
    # Its own generator: an iteration that begins would draw from the first part's stream, which the noise comes from.
    loader = DataLoader(DATASET, batch_size=2, sampler=sampler, generator=torch.Generator())
    window = drivetrain.accumulate(wrapped, optimizer, STEPS, scheduler=scheduler)
    parts = {"model": wrapped, "optimizer": optimizer, "scheduler": scheduler, "data": loader, "window": window}
    warnings.filterwarnings("error", message=".*bits of parameters")
    with Checkpointer(directory, **parts, every=None, signals=()) as checkpointer, window:
        for epoch in range(checkpointer.epoch, 3):
            sampler.set_epoch(epoch)
            for x, targets in loader:
                noise = torch.randn(2, 6) * 0.1  # augmentation in the loop
                if window.backward(F.cross_entropy(wrapped(x + noise), targets), weight=len(x)):
                    checkpointer.step()
                    if checkpointer.steps == until:
                        checkpointer.save()
                        return values_of(model, optimizer)
    raise AssertionError("the epochs are over")


def test_checkpoints_continue_with_the_same_bits_on_other_numbers_of_ranks(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    (want, *_) = pools[4].run(train_with_checkpoints, tmp_path / "whole", 7, {})
    for options in ({}, SHARDED, IN_ROWS):
        for size, until in ((8, 2), (2, 4), (1, 5), (4, 6), (4, 7)):
            directory = tmp_path / f"moved-{options}"
            (got, *_) = pools[size].run(train_with_checkpoints, directory, until, options)
        assert_same_bits([got], [want], f"after all starts, {options}")


# ---- What is refused.


def refusals() -> None:
    model = Products(3)
    for count in (0, 3, 2048, 2.0):
        assert "a power of two" in message_of(ValueError, lambda count=count: DDP(model, logical_ranks=count))
    assert "multiple of the number of ranks, 2" in message_of(ValueError, lambda: DDP(model, logical_ranks=1))
    options: list[dict[str, Any]] = [
        {"wire_dtype": torch.bfloat16},
        {"check_gradients": "skip"},
        {"static_graph": True},
        {"init_sync": False},
    ]
    for option in options:
        message = message_of(NotImplementedError, lambda option=option: DDP(model, logical_ranks=2, **option))
        assert f"{next(iter(option))}" in message
    normed = nn.BatchNorm1d(3)
    assert "buffers" in message_of(NotImplementedError, lambda: DDP(normed, logical_ranks=2, broadcast_buffers=False))
    assert "sparse" in message_of(NotImplementedError, lambda: DDP(nn.Embedding(3, 2, sparse=True), logical_ranks=2))

    layer = nn.Linear(3, 2).bfloat16()
    sharded = DDP(layer, logical_ranks=2, **SHARDED)
    random_rows = drivetrain.optim.AdamW(layer.parameters(), rounding="stochastic")
    layer.bias.grad = torch.ones_like(layer.bias)
    assert "stochastic" in message_of(NotImplementedError, random_rows.step)
    del sharded

    wrapped = DDP(model, logical_ranks=4)
    x = torch.ones(3)
    assert "window.backward(loss)" in message_of(ValueError, lambda: wrapped(x).backward())
    assert "window.backward" in message_of(ValueError, lambda: wrapped.backward(wrapped(x), weight=1.0))
    with pytest.raises(NotImplementedError, match="communication hook"):
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.zero_grad()

    def stop_early() -> None:
        with drivetrain.accumulate(wrapped, optimizer, 2) as window:
            for _ in range(3):
                window.backward(wrapped(x))
            assert "3 of 4 micro-batches" in message_of(ValueError, window.state_dict)

    message = message_of(ValueError, stop_early)
    assert "3 of the 4 micro-batches" in message, message
    assert model.weights[0].eq(0).all()
    with drivetrain.accumulate(wrapped, optimizer, 2) as window:  # usable after an error
        assert [window.backward(wrapped(x * (1 + dist.get_rank()))) for _ in range(4)] == [False] * 3 + [True]
    assert model.weights[0].eq(-1.5).all()


def test_refusals(pools: dict[int, RankPool]) -> None:
    pools[2].run(refusals)
