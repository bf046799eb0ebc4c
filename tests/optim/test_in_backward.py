"""Tests steps inside backward against the same steps after it: bits, memory, micro-batches, ranks and errors."""

import copy
import functools
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import drivetrain
from ddp_cases import SMALL_BUCKETS, Fails, OnRanks, Tied, TorchDDP, assert_equal_on_ranks
from drivetrain import DistributedDataParallel as DDP
from drivetrain import optim
from ranks import run_on

CAPS = [1e-6, 0.002, 25.0]  # in MiB: each parameter alone, some together, all together
Make = Callable[[Any], optim.base.FusedOptimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": functools.partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "AdamW": functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW of 8 bits": functools.partial(optim.AdamW, lr=0.01, state_bits=8, min_8bit_size=1),
    "AdamW of 4 bits": functools.partial(optim.AdamW, lr=0.01, state_bits=4, master_bits=24),
    "Lion": functools.partial(optim.Lion, lr=0.01),
    "LAMB": functools.partial(optim.LAMB, lr=0.01),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.01),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 37), nn.Tanh(), nn.Linear(37, 21), nn.Tanh(), nn.Linear(21, 3))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, param), expected in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(param, expected[1]), name


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, others = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == others["param_groups"]
    assert mine["state"].keys() == others["state"].keys()
    for index, state in others["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                assert torch.equal(mine["state"][index][name], value), (index, name)
            else:
                assert mine["state"][index][name] == value


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits(name: str, cap: float) -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    in_backward, after = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    in_backward.step_in_backward(ours, bucket_cap_mb=cap)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (in_backward, after)]
    for _ in range(5):
        x = torch.randn(4, 10)
        for model, optimizer, scheduler in zip((ours, theirs), (in_backward, after), schedulers, strict=True):
            loss_of(model, x).backward()
            if model is ours:
                assert all(param.grad is None for param in ours.parameters())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert_same(ours, theirs)
    assert_same_state(in_backward, after)


@pytest.mark.parametrize("cap", CAPS)
def test_stochastic_rounding_draws_by_the_place_in_the_group(cap: float) -> None:
    theirs = net().bfloat16()
    ours = copy.deepcopy(theirs)
    in_backward, after = (optim.SGD(each.parameters(), lr=0.1, rounding="stochastic") for each in (ours, theirs))
    in_backward.step_in_backward(ours, bucket_cap_mb=cap)
    for _ in range(3):
        x = torch.randn(4, 10).bfloat16()
        for model, optimizer in ((ours, in_backward), (theirs, after)):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(ours, theirs)


def test_groups_storages_and_other_parameters() -> None:
    """One group has bfloat16 parameters with master bits, the other one a parameter that the model does not have."""
    theirs = net()
    theirs[2].bfloat16()
    ours = copy.deepcopy(theirs)

    class Casting(nn.Module):
        def __init__(self, inner: nn.Sequential, extra: nn.Parameter) -> None:
            super().__init__()
            self.inner, self.extras = inner, [extra]  # in a list: no parameter of this module

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner[2](self.inner[:2](x).bfloat16()).float()
            return self.inner[4](self.inner[3](hidden)) * self.extras[0]

    def make(model: nn.Sequential) -> tuple[Casting, optim.AdamW]:
        extra = nn.Parameter(torch.ones(()))
        named = [(n, p) for n, p in model.named_parameters() if not n.startswith("2.")]
        groups = [
            {"params": [*named, ("extra", extra)], "lr": 0.02},
            {"params": list(model[2].named_parameters(prefix="2")), "master_bits": 24, "state_bits": 8},
        ]
        return Casting(model, extra), optim.AdamW(groups, lr=0.01, min_8bit_size=1)

    (our_model, in_backward), (their_model, after) = make(ours), make(theirs)
    in_backward.step_in_backward(our_model, bucket_cap_mb=0.002)
    for _ in range(4):
        x = torch.randn(4, 10)
        for model, optimizer in ((our_model, in_backward), (their_model, after)):
            loss_of(model, x).backward()
            assert (model.extras[0].grad is None) is False
            optimizer.step()
            optimizer.zero_grad()
        assert_same(ours, theirs)
        assert torch.equal(our_model.extras[0], their_model.extras[0])
    assert_same_state(in_backward, after)


