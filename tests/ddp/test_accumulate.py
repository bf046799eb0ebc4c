"""Tests drivetrain.accumulate against one big batch: equal steps for any micro-batches, ranks and weights."""

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import drivetrain
from ddp_cases import SMALL_BUCKETS, OnRanks, TorchDDP, assert_equal_on_ranks, message_of
from drivetrain import _C
from drivetrain import DistributedDataParallel as DDP
from ranks import run_on

IGNORED = -100  # cross_entropy's mark for targets that do not count

# The tokens per micro-batch. Windows have three micro-batches, the last one has two, and one micro-batch has no tokens.
COUNTS = [5, 1, 8, 3, 3, 2, 7, 0, 4, 6, 1]
WINDOWS = [COUNTS[0:3], COUNTS[3:6], COUNTS[6:9], COUNTS[9:]]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns the same model on every device."""
    torch.manual_seed(1)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    return model.to(torch.get_default_device(), dtype)


def make_batches(counts: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Returns inputs [count + 2, 6] and targets [count + 2], of which two do not count, equal on every device."""
    device = torch.get_default_device()
    rng = torch.Generator("cpu").manual_seed(seed)
    batches = []
    for count in counts:
        targets = torch.randint(5, (count + 2,), generator=rng, device="cpu")
        targets[:2] = IGNORED
        batches.append((torch.randn(count + 2, 6, generator=rng, device="cpu").to(device), targets.to(device)))
    return batches


def mean_loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(x), targets, ignore_index=IGNORED)  # The mean is nan if no target counts.


def train_in_windows(
    model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]], steps: int, **options: Any
) -> list[bool]:
    stepped = []
    with drivetrain.accumulate(model, optimizer, steps, **options) as window:
        for x, targets in batches:
            stepped.append(window.backward(mean_loss(model, x, targets), weight=(targets != IGNORED).sum()))
    return stepped


def train_on_big_batches(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: list[list[tuple[Tensor, Tensor]]], clip: float | None
) -> None:
    """Makes the steps that `train_in_windows` must equal: one per window, on all its micro-batches as one batch."""
    for window in windows:
        x, targets = (torch.cat(parts) for parts in zip(*window, strict=True))
        optimizer.zero_grad()
        mean_loss(model, x, targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def in_windows(batches: list[Any], steps: int) -> list[list[Any]]:
    return [batches[i : i + steps] for i in range(0, len(batches), steps)]


def assert_same_parameters(got: nn.Module, want: nn.Module, **tolerance: float) -> None:
    for (name, param), expected in zip(got.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(param, expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# ---- One process.

SCALERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "torch": lambda: torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0),
    "ours": lambda: drivetrain.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch.SGD": lambda params: torch.optim.SGD(params, lr=0.3),
    "torch.AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: drivetrain.optim.SGD(params, lr=0.3),
    "SGD, zeros": lambda params: drivetrain.optim.SGD(params, lr=0.3, zero_grads_in_step=True),
    "AdamW": lambda params: drivetrain.optim.AdamW(params, lr=0.01),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_big_batches(name: str, scaler: str, clip: float | None) -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    batches = make_batches(COUNTS)
    plain = torch.optim.SGD(reference.parameters(), lr=0.3)
    if "AdamW" in name:
        plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train_on_big_batches(reference, plain, in_windows(batches, 3), clip)
    optimizer = OPTIMIZERS[name](model.parameters())
    stepped = train_in_windows(model, optimizer, batches, 3, scaler=SCALERS[scaler](), max_grad_norm=clip)
    assert stepped == [i % 3 == 2 for i in range(len(COUNTS))]
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
    assert all(param.grad is None or param.grad.count_nonzero() == 0 for param in model.parameters())
    assert getattr(optimizer, "max_grad_norm", None) is None
    assert not hasattr(optimizer, "grad_scale")


def test_bits_of_a_big_batch_where_arithmetic_is_exact() -> None:
    """Sums of small integers, and divisions by a power of two, do not round."""
    model, reference = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
    for linear in (model, reference):
        nn.init.zeros_(linear.weight)
    everything = torch.randint(-8, 9, (16, 4), generator=torch.Generator().manual_seed(2)).float()
    optimizer = drivetrain.optim.SGD(model.parameters(), lr=0.25)
    with drivetrain.accumulate(model, optimizer, steps=3) as window:
        for x in everything.split([8, 4, 4]):
            window.backward(model(x).mean(0).sum(), weight=len(x))
    reference(everything).mean(0).sum().backward()
    with torch.no_grad():
        reference.weight -= 0.25 * reference.weight.grad
    assert torch.equal(model.weight, reference.weight)


def test_under_bfloat16_autocast() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    batches = make_batches(COUNTS)
    with torch.autocast("cpu", torch.bfloat16):
        train_in_windows(model, drivetrain.optim.SGD(model.parameters(), lr=0.3), batches, 3)
        train_on_big_batches(reference, torch.optim.SGD(reference.parameters(), lr=0.3), in_windows(batches, 3), None)
    assert_same_parameters(model, reference, rtol=2**-6, atol=2**-8)


@pytest.mark.usefixtures("device")
def test_without_weights_micro_batches_count_alike() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    batches = make_batches([4, 4, 4, 4, 4])
    with drivetrain.accumulate(model, torch.optim.SGD(model.parameters(), lr=0.3), steps=2) as window:
        for x, targets in batches:
            window.backward(mean_loss(model, x, targets))
    train_on_big_batches(reference, torch.optim.SGD(reference.parameters(), lr=0.3), in_windows(batches, 2), None)
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("device")
def test_several_optimizers_and_a_scheduler() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model[0].parameters(), lr=0.3),
        drivetrain.optim.SGD(model[2].parameters(), lr=0.3),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    batches = make_batches([4, 1, 2, 4])
    train_in_windows(model, optimizers, batches, 4, scheduler=scheduler, max_grad_norm=0.1)
    train_on_big_batches(reference, torch.optim.SGD(reference.parameters(), lr=0.3), [batches], 0.1)
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-6)
    assert scheduler.get_last_lr() == pytest.approx([0.03])


