"""Cases of data parallelism that run over gloo and over NCCL. Each function runs on every rank."""

from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_cases import (
    SMALL_BUCKETS,
    assert_equal_grads,
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


def flag_set_after_forward() -> None:
    """Sets the last micro-step's flag between its forward and its backward, as build-nanogpt does."""
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    for _ in range(2):
        batches = [inputs() for _ in range(3)]
        expected = mean_over_ranks(local_grads(model, *batches))
        for i, x in enumerate(batches):
            loss = model(x).pow(2).sum()
            model.require_backward_grad_sync = i == len(batches) - 1
            loss.backward()
        assert_means(model, expected)
        model.zero_grad()


def several_backwards_with_unused_parameters() -> None:
    model = DDP(make_net(), find_unused_parameters=True, **SMALL_BUCKETS)
    model.eval()  # batch norm would add noise
    for _ in range(3):
        x, y = inputs(), inputs()
        with model.no_sync():
            model.module(x, use_optional=False).pow(2).sum().backward()
            model.module(y).pow(2).sum().backward()
        expected = mean_over_ranks(grads_of(model))
        model.zero_grad()
        losses = [model(x, use_optional=False).pow(2).sum(), model(y).pow(2).sum()]
        for loss in losses:
            loss.backward()
        assert_means(model, expected)
        model.zero_grad()


def static_graph_and_no_sync() -> None:
    model = DDP(linear_chain(), static_graph=True, **SMALL_BUCKETS)
    for first_is_local in (True, False, True):
        batches = [inputs() for _ in range(2 + first_is_local)]
        expected = mean_over_ranks(local_grads(model, *batches))
        if first_is_local:
            with model.no_sync():
                model(batches[0]).pow(2).sum().backward()
        for x in batches[int(first_is_local) : -1]:
            with model.no_sync():
                model(x).pow(2).sum().backward()
        model(batches[-1]).pow(2).sum().backward()
        assert_means(model, expected)
        model.zero_grad()


def weighted_mean(hooked: bool) -> None:
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    if hooked:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    rank = dist.get_rank()
    counts = [[3, 11], [8, 1]][rank]  # tokens per micro-step
    for _ in range(2):
        everything = torch.randn(23, 10, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        with model.no_sync():
            model.module(everything).pow(2).mean(0).sum().backward()
        expected = grads_of(model)
        model.zero_grad()
        start = [0, 14][rank]
        for i, count in enumerate(counts):
            x = everything[start : start + count]
            start += count
            model.require_backward_grad_sync = i == 1
            model.backward(model(x).pow(2).mean(0).sum(), weight=count)
        assert_means(model, expected)
    assert "weight is -1" in message_of(ValueError, lambda: model.backward(model(inputs()).sum(), weight=-1))
    model.zero_grad()
    loss = model(inputs()).sum()
    assert "sum to 0 over all ranks" in message_of(ValueError, lambda: model.backward(loss, weight=0))
    model.zero_grad()
    x = inputs()
    expected = mean_over_ranks(local_grads(model, x))
    model.backward(model(x).pow(2).sum())
    assert_means(model, expected)
    # The gradients in .grad have no weight, and gradients with a weight take none without.
    assert "zero_grad" in message_of(ValueError, lambda: model.backward(model(x).sum(), weight=1))
    model.zero_grad()
    with model.no_sync():
        model.backward(model(x).sum(), weight=1000)
    model.zero_grad()  # forgets the weight with the gradients
    model.backward(model(x).pow(2).sum(), weight=3)
    assert_means(model, expected)
    model.zero_grad()
    with model.no_sync():
        model.backward(model(x).sum() * 0, weight=10)  # a gradient of zero counts, too
    model.backward(model(x).pow(2).sum(), weight=10)
    assert_means(model, [grad / 2 for grad in expected])
    model.zero_grad(set_to_none=False)
    with model.no_sync():
        model.backward(model(x).sum(), weight=2)
        loss = model(x).sum()
        assert "has no weight" in message_of(ValueError, loss.backward)


def diverged_replicas() -> list[str]:
    model = DDP(linear_chain(), check_replicas_every=3)
    step = lambda: model(inputs()).sum().backward()  # noqa: E731
    for _ in range(3):
        step()
    if dist.get_rank() == 1:
        model.module[2].bias.data[1] += 1e-6
    step()
    step()
    message = message_of(RuntimeError, step)
    with torch.no_grad():
        model.module[2].bias.zero_()
    for _ in range(3):
        step()
    return [message]


class Sparse(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=sparse)
        self.more = nn.Embedding(20, 4, sparse=sparse)
        self.out = nn.Linear(4, 2)

    def forward(self, index: Tensor, use_more: bool = True) -> Tensor:
        x = self.words(index)
        return self.out(x + self.more(index) if use_more else x)


def sparse_gradients() -> None:
    torch.manual_seed(dist.get_rank())
    model, dense = DDP(Sparse(), **SMALL_BUCKETS), Sparse(sparse=False)
    for _ in range(3):
        index = torch.randint(0, 20, (6,))
        # torch's class scales in place, and the two embeddings' gradients share their values: it is no reference.
        dense.load_state_dict(model.module.state_dict())
        dense.zero_grad()
        dense(index).pow(2).sum().backward()
        expected = mean_over_ranks(grads_of(dense))
        model.zero_grad()
        model(index).pow(2).sum().backward()
        for p, want in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad.to_dense(), want)
        assert model.module.words.weight.grad.layout == torch.sparse_coo
    # One rank uses the second embedding, then none does.
    model = DDP(Sparse(), find_unused_parameters=True)
    model(torch.tensor([1, 2]), use_more=dist.get_rank() == 0).sum().backward()
    assert model.module.more.weight.grad.to_dense()[1].sum() != 0
    model.zero_grad()
    model(torch.tensor([1, 2]), use_more=False).sum().backward()
    assert model.module.more.weight.grad is None


def uneven_sparse() -> None:
    model = DDP(Sparse())
    index = torch.tensor([1, 2])
    dense = Sparse(sparse=False)
    dense.load_state_dict(model.module.state_dict())
    dense(index).pow(2).sum().backward()
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + dist.get_rank()):
            model.zero_grad()
            model(index).pow(2).sum().backward()
            if dist.get_rank() == 1:
                torch.testing.assert_close(model.module.words.weight.grad.to_dense(), dense.words.weight.grad)