def test_one_bucket_of_gradients_at_a_time() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(10)])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step_in_backward(model, bucket_cap_mb=2 * 4096 / 2**20)
    seen: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        there = sum(param.grad is not None for param in model.parameters())
        stepped = sum(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        seen.append((there, stepped))

    for layer in model:
        layer.register_full_backward_pre_hook(look)
    loss_of(model, torch.randn(4, 32).requires_grad_()).backward()
    assert [there for there, _ in seen] == [0, 1] * 5
    assert [stepped for _, stepped in seen] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize("cap", CAPS)
def test_micro_batches(cap: float) -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    in_backward, after = optim.AdamW(ours.parameters(), lr=0.01), optim.AdamW(theirs.parameters(), lr=0.01)
    steps = in_backward.step_in_backward(ours, bucket_cap_mb=cap)
    for _ in range(3):
        batches = torch.randn(3, 4, 10)
        with steps.no_step():
            for x in batches[:-1]:
                loss_of(ours, x).backward()
        loss_of(ours, batches[-1]).backward()
        for x in batches:
            loss_of(theirs, x).backward()
        after.step()
        after.zero_grad()
        assert_same(ours, theirs)
    # step() steps gradients that were only accumulated.
    for model in (ours, theirs):
        with steps.no_step():
            loss_of(model, batches[0]).backward()
    in_backward.step()
    after.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_windows(bits: int) -> None:
    """Covers token means, a shorter last window, weights of 0, main gradients and fused layers."""
    theirs = net()
    if bits < 32:
        theirs = theirs.bfloat16()
    ours = copy.deepcopy(theirs)
    optimizers = []
    for model in (ours, theirs):
        if bits == 24:
            drivetrain.main_grads(model, 24)
            drivetrain.fuse_wgrad(model)
        optimizers.append(optim.AdamW(model.parameters(), lr=0.01))
    optimizers[0].step_in_backward(ours, bucket_cap_mb=0.002)
    batches, weights = torch.randn(11, 4, 10), [3, 1, 2, 5, 5, 0, 0, 4, 0, 2, 7]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        with drivetrain.accumulate(model, optimizer, steps=3) as window:
            for x, weight in zip(batches, weights, strict=True):
                window.backward(loss_of(model, x.to(model[0].weight.dtype)), weight=weight)
                if model is ours and window.micro_steps == 0 and bits != 24:
                    assert all(param.grad is None for param in model.parameters())
    assert_same(ours, theirs)
    assert_same_state(*optimizers)


def test_clipping_by_the_norm_before() -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    in_backward, after = optim.SGD(ours.parameters(), lr=0.5), optim.SGD(theirs.parameters(), lr=0.5)
    steps = in_backward.step_in_backward(ours, clip_by_previous_norm=0.1, bucket_cap_mb=0.002)
    assert steps.grad_norm is None
    previous = 0.0
    for k in range(6):
        x = torch.randn(4, 10) * (1e6 if k == 3 else 1.0)
        loss_of(ours, x).backward()
        loss_of(theirs, x).backward()
        norm = torch.nn.utils.get_total_norm([param.grad for param in theirs.parameters()]).item()
        assert steps.grad_norm == pytest.approx(norm, rel=1e-5)
        after.grad_scale = max(1.0, (previous + 1e-6) / 0.1)
        after.step()
        after.zero_grad()
        previous = norm
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-5, atol=1e-6)


def test_a_norm_that_is_not_finite_clips_nothing() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    steps = optimizer.step_in_backward(model, clip_by_previous_norm=1.0)
    for value, norm in ((2.0, 2.0), (float("inf"), 2.0), (3.0, 3.0)):
        (model.weight[0, 0] * value).backward()
        assert steps.grad_norm == norm


@pytest.mark.parametrize("is_fused", [False, True])
def test_shared_weights_checkpointing_and_autocast(is_fused: bool) -> None:
    class Checkpointed(Tied):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.middle, self.embed(x), use_reentrant=False).relu()
            return self.head(checkpoint(self.middle, hidden, use_reentrant=False))

    theirs = Checkpointed()
    ours = copy.deepcopy(theirs)
    if is_fused:
        for model in (ours, theirs):
            drivetrain.fuse_wgrad(model)
    in_backward, after = optim.AdamW(ours.parameters(), lr=0.01), optim.AdamW(theirs.parameters(), lr=0.01)
    in_backward.step_in_backward(ours, bucket_cap_mb=1e-6)
    for _ in range(4):
        x = torch.randint(11, (6,))
        for model in (ours, theirs):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, x)
            loss.backward()
        after.step()
        after.zero_grad()
        assert_same(ours, theirs)