def test_an_overflow_leaves_out_the_whole_window(device: str) -> None:
    model = make_model()
    before = copy.deepcopy(model)
    scaler = drivetrain.amp.GradScaler(device, init_scale=1024.0)
    optimizer = drivetrain.optim.SGD(model.parameters(), lr=0.3)
    x, targets = make_batches([4])[0]
    with drivetrain.accumulate(model, optimizer, steps=2, scaler=scaler) as window:
        window.backward(mean_loss(model, x * float("inf"), targets), weight=4)
        window.backward(mean_loss(model, x, targets), weight=4)
        assert_same_parameters(model, before, rtol=0, atol=0)
        assert scaler.get_scale() == 512.0
        for _ in range(2):
            window.backward(mean_loss(model, x, targets), weight=4)
    assert not torch.equal(model[0].weight, before[0].weight)
    assert torch.isfinite(model[0].weight).all()


# ---- Mistakes.


def test_an_exception_in_the_middle_steps_nothing() -> None:
    model = make_model()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches = make_batches([4, 4, 4])

    def interrupted() -> None:
        with drivetrain.accumulate(model, optimizer, steps=2) as window:
            window.backward(mean_loss(model, *batches[0]), weight=4)
            raise KeyError("of the script")

    with pytest.raises(KeyError, match="of the script"):
        interrupted()
    assert_same_parameters(model, before, rtol=0, atol=0)
    assert all(param.grad is None for param in model.parameters())
    optimizer.step()  # A step is allowed again, and has no gradients.
    assert_same_parameters(model, before, rtol=0, atol=0)

    def fail(_: Tensor) -> None:
        raise MemoryError("in backward")

    reference = copy.deepcopy(model)
    with drivetrain.accumulate(model, optimizer, steps=2) as window:
        window.backward(mean_loss(model, *batches[0]), weight=4)
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(MemoryError, match="in backward"):
            window.backward(mean_loss(model, *batches[0]), weight=4)
        handle.remove()
        assert window.micro_steps == 0
        assert_same_parameters(model, before, rtol=0, atol=0)
        assert not window.backward(mean_loss(model, *batches[1]), weight=4)
        assert window.backward(mean_loss(model, *batches[2]), weight=4)
    train_on_big_batches(reference, torch.optim.SGD(reference.parameters(), lr=0.3), [batches[1:]], None)
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-6)


