"""Checks DistributedDataParallel with other kinds of parallelism, on 2 x 2 ranks, against one process."""

import copy
import functools
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_cases import OnRanks, assert_equal_on_ranks, errors_of_survivors
from drivetrain import DistributedDataParallel as DDP
from drivetrain import accumulate, amp, clip_grad_norm_, optim
from ranks import run_on

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


@pytest.mark.parametrize(("transport", "init_sync"), [("torch", True), ("shm", True), ("shm", False)])
@run_on(4)
def test_tensor_parallel_layers_inside_are_as_in_one_process(transport: str, init_sync: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    expected, parameters = reference(mlp())
    net = parallelize_module(mlp(), mesh["shards"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    options = {"transport": transport, "bucket_cap_mb": 0.0001, "init_sync": init_sync}
    model = DDP(net, device_mesh=mesh["replicas"], **options)
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
    """The whole model in one process."""

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


@pytest.mark.parametrize("transport", ["torch", "shm"])
@run_on(4)
def test_experts_of_another_group_are_as_in_one_process(transport: str) -> None:
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


# ---- Parameters of two process groups in one wrapper, with tokens that travel to their experts.


class AllToAll(torch.autograd.Function):
    """Sends the i-th of equal chunks of rows to the i-th rank of a group. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = [torch.empty_like(chunk) for chunk in x.chunk(dist.get_world_size(group))]
        dist.all_to_all(received, [chunk.contiguous() for chunk in x.chunk(len(received))], group=group)
        return torch.cat(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(grads[0].contiguous(), ctx.group), None


class Routed(nn.Module):
    """Sends the first half of a rank's rows to expert 0 and the other half to expert 1, and gets them back."""

    def __init__(self, number: int, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(10, 10)
        self.experts = nn.ModuleList([make_expert(number)])
        self.experts[0].register_buffer("number", torch.tensor(float(number)))
        self.unused = nn.Linear(2, 2)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        sent = AllToAll.apply(self.router(x).tanh(), self.group)
        return AllToAll.apply(self.experts[0](sent), self.group)


@pytest.mark.parametrize("transport", ["torch", "shm"])
@pytest.mark.parametrize("mode", ["plain", "no_sync", "static", "unused"])
@run_on(4)
def test_experts_in_one_wrapper_are_as_in_one_process(transport: str, mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    number = mesh.get_local_rank("experts")
    rank = dist.get_rank()
    expected, parameters = reference(Both())  # row i of a batch goes to expert i % 2, and a rank has two rows
    model = Routed(number, mesh["experts"].get_group())
    if rank >= 2:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # construction brings the values of rank 0, and the expert of the replica
    if mode != "unused":
        del model.unused
    options = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(mode, {})
    group = mesh["replicas"].get_group()
    net: Any = DDP(model, transport=transport, expert_groups={"experts.*": group}, bucket_cap_mb=1e-4, **options)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    for x, grads in zip(batches(), expected, strict=True):
        net.zero_grad()
        mine = x.chunk(4)[rank]
        if mode == "no_sync":
            with net.no_sync():
                (net(mine).pow(2).mean() / 2).backward()
            (net(mine).pow(2).mean() / 2).backward()
        else:
            net(mine).pow(2).mean().backward()
        for name, p in model.router.named_parameters():
            close(p.grad, grads[f"router.{name}"])
        for name, p in model.experts[0].named_parameters():
            close(p.grad, grads[f"experts.{number}.{name}"])
        step_used(net)
    assert model.experts[0].number == number  # no buffer came from a rank with another expert
    for name, p in model.experts[0].named_parameters():
        close(p.detach(), parameters[f"experts.{number}.{name}"])
    assert_equal_on_ranks([p.detach() for p in model.router.parameters()])


# ---- Norms and overflows of parameters that ranks hold differently.

MAX_NORM = 0.05  # below the norm of every step


def experts_of_two(transport: str) -> tuple[Any, int]:
    """Returns a wrapper with one of two experts, and the number of this rank's expert."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    number = mesh.get_local_rank("experts")
    model = Routed(number, mesh["experts"].get_group())
    del model.unused
    groups = {"experts.*": mesh["replicas"].get_group()}
    return DDP(model, transport=transport, expert_groups=groups, bucket_cap_mb=1e-4), number


def clip_and_step(way: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns the norm before clipping."""
    norm = torch.tensor(0.0)
    if way == "drivetrain's function":
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    if way == "max_grad_norm":
        assert isinstance(optimizer, optim.AdamW)
        norm = torch.tensor(optimizer.grad_norm)
    return norm


@pytest.mark.parametrize("transport", ["torch", "shm"])
@run_on(4)
def test_norms_over_experts_are_those_of_one_process(transport: str) -> None:
    for way in ("drivetrain's function", "max_grad_norm"):
        reference_model = Both()
        theirs = torch.optim.AdamW(reference_model.parameters(), lr=0.01)
        net, number = experts_of_two(transport)
        options = {"max_grad_norm": MAX_NORM} if way == "max_grad_norm" else {}
        ours = optim.AdamW(net.parameters(), lr=0.01, **options)
        for x in batches():
            theirs.zero_grad()
            reference_model(x).pow(2).mean().backward()
            expected = torch.nn.utils.clip_grad_norm_(reference_model.parameters(), MAX_NORM)
            theirs.step()
            ours.zero_grad()
            net(x.chunk(4)[dist.get_rank()]).pow(2).mean().backward()
            norm = clip_and_step(way, net, ours)
            assert expected > MAX_NORM
            torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=0)
            assert_equal_on_ranks([norm, *(p.detach() for p in net.module.router.parameters())])
        for name, p in net.module.router.named_parameters():
            close(p.detach(), reference_model.get_parameter(f"router.{name}").detach())
        for name, p in net.module.experts[0].named_parameters():
            close(p.detach(), reference_model.get_parameter(f"experts.{number}.{name}").detach())


@run_on(4)
def test_all_ranks_skip_a_step_with_an_overflow_of_one_expert() -> None:
    """Only the ranks of expert 1 have an overflow, in the second step. All must skip it and halve the scale."""
    for kind in (torch.optim.SGD, optim.SGD, functools.partial(optim.SGD, max_grad_norm=MAX_NORM)):
        for unscales in (False, True):
            net, number = experts_of_two("torch")
            optimizer = kind(net.parameters(), lr=0.1)
            scaler = amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
            spoil = [1.0]
            net.module.experts[0].weight.register_hook(lambda grad, spoil=spoil: grad * spoil[0])
            for step, x in enumerate(batches()):
                spoil[0] = torch.inf if step == 1 and number == 1 else 1.0
                before = [p.detach().clone() for p in net.parameters()]
                optimizer.zero_grad()
                scaler.scale(net(x.chunk(4)[dist.get_rank()]).pow(2).mean()).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
                assert all(moved) if step != 1 else not any(moved), (kind, unscales, step, moved)
                assert scaler.get_scale() == (8.0 if step == 0 else 4.0), (kind, unscales, step)
            assert_equal_on_ranks([p.detach() for p in net.module.router.parameters()])


DYING_RANK = """
    import math, os, signal, time, torch, torch.distributed as dist
    from datetime import timedelta
    from torch import nn
    from drivetrain import DistributedDataParallel as DDP, clip_grad_norm_

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.ModuleDict({"router": nn.Linear(64, 64), "experts": nn.Linear(64, 64)})
    model.forward = lambda x: model["experts"](model["router"](x))
    net = DDP(model, expert_groups={"experts.*": halves[rank % 2]}, report_hang_after=1)

    def die(*_):
        if rank == 3 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if "WHERE" == "backward":
        model["experts"].weight.register_hook(die)
    for step in range(10_000):
        for wrapper in [net, *net._parts()]:
            while step == 2 and any(map(math.isnan, wrapper.stragglers())):
                time.sleep(0.05)  # until each has heard of the others
        net.zero_grad()
        net(torch.randn(4, 64)).sum().backward()
        if "WHERE" == "norm":
            die()
        clip_grad_norm_(net.parameters(), 1.0)
"""


@pytest.mark.parametrize("where", ["backward", "norm"])
def test_the_others_name_a_rank_of_an_expert_that_dies(tmp_path: Path, where: str) -> None:
    for error in errors_of_survivors(tmp_path, DYING_RANK.replace("WHERE", where)):
        assert re.search(r"[Rr]ank 3 (\(rank 1 of its group\) )?has (died|ended)", error), error


def step_used(model: nn.Module, lr: float = 0.1) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= lr * p.grad


@pytest.mark.parametrize("transport", ["torch", "shm"])
@run_on(4)
def test_expert_of_one_rank_is_not_reduced(transport: str) -> None:
    """An expert that one rank has: no other rank's gradient comes in, and it is divided by all ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([one]) for one in range(4)]
    model = nn.Sequential(mlp(), nn.Linear(6, 3))
    reference_model: Any = copy.deepcopy(model)
    net = DDP(model, transport=transport, expert_groups={"1.*": groups[rank]})
    x = batches()[0].chunk(4)[rank]
    for _ in range(2):  # the second wrapper scales as the first did
        net.zero_grad()
        reference_model.zero_grad()
        net(x).sum().backward()
        reference_model(x).sum().backward()
        torch.testing.assert_close(
            model.get_parameter("1.weight").grad, reference_model.get_parameter("1.weight").grad / 4, rtol=0, atol=0
        )
        assert_equal_on_ranks([p.grad for p in model[0].parameters()])
        net = DDP(model, transport=transport, expert_groups={"1.*": groups[rank]})


def refusals(transport: str) -> None:
    world = dist.group.WORLD
    pair = dist.new_group([0, 1])
    rank = dist.get_rank()
    for wrong, error, message in (
        ({"nothing.*": world}, ValueError, "matches no parameter"),
        ({"*": world}, ValueError, "every trained parameter"),
        ({"0.*": None}, TypeError, "expected a process group"),
    ):
        with pytest.raises(error, match=message):
            DDP(mlp(), transport=transport, expert_groups=wrong)
    for name, value in (("shard", "optimizer"), ("check_gradients", "skip")):
        with pytest.raises(NotImplementedError, match=name):
            DDP(mlp(), transport=transport, expert_groups={"2.*": world}, **{name: value})
    if rank < 2:
        with pytest.raises(ValueError, match="two groups"):
            DDP(mlp(), transport=transport, expert_groups={"2.*": pair, "2.weight": world})
        with pytest.raises(ValueError, match="outside of process_group"):
            DDP(mlp(), transport=transport, process_group=pair, expert_groups={"2.*": world})
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = DDP(mlp(), transport=transport, expert_groups={"2.*": halves[rank // 2]})
    net(batches()[0]).sum().backward()
    before = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(NotImplementedError, match="norm_type is inf"):
        clip_grad_norm_(net.parameters(), 1.0, norm_type=torch.inf)
    kept = list(net.parameters())
    del net
    gc.collect()
    with pytest.raises(RuntimeError, match="was deleted: keep the wrapper"):
        clip_grad_norm_(kept, 1.0)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(kept, before, strict=True))
    net = DDP(mlp(), transport=transport, expert_groups={"2.*": world})
    loss = net(batches()[0]).sum()
    for call in (
        lambda: net.backward(loss, 2),
        lambda: net.register_comm_hook(None, lambda state, bucket: None),
        lambda: copy.deepcopy(net),
        lambda: net.join_hook(),
        lambda: accumulate(net, torch.optim.SGD(net.parameters(), lr=0.1), steps=2),
    ):
        with pytest.raises(NotImplementedError, match="expert_groups"):
            call()


def test_wrong_groups_and_what_goes_over_one_group_only_are_refused(on_four_ranks: OnRanks) -> None:
    on_four_ranks(refusals, "torch")