def test_another_use_of_a_stepped_weight_is_an_error() -> None:
    """Backward raises instead of using values that differ from the forward's."""
    model = nn.Linear(5, 5, bias=False)
    optim.SGD(model.parameters(), lr=0.1).step_in_backward(model, bucket_cap_mb=1e-6)
    x = torch.randn(2, 5).requires_grad_()
    y = (x @ model.weight.detach().t()).tanh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(y).sum().backward()


def test_backward_that_raises() -> None:
    model = net()
    reference = copy.deepcopy(model)
    optimizer, after = optim.SGD(model.parameters(), lr=0.1), optim.SGD(reference.parameters(), lr=0.1)
    optimizer.step_in_backward(model)
    x = torch.randn(4, 10)
    with pytest.raises(ValueError, match="late"):
        model[2:](Fails.apply(model[:2](x))).sum().backward()
    assert_same(model, reference)  # The bucket was not full, so that no step was made.
    optimizer.zero_grad()
    for each in (model, reference):
        loss_of(each, x).backward()
    after.step()
    assert_same(model, reference)


def test_a_norm_does_not_count_a_backward_that_raised() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    steps = optimizer.step_in_backward(model, clip_by_previous_norm=1.0, bucket_cap_mb=1e-6)
    late = torch.ones((), requires_grad=True)
    late.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ((model.weight[0, 0] * 100) + late * 1).backward()
    (model.weight[0, 0] * 3).backward()
    assert steps.grad_norm in (3.0, pytest.approx(3.0))


def test_errors_name_the_parameter() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step_in_backward(model, bucket_cap_mb=1e-6)
    loss_of(model, torch.randn(4, 10)).backward()
    optimizer.state[model[2].weight]["momentum_buffer"] = torch.zeros(2)
    with pytest.raises((TypeError, ValueError), match=r"parameter '2\.weight'"):
        loss_of(model, torch.randn(4, 10)).backward()


def test_parameters_that_left_the_optimizer_are_left_alone() -> None:
    model = net()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.step_in_backward(model)
    del optimizer.param_groups[0]["params"][0]
    loss_of(model, torch.randn(4, 10)).backward()
    changed = [not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)]
    assert changed == [False, True, True, True, True, True]
    optimizer.param_groups[0]["params"].clear()
    loss_of(model, torch.randn(4, 10)).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_everything_is_freed() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    steps = weakref.ref(optimizer.step_in_backward(model))
    loss_of(model, torch.randn(4, 10)).backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    reference = torch.load(file, weights_only=False)
    optim.SGD(reference.parameters(), lr=0.1).step_in_backward(reference)
    # The parameters alone keep the steps alive.
    before = model[0].weight.detach().clone()
    del optimizer
    gc.collect()
    loss_of(model, torch.randn(4, 10)).backward()
    assert not torch.equal(model[0].weight, before)
    param = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert steps() is None
    assert param() is None


def test_removed() -> None:
    model = net()
    reference = copy.deepcopy(model)
    optimizer, after = optim.SGD(model.parameters(), lr=0.1), optim.SGD(reference.parameters(), lr=0.1)
    optimizer.step_in_backward(model).remove()
    optimizer.step_in_backward(model).remove()
    x = torch.randn(4, 10)
    for each in (model, reference):
        loss_of(each, x).backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    after.step()
    assert_same(model, reference)
    assert copy.deepcopy(optimizer).in_backward is None
    old = optimizer.step_in_backward(model)
    old.remove()
    new = optimizer.step_in_backward(model)
    old.remove()
    assert optimizer.in_backward is new