def test_misuse_is_told() -> None:
    model = make_model()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, targets = make_batches([4])[0]
    loss = lambda: mean_loss(model, x, targets)  # noqa: E731
    with pytest.raises(ValueError, match="steps is 0, expected a number of micro-batches"):
        drivetrain.accumulate(model, optimizer, steps=0)
    with pytest.raises(ValueError, match="max_grad_norm is -1"):
        drivetrain.accumulate(model, optimizer, steps=1, max_grad_norm=-1)
    with pytest.raises(TypeError, match=r"optimizer\[0\] is a Parameter, expected a torch.optim.Optimizer"):
        drivetrain.accumulate(model, list(model.parameters()), steps=1)
    window = drivetrain.accumulate(model, optimizer, steps=2)
    with pytest.raises(RuntimeError, match="outside of its block"):
        window.backward(loss())
    with window:
        for weight in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"weight is {float(weight)}, expected a finite number >= 0"):
                window.backward(loss(), weight=weight)
    with pytest.raises(RuntimeError, match="was used before"), window:
        pass
    with pytest.raises(RuntimeError, match="outside of its block"):
        window.backward(loss())
    loss().backward()
    with pytest.raises(RuntimeError, match=r"gradients that are not its own: call optimizer.zero_grad\(\)"):
        drivetrain.accumulate(model, optimizer, steps=2).__enter__()
    optimizer.zero_grad()
    meddlers: list[Callable[[], Any]] = [
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: loss().backward(),
    ]
    for meddle in meddlers:
        with drivetrain.accumulate(model, optimizer, steps=3) as window:
            window.backward(loss())
            meddle()
            with pytest.raises(RuntimeError, match="gradients were zeroed or written inside"):
                window.backward(loss())
            window._drop()
    with drivetrain.accumulate(model, optimizer, steps=3) as window:
        window.backward(loss())
        with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called inside of drivetrain.accumulate\(\)"):
            optimizer.step()
        window._drop()
    assert_same_parameters(model, before, rtol=0, atol=0)
    with drivetrain.accumulate(model, optimizer, steps=2) as window:
        window.backward(loss() * float("nan"), weight=0)
        with pytest.raises(ValueError, match=r"sum to 0.0, expected a sum above 0"):
            window.backward(loss(), weight=0)
        assert window.micro_steps == 0
    assert_same_parameters(model, before, rtol=0, atol=0)


class FullyShardedDataParallel(nn.Module):
    """Has the name of torch's wrapper, which accumulate refuses."""


def other_wrappers() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    message = message_of(NotImplementedError, lambda: drivetrain.accumulate(TorchDDP(model), optimizer, 2))
    assert "torch's own class" in message
    two = nn.ModuleList([DDP(make_model()), DDP(make_model())])
    assert "2 Distrib" in message_of(NotImplementedError, lambda: drivetrain.accumulate(two, optimizer, 2))


def test_other_wrappers_are_refused(on_ranks: OnRanks) -> None:
    on_ranks(other_wrappers)
    model = FullyShardedDataParallel()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.3)
    with pytest.raises(NotImplementedError, match="FSDP"):
        drivetrain.accumulate(model, optimizer, 2)


# ---- Ranks.

# The tokens per micro-batch of each rank. Ranks may also differ in the number of windows.
RANK_COUNTS = {
    "even": [[4, 4, 4, 4], [4, 4, 4, 4]],
    "uneven tokens": [[5, 1, 8, 3], [1, 7, 0, 2]],
    "shorter last window": [[5, 1, 8], [1, 7, 2]],
    "one rank ends in a window": [[5, 1, 8, 3], [1, 7, 2]],
    "one rank ends windows before": [[5, 1, 8, 3, 2, 2, 6], [1, 7]],
    "one rank ends windows before, in one": [[5], [1, 7, 2, 4, 4]],
    "one rank has none": [[5, 1, 8], []],
}


def expected_on_ranks(counts: list[list[int]], steps: int) -> nn.Module:
    """Returns the model of one process that steps on each window's micro-batches of all ranks."""
    reference = make_model()
    per_rank = [in_windows(make_batches(c, seed=rank), steps) for rank, c in enumerate(counts)]
    num_windows = max(len(windows) for windows in per_rank)
    joint = [[batch for windows in per_rank if i < len(windows) for batch in windows[i]] for i in range(num_windows)]
    train_on_big_batches(reference, torch.optim.SGD(reference.parameters(), lr=0.3), joint, None)
    return reference


