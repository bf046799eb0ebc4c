"""Checks DistributedDataParallel beyond torch's own tests: replicas that never diverge silently, hooks, weights."""

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import ddp_contract_cases as contract
from ddp_cases import (
    SMALL_BUCKETS,
    OnRanks,
    TorchDDP,
    assert_equal_grads,
    assert_equal_on_ranks,
    assert_means,
    grads_of,
    inputs,
    linear_chain,
    local_grads,
    make_net,
    mean_over_ranks,
    message_of,
    pair,
)
from drivetrain import DistributedDataParallel as DDP
from ranks import run_on

# ---- Which backward is reduced.


def forward_alone_under_no_sync() -> None:
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    x, y = inputs(), inputs()
    expected = mean_over_ranks(local_grads(model, x, y))
    with model.no_sync():
        loss = model(x).pow(2).sum()
    loss.backward()
    assert_equal_on_ranks(grads_of(model))
    model(y).pow(2).sum().backward()
    assert_means(model, expected)


def several_backwards() -> None:
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    x, y = inputs(), inputs()
    expected = mean_over_ranks(local_grads(model, x, y))
    losses = [model(x).pow(2).sum(), model(y).pow(2).sum()]
    for loss in losses:
        loss.backward()
    assert_means(model, expected)
    # One graph gets two backwards.
    model.zero_grad()
    expected = mean_over_ranks(local_grads(model, x, x))
    loss = model(x).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_means(model, expected)


def inner_module() -> None:
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    x = inputs()
    expected = local_grads(model, x)
    model.module(x).pow(2).sum().backward()
    for got, want in zip(grads_of(model), expected, strict=True):
        torch.testing.assert_close(got, want)
    model.module[2](torch.ones(4, 7)).sum().backward()
    # After a forward of the wrapper the next backward counts as its own, as with torch.
    model.zero_grad()
    model(x)
    model.module[2](torch.ones(4, 7)).sum().backward()
    message = message_of(RuntimeError, lambda: model(x))
    assert "0.weight, 0.bias" in message
    assert "not its .module" in message


def consumed_gradients() -> None:
    x = inputs() + dist.get_rank()  # a step by equal gradients would not part the replicas
    for consume in (lambda p: setattr(p, "grad", None), lambda p: torch.optim.SGD([p], lr=0.1).step()):
        model = DDP(linear_chain())
        model.module[2].weight.register_post_accumulate_grad_hook(consume)
        with model.no_sync():  # where nothing is reduced hooks may do what they like
            model(x).sum().backward()
        loss = model(x).sum()
        message = message_of(RuntimeError, loss.backward)
        assert "parameter '2.weight'" in message
        assert "before its gradient was reduced over ranks" in message


def unfrozen_parameter() -> None:
    net = linear_chain()
    net[2].weight.requires_grad_(False)
    net[0].bias.requires_grad_(False)
    net._ddp_params_and_buffers_to_ignore = ["0.bias"]  # whose own business it stays
    model = DDP(net)
    model(inputs()).sum().backward()
    net[0].bias.requires_grad_(True)
    model(inputs()).sum().backward()
    net[2].weight.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match=r"'2.weight' required no gradient when .* Wrap the module again"):
        model(inputs()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs()).sum().backward()  # warns once


def weight_on_some_ranks() -> None:
    """Checks that ranks notice through shared memory that they reduce different tensors."""
    model = DDP(linear_chain(), transport="shm", **SMALL_BUCKETS)
    loss = model(inputs()).mean()
    weight = 3 if dist.get_rank() == 0 else None
    message = message_of(RuntimeError, lambda: model.backward(loss, weight))
    assert "the all-reduce of bucket 0 of" in message
    assert "the ranks start different collectives: " in message
    assert "bucket 0 of weighted gradients in synchronized step " in message


@pytest.mark.parametrize(
    "function",
    [
        contract.flag_set_after_forward,
        forward_alone_under_no_sync,
        several_backwards,
        contract.several_backwards_with_unused_parameters,
        inner_module,
        consumed_gradients,
        unfrozen_parameter,
        weight_on_some_ranks,
        contract.static_graph_and_no_sync,
    ],
)
def test_replicas_never_part_in_silence(on_ranks: OnRanks, function: Callable[[], None]) -> None:
    on_ranks(function)


# ---- Distributed autograd, which keeps gradients in a context instead of .grad.


