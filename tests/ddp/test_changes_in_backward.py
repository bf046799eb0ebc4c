"""Compares parameters that change during backward under torch's class and ours: only what parts replicas raises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_cases import OnRanks, TorchDDP, message_of
from drivetrain import DistributedDataParallel as DDP

# ---- Forwards that write parameters, and run again inside backward.


class Normalized(nn.Linear):
    """Forces the rows of its weight to norm 1, as magnitude-preserving layers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight))
        return super().forward(x)


class Spectral(nn.Linear):
    """Divides its weight by an estimate of its largest singular value."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.register_buffer("u", torch.ones(columns))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.weight.t() @ self.u, dim=0)
            self.u.copy_(F.normalize(self.weight @ v, dim=0))
            self.weight.div_(self.u @ self.weight @ v)
        return super().forward(x)


class Codebook(nn.Linear):
    """Moves its rows towards this rank's inputs, so that replicas part under torch's class as well."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.lerp_(x.mean(0, keepdim=True).expand_as(self.weight), 0.1)
        return super().forward(x)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.clamp_(-0.05, 0.05)
            self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, layer: type[nn.Linear], reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), layer(6, 6), nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.reentrant is None:
            return self.last(self.middle(x))
        return self.last(checkpoint(self.middle, x, use_reentrant=self.reentrant))


# ---- Hooks that change parameters by the same rule on every rank.


@torch.no_grad()
def shrink(param: Tensor) -> None:
    param.mul_(0.9)


def before_the_gradient(model: nn.Module) -> None:
    for param in model.parameters():
        param.register_hook(lambda grad, param=param: shrink(param))


def after_the_gradient(model: nn.Module) -> None:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(shrink)


def clips_weights(model: nn.Module) -> None:
    def clip(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        with torch.no_grad():
            for param in module.parameters():
                param.clamp_(-0.1, 0.1)

    for module in model.children():
        module.register_full_backward_hook(clip)


def trained(wrap: Callable[..., nn.Module], prepare: Callable[[nn.Module], None], net: nn.Module) -> list[Tensor]:
    model = wrap(net, bucket_cap_mb=1e-4)
    prepare(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    results = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).pow(2).sum().backward()
        optimizer.step()
        results += [tensor.detach().clone() for param in model.parameters() for tensor in (param, param.grad)]
    return results


def compare(transport: str, prepare: Callable[[nn.Module], None], layer: type[nn.Linear], **options: Any) -> None:
    results = []
    for wrap in (TorchDDP, lambda net, **given: DDP(net, transport=transport, **given)):
        torch.manual_seed(0)
        results.append(trained(wrap, prepare, Net(layer, **options)))
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs, ours), (transport, prepare, layer, options)


def checkpointed_forwards() -> None:
    for i, layer in enumerate((Normalized, Spectral, Codebook, Clamped)):
        for reentrant in (False, True):
            compare(("shm", "torch")[(i + reentrant) % 2], lambda net: None, layer, reentrant=reentrant)


def changing_hooks() -> None:
    for prepare in (before_the_gradient, after_the_gradient, clips_weights):
        for transport in ("shm", "torch"):
            compare(transport, prepare, nn.Linear, reentrant=None)


@pytest.mark.parametrize("function", [checkpointed_forwards, changing_hooks])
def test_changes_that_torch_trains_with(on_ranks: OnRanks, function: Callable[[], None]) -> None:
    on_ranks(function)


# ---- Hooks that part the replicas.


@torch.no_grad()
def by_own_gradient(param: Tensor) -> None:
    param.add_(param.grad, alpha=-0.1)


@torch.no_grad()
def on_one_rank(param: Tensor) -> None:
    if dist.get_rank() == 0:
        param.mul_(0.5)


def parting(consume: Callable[[Tensor], None], transport: str) -> str:
    model = DDP(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), transport=transport)
    model.module[1].weight.register_post_accumulate_grad_hook(consume)
    torch.manual_seed(dist.get_rank())
    with model.no_sync():  # where nothing is reduced hooks may do what they like
        model(torch.randn(5, 6)).sum().backward()
    model.zero_grad()
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    loss = model(torch.randn(5, 6)).pow(2).sum()
    return message_of(RuntimeError, loss.backward)


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("consume", [by_own_gradient, on_one_rank])
def test_changes_that_part_replicas_raise_on_every_rank(
    on_ranks: OnRanks, consume: Callable[[Tensor], None], transport: str
) -> None:
    messages = on_ranks(parting, consume, transport)
    assert all("a hook changed during backward" in message for message in messages), messages
    assert any("parameter '1.weight' was changed during backward" in message for message in messages), messages