def windows_on_ranks(counts: list[list[int]], options: dict[str, Any], scaler_class: Any) -> None:
    reference = expected_on_ranks(counts, 2)
    model = DDP(make_model(), **SMALL_BUCKETS, **options)
    make = torch.optim.SGD if scaler_class is None else drivetrain.optim.SGD
    scaler = None if scaler_class is None else scaler_class("cpu", init_scale=64.0)
    optimizer = make(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    mine = make_batches(counts[dist.get_rank()], seed=dist.get_rank())
    train_in_windows(model, optimizer, mine, 2, scaler=scaler, scheduler=scheduler)
    num_windows = max((len(c) + 1) // 2 for c in counts)
    assert scheduler.last_epoch == num_windows
    assert model.reducer.progress().snapshot().step == num_windows + 1  # one reduction each
    assert_same_parameters(model.module, reference, rtol=1e-4, atol=1e-5)
    assert_equal_on_ranks(list(model.parameters()))
    assert model.require_backward_grad_sync


@pytest.mark.parametrize(
    "options", [{}, {"transport": "torch"}, {"find_unused_parameters": True}, {"static_graph": True}]
)
@pytest.mark.parametrize("counts", RANK_COUNTS)
def test_the_token_mean_over_ranks(on_ranks: OnRanks, counts: str, options: dict[str, Any]) -> None:
    scaler_class = drivetrain.amp.GradScaler if counts in ("even", "uneven tokens") else None
    on_ranks(windows_on_ranks, RANK_COUNTS[counts], options, scaler_class)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, drivetrain.amp.GradScaler])
@pytest.mark.parametrize("counts", ["one rank ends windows before, in one", "one rank has none"])
def test_a_rank_without_micro_batches_has_a_scaler(on_ranks: OnRanks, counts: str, scaler_class: type) -> None:
    on_ranks(windows_on_ranks, RANK_COUNTS[counts], {}, scaler_class)


@pytest.mark.parametrize("shard", [None, "optimizer"])
@run_on(2)
def test_means_through_shared_memory_have_the_bits_of_divided_sums(shard: str | None) -> None:
    """Shared memory divides while it adds. torch's transport leaves a sum, which the reducer divides."""
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        found = []
        for transport in ("shm", "torch"):
            torch.manual_seed(2)
            body = nn.ParameterList([torch.randn(size).to(dtype) for size in (1, 3, 70_001)])
            body.add_module("own", nn.Linear(1, 1))  # gives a bucket of its own the usual type
            options = SMALL_BUCKETS | ({} if shard is None else {"shard": shard})
            model = DDP(Summed(body), transport=transport, **options)
            optimizer = (torch if shard is None else drivetrain).optim.SGD(model.parameters(), lr=0.3)
            with drivetrain.accumulate(model, optimizer, steps=2) as window:
                for step in range(6):
                    x = torch.randn(5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
                    window.backward(model(x), weight=0.7 * step * (rank + (step > 1)))
            found.append([param.detach().clone() for param in model.parameters()])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), dtype


@pytest.mark.parametrize("transport", ["shm", "torch"])
@run_on(2)
def test_a_rank_of_weight_0_reduces_what_others_use(transport: str) -> None:
    """Its buckets have no used parameters, which skip_all_reduce_unused_params leaves out of other steps."""
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "transport": transport}
    model = DDP(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), **SMALL_BUCKETS, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with drivetrain.accumulate(model, optimizer, steps=1) as window:
        for _ in range(2 - dist.get_rank()):  # in its second window the other rank has no micro-batch
            window.backward(model(torch.ones(4, 3)).sum(), weight=4.0)
    assert_equal_on_ranks(list(model.parameters()))


class Summed(nn.Module):
    def __init__(self, body: nn.ParameterList) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        of_body = sum((param * x.sum() * (1 + i)).abs().square().mean() for i, param in enumerate(self.body))
        return of_body + self.body.own(torch.ones(1)).sum()  # type: ignore[no-any-return]