@run_on(2)
def test_distributed_autograd(tmp_path: Path) -> None:
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    model = DDP(make_net(), find_unused_parameters=True, **SMALL_BUCKETS)
    model.eval()

    def backward(use_optional: bool) -> list[Tensor]:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(x, use_optional=use_optional).pow(2).sum()])
            grads = dist_autograd.get_gradients(context)
        return [grads[p].clone() for p in model.parameters() if p in grads]

    for use_optional in (True, False, True):
        x = inputs()
        model.module(x, use_optional=use_optional).pow(2).sum().backward()
        expected = mean_over_ranks(grads_of(model.module))
        model.module.zero_grad()
        for got, want in zip(backward(use_optional), expected, strict=True):
            torch.testing.assert_close(got, want)
        assert all(p.grad is None for p in model.parameters())
        if use_optional and rank == 1:  # there the context has no entry that could take the others' gradients
            message = message_of(RuntimeError, lambda: backward(use_optional=False))
            assert "got a gradient on other ranks and none on this one" in message
        elif use_optional:
            backward(use_optional=True)
    rpc.shutdown()


# ---- Profiles.


@run_on(2)
def test_profile_shows_reductions() -> None:
    """Checks that a profile shows the buckets even if no process group carries them."""
    model = DDP(linear_chain(), transport="shm", **SMALL_BUCKETS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        model(inputs()).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["drivetrain::all_reduce"] == len(model.reducer.buckets())
    assert counts["drivetrain::wait_for_all_reduces"] == 1


# ---- Checks and weights.


def test_replicas_that_part_are_named_on_every_rank(on_ranks: OnRanks) -> None:
    for (message,) in on_ranks(contract.diverged_replicas):
        assert "replicas have diverged: parameter '2.bias' is not the same on all ranks" in message
        assert "ranks {" in message
        assert "synchronized step 6" in message


@pytest.mark.parametrize("hooked", [False, True])
def test_the_exact_mean_over_tokens(on_ranks: OnRanks, hooked: bool) -> None:
    on_ranks(contract.weighted_mean, hooked)


# ---- Communication hooks.


@run_on(2)
def test_communication_hooks_that_fail() -> None:
    def raises(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise KeyError("mine")

    def wrong_size(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer()[:-1].clone())
        return future

    for hook, error, words in (
        (raises, Exception, "mine"),
        (wrong_size, RuntimeError, "the communication hook returned a tensor over"),
    ):
        model = DDP(linear_chain())
        model.register_comm_hook(None, hook)
        again = functools.partial(model.register_comm_hook, None, raises)
        assert "only be called once" in message_of(RuntimeError, again)
        assert model._get_ddp_logging_data()["comm_hook"] == hook.__qualname__
        loss = model(inputs()).sum()
        assert words in message_of(error, loss.backward)
    assert "must be callable" in message_of(TypeError, lambda: DDP(linear_chain()).register_comm_hook(None, 3))


# ---- Kinds of parameters and of backward.


def double_backward() -> None:
    """Has no reference: torch's class fails on this model, as it writes in place to a gradient that is a leaf."""
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    x = inputs()
    expected = mean_over_ranks(local_grads(model, x))
    model(x).pow(2).sum().backward(create_graph=True)
    assert_means(model, expected)
    assert all(p.grad.requires_grad for p in model.parameters())


def recomputed() -> None:
    """Uses both kinds of activation checkpointing, the reentrant one twice over one parameter with a static graph."""

    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool, times: int) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(10, 10), nn.Linear(10, 2)
            self.reentrant, self.times = reentrant, times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = checkpoint(self.lin, x, use_reentrant=self.reentrant)
            return self.out(x)

    for reentrant, times, options in (
        (False, 2, {}),
        (False, 1, {"find_unused_parameters": True}),
        (True, 1, {}),
        (True, 2, {"static_graph": True}),
    ):
        torch.manual_seed(0)
        ours, theirs = pair(Checkpointed(reentrant, times), **options, **SMALL_BUCKETS)
        for _ in range(3):
            x = inputs().requires_grad_()
            for model in (ours, theirs):
                model.zero_grad()
                model(x).pow(2).sum().backward()
            assert_equal_grads(ours, theirs)


def rebuilding_as_hooks_see_it() -> None:
    """Lets hooks that step a ZeroRedundancyOptimizer partition it by the rebuilt buckets."""
    for model in pair(contract.Backwards(), **SMALL_BUCKETS):
        seen: list[tuple[bool, int]] = []

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            model, seen = state
            seen.append((model._has_rebuilt_buckets, len(bucket.parameters())))
            return default_hooks.allreduce_hook(None, bucket)

        model.register_comm_hook((model, seen), hook)
        steps = []
        for _ in range(3):
            seen.clear()
            model(torch.randn(4, 9)).sum().backward()
            steps.append(list(seen))
        assert [{flag for flag, _ in step} for step in steps] == [{False}, {True}, {True}]
        assert steps[1] == steps[2]


def uneven_static_graph() -> None:
    """Gives a rank no input at all while the others learn the graph, where torch's class dies."""
    model = DDP(make_net(), static_graph=True, **SMALL_BUCKETS)
    model.eval()
    rank = dist.get_rank()
    for counts in ((0, 3), (3, 3)):
        batches = [inputs() for _ in range(max(counts))]
        expected = []
        for step, x in enumerate(batches):
            loss = model.module(x, use_optional=False).pow(2).sum() * (step < counts[rank])
            own = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            expected.append(mean_over_ranks([torch.zeros(()) if g is None else g for g in own]))
        with model.join():
            for step in range(counts[rank]):
                model.zero_grad()
                model(batches[step], use_optional=False).pow(2).sum().backward()
                for (name, p), want in zip(model.module.named_parameters(), expected[step], strict=True):
                    if name.startswith("optional"):
                        assert p.grad is None, name
                    else:
                        torch.testing.assert_close(p.grad, want)


def held_gradients() -> None:
    """Keeps tensors of .grad with gradient_as_bucket_view=True: they show the next gradients, too."""
    torch.manual_seed(dist.get_rank())
    model = DDP(contract.Backwards(), transport="shm", gradient_as_bucket_view=True)
    held = None
    for _ in range(7):
        x = torch.randn(4, 9)
        expected = mean_over_ranks(local_grads(model, x))
        model(x).pow(2).sum().backward()
        held = held or [p.grad for p in model.parameters() if dist.get_rank() == 0]
        for mine, p in zip(held, model.parameters(), strict=False):
            assert mine.data_ptr() == p.grad.data_ptr()
        assert_means(model, expected)
        model.zero_grad(set_to_none=False)
    assert "on rank 0 the script keeps references to .grad tensors" in model.bucket_plan().why_not


def delayed_parameters(hooked: str, *delayed: str) -> None:
    """Reduces some or all parameters past the reducer, once the gradient of one has come."""
    net = linear_chain()
    net[2].bias.requires_grad_(False)  # torch's constructor wants one parameter besides the delayed ones
    named = dict(net.named_parameters())
    options = {"delay_all_reduce_named_params": [(n, named[n]) for n in delayed]}
    model = DDP(net, **SMALL_BUCKETS, **options, param_to_hook_all_reduce=named[hooked])
    assert_equal_on_ranks([p.detach() for p in net.parameters()])
    trained = [p for p in net.parameters() if p.requires_grad]
    for _ in range(6):  # through both changes of plan
        batches = [inputs() for _ in range(3)]
        alone = copy.deepcopy(net).requires_grad_(True)
        alone[2].bias.requires_grad_(False)
        alone.zero_grad()
        for x in batches:
            alone(x).pow(2).sum().backward()
        expected = mean_over_ranks(grads_of(alone))
        with model.no_sync():
            for x in batches[1:]:
                model(x).pow(2).sum().backward()
        model(batches[0]).pow(2).sum().backward()
        assert_means(model, expected)
        with torch.no_grad():
            for p in trained:
                p -= 1e-3 * p.grad
        model.zero_grad()
    assert_equal_on_ranks([p.detach() for p in net.parameters()])
    if model._has_reducer():
        reduced = [name for bucket in model.reducer.buckets() for name in bucket.names]
        assert sorted([*reduced, *delayed]) == sorted(n for n, p in named.items() if p.requires_grad)


LAST_LAYER = ("4.weight", "4.bias")
TRAINED = ("0.weight", "0.bias", "2.weight", *LAST_LAYER)


@pytest.mark.parametrize(
    ("hooked", "delayed"), [("0.weight", LAST_LAYER), ("4.bias", LAST_LAYER), ("0.weight", TRAINED)]
)
def test_delayed_parameters(on_ranks: OnRanks, hooked: str, delayed: tuple[str, ...]) -> None:
    on_ranks(delayed_parameters, hooked, *delayed)


def sharded_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    ours, theirs = pair(linear_chain())
    optimizers = [
        ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, lr=0.1, overlap_with_ddp=False)
        for m in (ours, theirs)
    ]
    for _ in range(3):
        x = inputs()
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def compiled() -> None:
    for wrap in (
        lambda m, cls: torch.compile(cls(m), backend="aot_eager"),
        lambda m, cls: cls(torch.compile(m, backend="aot_eager")),
    ):
        torch.manual_seed(0)
        nets = [linear_chain(), linear_chain()]
        ours, theirs = wrap(nets[0], DDP), wrap(nets[1], TorchDDP)
        for _ in range(3):
            x = inputs()
            for model in (ours, theirs):
                model.zero_grad()
                model(x).pow(2).sum().backward()
            assert_equal_grads(nets[0], nets[1])
            assert_equal_on_ranks(grads_of(nets[0]))


@pytest.mark.parametrize(
    "function",
    [
        contract.sparse_gradients,
        double_backward,
        recomputed,
        contract.measured_order,
        contract.gradients_behind_another_tensor,
        rebuilding_as_hooks_see_it,
        held_gradients,
        contract.uneven_sparse,
        uneven_static_graph,
        sharded_optimizer,
        compiled,
    ],
)
def test_as_torchs_class(on_ranks: OnRanks, function: Callable[[], None]) -> None:
    on_ranks(function)