def test_refusals() -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), max_grad_norm=1.0)
    with pytest.raises(NotImplementedError, match=r"max_grad_norm is 1.0, but the norm of all gradients"):
        optimizer.step_in_backward(model)
    optimizer.max_grad_norm = None
    with pytest.raises(ValueError, match="clip_by_previous_norm is -1, expected a number above 0"):
        optimizer.step_in_backward(model, clip_by_previous_norm=-1)
    with pytest.raises(ValueError, match="bucket_cap_mb is 0, expected a number above 0"):
        optimizer.step_in_backward(model, bucket_cap_mb=0)
    with pytest.raises(ValueError, match="the model, a Linear, has no parameter of this AdamW"):
        optimizer.step_in_backward(nn.Linear(2, 2))
    assert optimizer.in_backward is None
    optimizer.step_in_backward(model)
    with pytest.raises(RuntimeError, match="called before"):
        optimizer.step_in_backward(model)
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' is stepped in backward by another optimizer"):
        optim.SGD(model.parameters(), lr=0.1).step_in_backward(model)
    with pytest.raises(TypeError, match=r"model is a NoneType, expected a torch\.nn\.Module"):
        optim.SGD(model.parameters(), lr=0.1).step_in_backward(None)
    with pytest.raises(ValueError, match="that requires a gradient"):
        optim.SGD(model.parameters(), lr=0.1).step_in_backward(copy.deepcopy(model).requires_grad_(False))
    with pytest.raises(NotImplementedError, match="max_grad_norm is 2, but the norm"):
        optimizer.max_grad_norm = 2
    with pytest.raises(NotImplementedError, match="cannot be combined with a scaler, max_grad_norm"):
        drivetrain.accumulate(model, optimizer, 2, max_grad_norm=1.0)
    loss_of(model, torch.randn(4, 10)).backward()
    with pytest.raises(NotImplementedError, match=r"clip_grad_norm_\(\) finds no gradient: the norm"):
        drivetrain.clip_grad_norm_(model.parameters(), 1.0)
    for scaler in (torch.amp.GradScaler("cpu"), drivetrain.amp.GradScaler("cpu")):
        scaler.scale(loss_of(model, torch.randn(4, 10))).backward()
        with pytest.raises((RuntimeError, AssertionError), match=r"GradScaler cannot be used|No inf checks"):
            scaler.step(optimizer)


# ---- Ranks.