class Normed(nn.Module):
    """Has buffers, which rank 0's forwards set for all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


@pytest.mark.parametrize("counts", [[[5, 1, 8, 3, 2, 2, 6], [1, 7]], [[5, 3], [1, 7, 2, 4, 4]]])
@run_on(2)
def test_buffers_under_uneven_numbers(counts: list[list[int]]) -> None:
    model = DDP(Normed(), **SMALL_BUCKETS)
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.01)
    rank = dist.get_rank()
    for epoch in range(2):
        train_in_windows(model, optimizer, make_batches(counts[rank], seed=rank + epoch), 2)
    assert_equal_on_ranks(list(model.parameters()))
    model(torch.ones(3, 6))
    assert_equal_on_ranks(list(model.buffers())[:1])


@run_on(2)
def test_no_tokens_on_any_rank() -> None:
    model = DDP(make_model(), **SMALL_BUCKETS)
    before = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, targets = make_batches([4], seed=dist.get_rank())[0]
    with drivetrain.accumulate(model, optimizer, steps=2) as window:
        window.backward(mean_loss(model, x, targets), weight=0)
        loss = mean_loss(model, x, targets)
        assert "sum to 0 over all ranks" in message_of(ValueError, lambda: window.backward(loss, weight=0))
        assert_same_parameters(model.module, before, rtol=0, atol=0)
        for _ in range(2):
            window.backward(mean_loss(model, x, targets), weight=4)
    assert_equal_on_ranks(list(model.parameters()))
    assert torch.isfinite(model.module[0].weight).all()
    assert not torch.equal(model.module[0].weight, before[0].weight)


@run_on(2)
def test_no_sync_beside_it() -> None:
    """no_sync() works as ever inside and after accumulate."""
    reference = expected_on_ranks([[4, 4], [4, 4]], 2)
    model = DDP(make_model(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches = make_batches([4, 4], seed=dist.get_rank())
    with drivetrain.accumulate(model, optimizer, steps=2) as window:
        with model.no_sync():
            window.backward(mean_loss(model, *batches[0]), weight=4)
        with model.no_sync():
            window.backward(mean_loss(model, *batches[1]), weight=4)
    assert_same_parameters(model.module, reference, rtol=1e-4, atol=1e-6)
    with model.no_sync():
        (mean_loss(model, *batches[0]) / 2).backward()
    (mean_loss(model, *batches[1]) / 2).backward()
    assert_equal_on_ranks([param.grad for param in model.parameters()])


@run_on(2)
def test_parameters_that_only_some_step() -> None:
    """The optimizer has half the model's parameters, one of which the wrapper does not reduce."""
    net = make_model()
    reference = copy.deepcopy(net)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    model = DDP(net, **SMALL_BUCKETS)
    optimizer = torch.optim.SGD([net[0].weight, net[2].weight], lr=0.3)
    mine = make_batches([3, 5, 2, 7], seed=dist.get_rank())
    train_in_windows(model, optimizer, mine, 2)
    assert_equal_on_ranks([net[0].weight])
    assert all(param.grad is None for param in net.parameters())
    assert torch.equal(net[0].bias, reference[0].bias)
    # The parameter that is not reduced gets this rank's own mean.
    with torch.no_grad():
        before = net[2].weight.clone()
        reference.load_state_dict(net.state_dict())
    x, targets = (torch.cat(parts) for parts in zip(*mine[:2], strict=True))
    mean_loss(reference, x, targets).backward()
    train_in_windows(model, optimizer, mine[:2], 2)
    torch.testing.assert_close(net[2].weight, before - 0.3 * reference[2].weight.grad)


@run_on(2)
def test_parameters_that_are_not_reduced() -> None:
    """A rank that joins the others' window without data has no mean for a parameter that is not reduced."""
    net = make_model()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    model = DDP(net, **SMALL_BUCKETS)
    optimizer = drivetrain.optim.SGD([net[0].weight, net[2].weight], lr=0.3, zero_grads_in_step=True)
    train_in_windows(model, optimizer, make_batches([3, 5, 2, 7][: 2 + 2 * dist.get_rank()]), 2)
    assert_equal_on_ranks([net[0].weight])
    assert torch.isfinite(net[2].weight).all()


