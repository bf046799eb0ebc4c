"""Models, batches and comparisons that tests of data parallelism share."""

import copy
import os
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from drivetrain import DistributedDataParallel as DDP
from ports import free_port
from warm_python import warm_python

OnRanks = Callable[..., list[Any]]
SMALL_BUCKETS = {"bucket_cap_mb": 0.001}  # gives several buckets to small models


# ---- Models.


class Net(nn.Module):
    """Has a buffer, a layer that not every forward uses, and weights of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 37)
        self.norm = nn.BatchNorm1d(37)
        self.second = nn.Linear(37, 37, bias=False)
        self.optional = nn.Linear(37, 37)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(37, 3)

    def forward(self, x: Tensor, use_optional: bool = True) -> Tensor:
        x = self.second(self.norm(self.first(x)).relu()) * self.scale
        if use_optional:
            x = self.optional(x)
        return self.last(x)


def make_net() -> Net:
    torch.manual_seed(dist.get_rank())
    return Net()


def linear_chain() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


class Products(nn.Module):
    """Has its inputs as gradients, so that every bit is the result of the reduction."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(n) for n in sizes])

    def forward(self, *factors: Tensor) -> Tensor:
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, factors, strict=True)]).sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)))


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("late")


def inputs(count: int = 8) -> Tensor:
    return torch.randn(count, 10)


# ---- Comparisons with torch's class.


def pair(model: nn.Module, **options: Any) -> tuple[DDP, TorchDDP]:
    """Wraps equal models, which differ over ranks, in our class and in torch's."""
    reference = copy.deepcopy(model)
    return DDP(model, **options), TorchDDP(reference, **options)


def assert_equal_grads(ours: nn.Module, theirs: nn.Module) -> None:
    """Compares up to the noise of matrix products, whose bits depend on the addresses of their operands."""
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            assert a.grad.stride() == b.grad.stride(), name


def step_alike(ours: nn.Module, theirs: nn.Module, steps: int) -> None:
    """Gives both the same batches and compares their gradients."""
    for _ in range(steps):
        x = inputs()
        for model in (ours, theirs):
            model.zero_grad()
            model(x).pow(2).sum().backward()
        assert_equal_grads(ours, theirs)


# ---- Comparisons over ranks.


def normed_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trained_grads(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Trains on each rank's own batches of 10 features, and returns copies of the gradients."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 10, generator=generator)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal_on_ranks(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        assert all(torch.equal(gathered[0], other) for other in gathered)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mean_over_ranks(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensors


def local_grads(model: DDP, *batches: Tensor) -> list[Tensor]:
    """Returns this rank's own gradients of the summed losses, not reduced, and leaves the model as it was."""
    with model.no_sync():
        for x in batches:
            model.module(x).pow(2).sum().backward()
    grads = grads_of(model)
    model.zero_grad()
    return grads


def assert_means(model: DDP, expected: list[Tensor]) -> None:
    for got, want in zip(grads_of(model), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert_equal_on_ranks(grads_of(model))


# ---- Errors.


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# ---- Ranks that die.


def started(*program: str, prefix: tuple[str, ...] = ()) -> Callable[..., subprocess.Popen[str]]:
    """Returns a function that starts a script by the program, behind the prefix as rank 1."""

    def start(path: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
        command = [*(prefix if environment["RANK"] == "1" else ()), *program, str(path)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)

    return start


@contextmanager
def script_ranks(
    folder: Path, script: str, ranks: int, start: Callable[..., Any] | None = None, **environment: str
) -> Iterator[list[Any]]:
    """Starts a script as ranks, each by `start(path, environment)` or warm, and kills them at the end."""
    start = start or started(warm_python(has_whole_end=True))
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
    with ExitStack() as stack:
        processes = [stack.enter_context(start(path, {**world, "RANK": str(rank)})) for rank in range(ranks)]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()


def errors_of_survivors(folder: Path, script: str, ranks: int = 4) -> list[str]:
    """Runs a script on ranks of which the last kills itself, and returns the output of the others, which must raise."""
    with script_ranks(folder, script, ranks) as processes:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert processes[-1].returncode == -signal.SIGKILL
    for process, error in zip(processes[:-1], errors, strict=False):
        assert process.returncode == 1, error
    return errors[:-1]