class Branching(nn.Module):
    """Uses one of two branches in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(10, 37), nn.Linear(37, 3), nn.Linear(37, 3)
        self.goes_left = True

    def forward(self, x: Tensor) -> Tensor:
        return (self.left if self.goes_left else self.right)(self.first(x).tanh())


def on_ranks_as_after(options: dict[str, Any], branches: bool) -> None:
    torch.manual_seed(1)
    models = [DDP(Branching() if branches else net(), **options) for _ in range(2)]
    models[0].load_state_dict(models[1].state_dict())
    optimizers = []
    for model in models:
        params = list(model.parameters())
        optimizers.append([optim.AdamW(params[:2], lr=0.01), optim.SGD(params[2:], lr=0.1, momentum=0.9)])
    handles = [optimizer.step_in_backward(models[0]) for optimizer in optimizers[0]]
    torch.manual_seed(dist.get_rank())
    for step in range(7):
        batches = torch.randn(2, 4, 10)
        for model, pair in zip(models, optimizers, strict=True):
            if branches:
                model.module.goes_left = (step + dist.get_rank()) % 3 > 0
            if "static_graph" not in options:
                with model.no_sync():
                    loss_of(model, batches[0]).backward()
            loss_of(model, batches[1]).backward()
            if model is models[0]:
                assert all(param.grad is None for param in model.parameters())
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(*models)
        assert_equal_on_ranks([param.detach() for param in models[0].parameters()])
    for mine, others in zip(*optimizers, strict=True):
        assert_same_state(mine, others)
    # no_step() does the same as no_sync(). Gradients stay after it and after remove().
    with handles[0].no_step():
        loss_of(models[0], batches[0]).backward()
    assert any(param.grad is not None for param in models[0].parameters())
    # Only a forward pass inside of it keeps a backward pass from reducing.
    loss = loss_of(models[0], batches[0])
    with handles[0].no_step(), pytest.raises(RuntimeError, match=r"ran inside of no_step\(\), but its forward"):
        loss.backward()
    for handle in handles:
        handle.remove()
    loss_of(models[0], batches[0]).backward()
    assert any(param.grad is not None for param in models[0].parameters())


@pytest.mark.parametrize("transport", ["auto", "torch"])
@pytest.mark.parametrize(
    ("options", "branches"),
    [
        ({}, False),
        (SMALL_BUCKETS, False),
        ({**SMALL_BUCKETS, "find_unused_parameters": True}, True),
        ({**SMALL_BUCKETS, "static_graph": True}, False),
    ],
)
def test_ranks(on_ranks: OnRanks, options: dict[str, Any], branches: bool, transport: str) -> None:
    on_ranks(on_ranks_as_after, {**options, "transport": transport}, branches)


def deep() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(128, 128, bias=k % 2 == 0) for k in range(24)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", ["auto", "torch"])
@run_on(2)
def test_buckets_share_memory(transport: str, dtype: torch.dtype) -> None:
    """Two optimizers share a model, and one of them steps after backward. remove() restores the gradient buffer."""
    torch.manual_seed(1)
    models = [DDP(deep().to(dtype), bucket_cap_mb=0.1, transport=transport) for _ in range(2)]
    models[0].load_state_dict(models[1].state_dict())
    before = models[0].reducer.buffer_bytes()
    optimizers = []
    for model in models:
        params = list(model.parameters())
        optimizers.append([optim.AdamW(params[3:], lr=0.01), optim.SGD(params[:3], lr=0.1, momentum=0.9)])
    loss_of(models[0], torch.randn(4, 128).to(dtype)).backward()
    kept = [param.grad.clone() for param in models[0].parameters()]
    steps = optimizers[0][0].step_in_backward(models[0])
    assert models[0].reducer.buffer_bytes() < before / (1 if dtype == torch.bfloat16 else 1.5)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(models[0].parameters(), kept, strict=True))
    models[0].zero_grad()
    torch.manual_seed(dist.get_rank())
    for _ in range(7):
        batches = torch.randn(3, 4, 128).to(dtype)
        for model, pair in zip(models, optimizers, strict=True):
            with model.no_sync():
                for x in batches[:2]:
                    loss_of(model, x).backward()
            loss_of(model, batches[2]).backward()
            if model is models[0]:
                assert [param.grad is None for param in model.parameters()] == [False] * 3 + [True] * 33
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(*models)
    for mine, others in zip(*optimizers, strict=True):
        assert_same_state(mine, others)
    with steps.no_step():
        loss_of(models[0], batches[0]).backward()
    kept = [param.grad.clone() for param in models[0].parameters()]
    steps.remove()
    assert models[0].reducer.buffer_bytes() == before
    assert all(torch.equal(param.grad, grad) for param, grad in zip(models[0].parameters(), kept, strict=True))
    loss_of(models[0], batches[0]).backward()
    with models[1].no_sync():
        loss_of(models[1], batches[0]).backward()
    loss_of(models[1], batches[0]).backward()
    for param, expected in zip(*[model.parameters() for model in models], strict=True):
        assert torch.equal(param.grad, expected.grad)


def replicas_that_are_compared() -> str:
    torch.manual_seed(1)
    model = DDP(deep(), bucket_cap_mb=0.1, check_replicas_every=2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.step_in_backward(model)
    for _ in range(4):
        loss_of(model, torch.randn(4, 128)).backward()
    with torch.no_grad():
        model.module[5].weight.add_(dist.get_rank())
    loss_of(model, torch.randn(4, 128)).backward()
    with pytest.raises(RuntimeError) as caught:
        loss_of(model, torch.randn(4, 128)).backward()
    return str(caught.value)


def test_replicas_are_compared_as_they_were_before_steps(on_ranks: OnRanks) -> None:
    assert all("'5.weight'" in message for message in on_ranks(replicas_that_are_compared))


def test_sparse_gradients_are_refused() -> None:
    words = nn.Embedding(10, 4, sparse=True)
    optim.SGD(words.parameters(), lr=0.1).step_in_backward(words, clip_by_previous_norm=1.0)
    with pytest.raises(RuntimeError, match=r"weight.*sparse"):
        words(torch.tensor([1, 3])).sum().backward()


def mapped_bytes() -> int:
    """Returns the bytes of shared memory that this process maps, its own and other ranks'."""
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:drivetrain" in line:
            begin, end = line.split()[0].split("-")
            mapped += int(end, 16) - int(begin, 16)
    return mapped


@run_on(2)
def test_shared_memory_is_given_back() -> None:
    """Counts the mapped bytes that the kernel reports."""
    DDP(nn.Linear(2, 2), report_hang_after=0)  # makes the group's board of tags, which stays
    gc.collect()
    without = mapped_bytes()
    model = DDP(deep(), bucket_cap_mb=0.1, transport="shm")
    buffer = model.reducer.buffer_bytes()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    mapped = []
    for _ in range(3):
        mapped.append(mapped_bytes() - without)
        steps = optimizer.step_in_backward(model)
        loss_of(model, torch.randn(4, 128)).backward()
        saved = dist.get_world_size() * (buffer - model.reducer.buffer_bytes())
        assert mapped_bytes() - without <= mapped[-1] - saved + 2**13
        steps.remove()
        loss_of(model, torch.randn(4, 128)).backward()
        model.zero_grad()
    assert max(mapped) == min(mapped)
    del model, optimizer, steps
    gc.collect()
    assert mapped_bytes() == without