class Backwards(nn.Module):
    """Runs its layers in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x


def measured_order() -> None:
    torch.manual_seed(dist.get_rank())
    ours, theirs = pair(Backwards(), **SMALL_BUCKETS)
    first = [bucket.names for bucket in ours.reducer.buckets()]
    x = torch.randn(4, 9)
    for model in (ours, theirs):
        for _ in range(3):  # gradients accumulate over the change of plan
            model(x).pow(2).sum().backward()
    assert_equal_grads(ours, theirs)
    second = [bucket.names for bucket in ours.reducer.buckets()]
    assert first[0][0].startswith("layers.5")
    assert second[0][0].startswith("layers.0")
    assert sorted(chain(*first)) == sorted(chain(*second))
    assert ours._get_ddp_logging_data()["has_rebuilt_buckets"] == 1


def gradients_behind_another_tensor() -> None:
    """Replaces .grad by another tensor over the same memory before the buckets are planned again."""
    torch.manual_seed(dist.get_rank())
    model = DDP(Backwards(), **SMALL_BUCKETS)
    x = torch.randn(4, 9)
    expected = mean_over_ranks(local_grads(model, x, x))
    for _ in range(2):
        model(x).pow(2).sum().backward()
        for p in model.parameters():
            p.grad = p.grad.detach()
    assert_means(model, expected)
    assert "assign=True" in message_of(ValueError, lambda: model.load_state_dict(model.state_dict(), assign=True))