@run_on(2)
def test_plain_backward_after_weights() -> None:
    """A window that an exception ended, and weighted gradients that were zeroed, do not affect the next backward."""
    model = DDP(make_model(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, targets = make_batches([4], seed=dist.get_rank())[0]

    def interrupted() -> None:
        with drivetrain.accumulate(model, optimizer, steps=2) as window:
            window.backward(mean_loss(model, x, targets), weight=4)
            raise KeyError

    mean_loss(model, x, targets).backward()
    expected = [param.grad.clone() for param in model.parameters()]
    optimizer.zero_grad()
    zeros = (lambda: message_of(KeyError, interrupted), model.zero_grad, lambda: model.zero_grad(set_to_none=False))
    for zero in zeros:
        if zero is not zeros[0]:
            with model.no_sync():
                model.backward(mean_loss(model, x, targets), weight=3)
        zero()
        mean_loss(model, x, targets).backward()
        for param, want in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, want)
        model.zero_grad()


@run_on(2)
def test_a_backward_that_fails_on_one_rank() -> None:
    """Other ranks' windows continue. This rank's window restarts without the gradients of its first half."""
    rank = dist.get_rank()
    batches = [make_batches([4, 4, 4], seed=rank) for rank in range(2)]
    reference = make_model()
    train_on_big_batches(reference, torch.optim.SGD(reference.parameters(), lr=0.3), [batches[0] + batches[1]], None)
    model = DDP(make_model(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def fail(_: Tensor) -> None:
        raise MemoryError("in backward")

    with drivetrain.accumulate(model, optimizer, steps=3) as window:
        if rank == 1:
            window.backward(mean_loss(model, *make_batches([7])[0]), weight=7)
            handle = model.module[0].weight.register_hook(fail)
            loss = mean_loss(model, *make_batches([7])[0])
            assert "in backward" in message_of(MemoryError, lambda: window.backward(loss, weight=7))
            handle.remove()
        for x, targets in batches[rank]:
            window.backward(mean_loss(model, x, targets), weight=4)
    assert_same_parameters(model.module, reference, rtol=1e-4, atol=1e-6)
    assert_equal_on_ranks(list(model.parameters()))


def test_the_step_of_a_window_is_that_of_ranks_together(on_ranks: OnRanks) -> None:
    on_ranks(windows_on_ranks, [[4, 2, 1], [3, 3, 3]], {"check_replicas_every": 1}, drivetrain.amp.GradScaler)


def test_a_leftover_scheduler_step_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with drivetrain.accumulate(model, optimizer, 1, scheduler=scheduler) as window:
        window.backward(model(torch.ones(3)).sum())
        scheduler.step()
        loss = model(torch.ones(3)).sum()
        with pytest.raises(RuntimeError, match=r"take scheduler\.step\(\) out of the loop"):
            window.backward(loss)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # The framework warns about its own calls.
@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="accelerate is not installed")
def test_accelerates_optimizer_and_scheduler() -> None:
    import accelerate

    weights = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = drivetrain.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if wraps:
            accelerator = accelerate.Accelerator(cpu=True)
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        with drivetrain.accumulate(model, optimizer, 2, scheduler=scheduler, max_grad_norm=0.5) as window:
            for i in range(4):
                window.backward(model(torch.full((3,), 1.0 + i)).sum(), weight=1 + i)
        assert scheduler.get_last_lr() == pytest.approx([0.001])
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # The framework warns about its own calls.
@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed")
def test_fabrics_optimizer() -> None:
    import lightning

    weights = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.1)
        if wraps:
            model, optimizer = lightning.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
        with drivetrain.accumulate(model, optimizer, 2, max_grad_norm=0.5) as window:
            for i in range(4):
                window.backward(model(torch.full((3,), 1.0 + i)).sum(), weight=1 + i)
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


def test_a_wrapped_optimizer_with_a_scaler_needs_it_passed() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.scaler = torch.amp.GradScaler("cpu")  # Accelerate's wrapper has this attribute.
    with pytest.raises(ValueError, match=r"pass scaler=accelerator\.scaler"):
        drivetrain.accumulate(model, optimizer, 2)


def test_a_factor_of_a_device_gives_a_scalar_the_bits_of_its_bucket() -> None:
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        bucket, factor = torch.rand(3, generator=rng), torch.rand(1, generator=rng, dtype=torch.float64)
        scalar = bucket[0].clone()
        _C.scale_by(bucket, factor)
        _C.scale_by(scalar, factor)
        assert torch.equal(scalar, bucket[0])