@run_on(2)
def test_mixed_precision_leaves_no_buffer_behind() -> None:
    DDP(nn.Linear(2, 2), report_hang_after=0)  # makes the group's board of tags, which stays
    gc.collect()
    without = mapped_bytes()
    model = DDP(deep(), transport="shm")
    before, buffer = mapped_bytes() - without, model.reducer.buffer_bytes()
    # torch's wrapper calls this for mixed_precision. The rest of that argument needs streams of an accelerator.
    model.reducer._set_mixed_precision_param_dtype(torch.bfloat16)
    assert model.reducer.buffer_bytes() <= buffer // 2 + 2**12
    saved = dist.get_world_size() * (buffer - model.reducer.buffer_bytes())
    assert mapped_bytes() - without <= before - saved + 2**13
    del model
    gc.collect()
    assert mapped_bytes() == without


@run_on(2)
def test_main_gradients_keep_the_buffer() -> None:
    torch.manual_seed(1)
    net = deep().bfloat16()
    drivetrain.main_grads(net)
    drivetrain.fuse_wgrad(net)
    model = DDP(net, bucket_cap_mb=0.1)
    before = model.reducer.buffer_bytes()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    optimizer.step_in_backward(model)
    assert model.reducer.buffer_bytes() == before
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        with model.no_sync():
            loss_of(model, torch.randn(4, 128).bfloat16()).backward()
        loss_of(model, torch.randn(4, 128).bfloat16()).backward()
        assert all(param.grad is None for param in model.parameters())
    assert_equal_on_ranks([param.detach() for param in net.parameters()])


@run_on(2)
def test_refusals_on_ranks() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match=r"step_in_backward\(\) needs a model in one drivetrain"):
        optimizer.step_in_backward(TorchDDP(model))
    wrapped = DDP(model)
    optimizer.step_in_backward(wrapped)
    with pytest.raises(NotImplementedError, match=r"DistributedDataParallel after optimizer\.step_in_backward"):
        drivetrain.accumulate(wrapped, optimizer, 2)
    with pytest.raises(NotImplementedError, match="optimizers that run inside backward"):
        wrapped.backward(loss_of(wrapped, torch.randn(4, 10)), weight=2)
    with pytest.raises(NotImplementedError, match="has no backward to step in"), wrapped.join():
        pass
    with pytest.raises(RuntimeError, match=r"before optimizer\.step_in_backward"):
        wrapped._set_static_graph()


@run_on(2)
def test_wrappers_that_are_not_given() -> None:
    """These cases must raise, because the ranks' parameters would diverge."""
    x = torch.randn(4, 10)
    for wrapper in (DDP, TorchDDP):
        model = net()
        outer = wrapper(model)
        with pytest.raises(RuntimeError, match=r"give step_in_backward\(\) the wrapper"):
            optim.SGD(model.parameters(), lr=0.1).step_in_backward(model)
        del outer
        gc.collect()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        optimizer.step_in_backward(model)
        before = [param.detach().clone() for param in model.parameters()]
        outer = wrapper(model)
        with pytest.raises(RuntimeError, match=r"parameter '4\..*' of an optimizer that steps in backward is another"):
            loss_of(outer, x).backward()
        assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
        optimizer.in_backward.remove()
        dist.barrier()
    shared = nn.Linear(10, 10)
    first, second = DDP(nn.Sequential(shared, nn.Tanh())), DDP(nn.Sequential(shared, nn.ReLU()))
    with pytest.raises(RuntimeError, match="wrap the model first, into one"):
        optim.SGD(shared.parameters(), lr=0.1).step_in_backward(first)
    del second


def step_that_raises() -> str:
    """A failed step raises at the end of backward, on its rank alone, so that the other rank gets all reductions."""
    torch.manual_seed(1)
    model = DDP(net(), **SMALL_BUCKETS)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.step_in_backward(model)
    loss_of(model, torch.randn(4, 10)).backward()
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises(TypeError, match=r"param_groups.0.: lr is 'fast', expected a number"):
            loss_of(model, torch.randn(4, 10)).backward()
        optimizer.param_groups[0]["lr"] = 0.1
    else:
        loss_of(model, torch.randn(4, 10)).backward()
    dist.barrier()
    optimizer.zero_grad()
    loss_of(model, torch.randn(4, 10)).backward()
    return "done"


def test_step_that_raises(on_ranks: OnRanks) -> None:
    assert on_ranks(step_that_raises) == ["done", "done"]
