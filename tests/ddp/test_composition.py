"""Checks DistributedDataParallel beside other kinds of parallelism, on 2 x 2 ranks, against one process.

test_ddp_contract.py compares tensor parallelism inside a wrapper with torch's class.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_cases import OnRanks, assert_equal_on_ranks
from drivetrain import DistributedDataParallel as DDP

BATCH = 8
STEPS = 3


def batches() -> list[Tensor]:
    """Returns the whole batch of each step, the same on every rank."""
    torch.manual_seed(7)
    return [torch.randn(BATCH, 10) for _ in range(STEPS)]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 6))


def reference(model: nn.Module, lr: float = 0.1) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Trains in one process. Returns the gradients of each step, and the parameters at the end."""
    model = copy.deepcopy(model)
    steps = []
    for x in batches():
        model.zero_grad()
        model(x).pow(2).mean().backward()
        steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
    return steps, {name: p.detach().clone() for name, p in model.named_parameters()}


def step(model: nn.Module, lr: float = 0.1) -> None:
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= lr * p.grad


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def shard_of(whole: Tensor, dim: int | None, rank: int, ranks: int) -> Tensor:
    return whole if dim is None else whole.chunk(ranks, dim)[rank]


# ---- Tensor parallelism inside.


def with_tensor_parallel(transport: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    expected, parameters = reference(mlp())
    net = parallelize_module(mlp(), mesh["shards"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = DDP(net, device_mesh=mesh["replicas"], transport=transport, bucket_cap_mb=0.0001)
    replica, shard = mesh.get_local_rank("replicas"), mesh.get_local_rank("shards")
    dims = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": None}  # the dimension that is divided
    for x, grads in zip(batches(), expected, strict=True):
        model.zero_grad()
        model(x.chunk(2)[replica]).pow(2).mean().backward()
        for name, p in model.module.named_parameters():
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            close(grad, shard_of(grads[name], dims[name], shard, 2))
        step(model)
    for name, p in model.module.named_parameters():
        local = p.to_local() if hasattr(p, "to_local") else p
        close(local.detach(), shard_of(parameters[name], dims[name], shard, 2))


@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_tensor_parallel_layers_inside_are_as_in_one_process(on_four_ranks: OnRanks, transport: str) -> None:
    on_four_ranks(with_tensor_parallel, transport)


# ---- Pipeline stages around.


def stages() -> list[nn.Module]:
    layers = list(mlp())
    return [nn.Sequential(*layers[:2]), nn.Sequential(layers[2])]


def in_a_pipeline(transport: str, micro_batches: int) -> None:
    """Each stage is wrapped over its replicas. The schedule's last micro-batch synchronizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "replicas"))
    index, replica = mesh.get_local_rank("stages"), mesh.get_local_rank("replicas")
    expected, parameters = reference(mlp())
    model = DDP(stages()[index], device_mesh=mesh["replicas"], transport=transport, bucket_cap_mb=0.0001)
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh["stages"].get_group())
    schedule = ScheduleGPipe(stage, micro_batches, loss_fn=lambda output, target: (output - target).pow(2).mean())
    names = [f"{number + 2 * index}.{name}" for number, name in ((0, "weight"), (0, "bias"))]
    for x, grads in zip(batches(), expected, strict=True):
        model.zero_grad()
        if index == 0:
            schedule.step(x.chunk(2)[replica])
        else:
            schedule.step(target=torch.zeros(BATCH // 2, 6))
        for name, p in zip(names, model.module.parameters(), strict=True):
            close(p.grad, grads[name])
        assert_equal_in(mesh["replicas"].get_group(), [p.grad for p in model.parameters()])
        step(model)
    for name, p in zip(names, model.module.parameters(), strict=True):
        close(p.detach(), parameters[name])


def assert_equal_in(group: dist.ProcessGroup, tensors: list[Any]) -> None:
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        assert all(torch.equal(gathered[0], other) for other in gathered)


@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_pipeline_stages_are_as_in_one_process(on_four_ranks: OnRanks, transport: str) -> None:
    on_four_ranks(in_a_pipeline, transport, 2)


# ---- Parameters of two process groups: expert parallelism.


class Experts(nn.Module):
    """Has a router that all ranks share, and one of two experts, which the ranks of a group hold.

    Every sample goes to the expert of its index modulo 2. A real model sends tokens to experts' ranks. Here each rank
    gets its expert's samples, which is enough for gradients.
    """

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(10, 10)
        self.expert = expert

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.router(x).tanh())


class Both(nn.Module):
    """The same model in one process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(10, 10)
        self.experts = nn.ModuleList(make_expert(number) for number in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.router(x).tanh()
        return torch.stack([self.experts[i % 2](hidden[i]) for i in range(len(x))])


def make_expert(number: int) -> nn.Module:
    torch.manual_seed(100 + number)
    return nn.Linear(10, 6)


def with_experts(transport: str) -> None:
    """Wraps the experts over their replicas, and then the model, without the experts' parameters, over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    number, replica = mesh.get_local_rank("experts"), mesh.get_local_rank("replicas")
    expected, parameters = reference(Both())
    group = mesh["replicas"].get_group()
    model: Any = Experts(DDP(make_expert(number), process_group=group, transport=transport))
    ignored = [name for name, _ in model.named_parameters() if name.startswith("expert.")]
    DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
    model = DDP(model, transport=transport)
    for x, grads in zip(batches(), expected, strict=True):
        model.zero_grad()
        mine = x[number::2].chunk(2)[replica]
        model(mine).pow(2).mean().backward()
        for name, p in model.module.router.named_parameters():
            close(p.grad, grads[f"router.{name}"])
        # An expert's replicas see half of the batch: their mean loss weighs its samples twice.
        for name, p in model.module.expert.module.named_parameters():
            p.grad.div_(2)
            close(p.grad, grads[f"experts.{number}.{name}"])
        step(model)
    assert_equal_on_ranks([p.detach() for p in model.module.router.parameters()])
    for name, p in model.module.router.named_parameters():
        close(p.detach(), parameters[f"router.{name}"])
    for name, p in model.module.expert.module.named_parameters():
        close(p.detach(), parameters[f"experts.{number}.{name}"])


@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_experts_of_another_group_are_as_in_one_process(on_four_ranks: OnRanks, transport: str) -> None:
    on_four_ranks(with_experts, transport)
