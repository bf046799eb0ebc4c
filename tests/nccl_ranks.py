"""Runs one rank under a pure "nccl" group and compares ours with torch's class, on GPUs or on tests/fake_cuda.

python nccl_ranks.py RANK SIZE STORE TRANSPORT [CASE ...]; prints "ok CASE" after each case that holds.
"""

import copy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from drivetrain import DistributedDataParallel
from drivetrain.monitor import Monitor
from drivetrain.optim import AdamW

GROUP_TIMEOUT_S = 60
LATE_CYCLES = 400_000_000  # 0.2 s at 2 GHz, which no noise of a busy machine reaches in every step
SMALL_BUCKETS = 0.001  # MB: several to a step

cases: dict[str, Callable[[str], None]] = {}


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    cases[function.__name__] = function
    return function


class Net(nn.Module):
    """Lets the caller choose which layers take part, which may differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(10, 30)
        self.norm = nn.BatchNorm1d(30)
        self.maybe = nn.Linear(30, 30)
        self.last = nn.Linear(30, 3)

    def forward(self, x: Tensor, uses_maybe: bool = True) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.maybe(x)) if uses_maybe else x)


def batch(step: int, count: int = 8) -> Tensor:
    torch.manual_seed(1000 * step + dist.get_rank())
    return torch.randn(count, 10).cuda()


def pair(transport: str, **arguments: Any) -> tuple[nn.Module, nn.Module]:
    net = Net().cuda()
    theirs = TorchDistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=SMALL_BUCKETS, **arguments)
    return DistributedDataParallel(net, transport=transport, bucket_cap_mb=SMALL_BUCKETS, **arguments), theirs


def check_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Checks that gradients, parameters and buffers equal torch's, and gradients are equal on every rank."""
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{name}: {a.grad} and {b.grad}"
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        if a.grad is None or b.grad is None:
            continue
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        first = a.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, a.grad), f"{name} has another gradient than on rank 0"
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def step_both(
    models: tuple[nn.Module, nn.Module], step: int, uses_maybe: bool = True, micro_batches: int = 1, kept: bool = False
) -> None:
    for model in models:
        model.zero_grad(set_to_none=not kept)
        for micro in range(micro_batches):
            with model.no_sync() if micro < micro_batches - 1 else nullcontext():  # type: ignore[operator]
                model(batch(10 * step + micro), uses_maybe).pow(2).sum().backward()
    check_same(*models)
    for model in models:
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(0.01 * param.grad)


@case
def gradients_and_buffers(transport: str) -> None:
    models = pair(transport)
    for step in range(5):
        step_both(models, step)


@case
def gradients_kept_in_place(transport: str) -> None:
    models = pair(transport, gradient_as_bucket_view=True)
    for step in range(4):
        step_both(models, step, kept=step > 0)


@case
def find_unused_parameters(transport: str) -> None:
    models = pair(transport, find_unused_parameters=True)
    for step in range(4):
        step_both(models, step, uses_maybe=(step + dist.get_rank()) % 2 == 0)


@case
def static_graph(transport: str) -> None:
    models = pair(transport, static_graph=True)
    for step in range(4):
        step_both(models, step, uses_maybe=False)


@case
def no_sync(transport: str) -> None:
    models = pair(transport)
    for step in range(4):
        step_both(models, step, micro_batches=3)


@case
def join(transport: str) -> None:
    models = pair(transport)
    for divide_by_initial in (True, False):
        for model in models:
            model.zero_grad()
            with model.join(divide_by_initial_world_size=divide_by_initial):  # type: ignore[operator]
                for step in range(3 + dist.get_rank()):
                    model.zero_grad()
                    model(batch(step)).pow(2).sum().backward()
                    with torch.no_grad():
                        for param in model.parameters():
                            assert param.grad is not None
                            param.sub_(0.01 * param.grad)
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@case
def communication_hooks(transport: str) -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        models = pair(transport)
        for model in models:
            model.register_comm_hook(None, hook)  # type: ignore[operator]
        for step in range(3):
            step_both(models, step)


@case
def weighted_mean(transport: str) -> None:
    """Weights every sample equally, however many a rank has."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 3)).cuda()
    ours = DistributedDataParallel(copy.deepcopy(plain), transport=transport)
    counts = [2 + rank for rank in range(dist.get_world_size())]
    for step in range(3):
        own = batch(step, counts[dist.get_rank()])
        ours.zero_grad()
        ours.backward(ours(own).pow(2).mean(), weight=counts[dist.get_rank()])
        plain.zero_grad()
        (plain(own).pow(2).mean() * counts[dist.get_rank()] / sum(counts)).backward()
        for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            dist.all_reduce(b.grad)
            torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


@case
def large_float16_gradients(transport: str) -> None:
    """Uses values whose mean is a float16 and whose sum exceeds float16."""
    model = DistributedDataParallel(nn.Linear(1, 4, bias=False).cuda().half(), transport=transport)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 1), 40000.0).cuda().half()).sum().backward()
        grad = model.module.weight.grad
        assert torch.equal(grad, torch.full_like(grad, 40000.0)), grad


@case
def exposed_communication(transport: str) -> None:
    """The device of rank 1 is late in its forward pass, and the other devices wait for it in the backward pass."""
    model = DistributedDataParallel(Net().cuda(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 1:
        model.module.first.register_forward_pre_hook(lambda *_: torch.cuda._sleep(LATE_CYCLES))
    with Monitor(model, optimizer, progress=False, flops=None) as monitor:
        for inputs in monitor([batch(step) for step in range(8)]):
            model(inputs).sum().backward()
            optimizer.step()
    phases = [torch.zeros(2).cuda() for _ in range(dist.get_world_size())]
    spent = monitor.summary().phase_s
    dist.all_gather(phases, torch.tensor([spent["forward"], spent["communication"]]).cuda())
    late, others = phases.pop(1).tolist(), [other.tolist() for other in phases]
    assert all(late[0] > forward and communication > late[1] for forward, communication in others), (late, others)


@case
def captured_backwards(transport: str) -> None:
    """Captures a backward that steps, while the watchdog looks at the device, and refuses one with a weight."""
    if transport == "nccl":  # which cannot be captured
        return
    warm, side = torch.cuda.Stream(), torch.cuda.Stream()
    x = batch(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(warm):
        net = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 3)).cuda()
        models = [
            DistributedDataParallel(one, transport=transport, bucket_cap_mb=SMALL_BUCKETS, report_hang_after=0.2)
            for one in (net, copy.deepcopy(net), copy.deepcopy(net))
        ]
        for model in models[:2]:
            AdamW(model.parameters()).step_in_backward(model)
            for _ in range(3):
                model(x).pow(2).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        models[0](x).pow(2).sum().backward()
        time.sleep(0.3)
        x.clone()
    with torch.cuda.stream(warm):
        for _ in range(3):
            graph.replay()
            models[1](x).pow(2).sum().backward()
    torch.cuda.synchronize()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    message = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side, capture_error_mode="thread_local"):
            models[2].backward(models[2](x).sum(), weight=2)
    except NotImplementedError as error:
        message = str(error)
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert "backward(loss, weight=...) cannot be captured" in message, message


@case
def gradient_noise(transport: str) -> None:
    """The first step's estimate is that of the norms of ranks' gradients and of their mean."""
    net = Net().cuda()
    ours = DistributedDataParallel(net, transport=transport, bucket_cap_mb=SMALL_BUCKETS)
    optimizer, ranks = AdamW(net.parameters()), dist.get_world_size()
    statistics = optimizer.statistics(every=2, model=ours)
    own = copy.deepcopy(net)
    for model in (own, ours):
        model(batch(0)).pow(2).sum().backward()
    of_rank, of_mean = (sum(p.grad.double().square().sum() for p in model.parameters()) for model in (own, net))
    dist.all_reduce(of_rank)
    optimizer.step()
    torch.cuda.synchronize()
    for latest in (statistics.arrived, statistics.latest):
        assert latest is not None
        assert latest.noise is not None
        expected = (ranks * of_mean - of_rank / ranks).item() / (ranks - 1)
        assert abs(latest.noise.squares - expected) <= 1e-5 * of_mean.item(), (latest.noise, expected)
    squares = sum(one.grad_norm**2 for one in statistics.latest.parameters.values())
    assert abs(squares - of_mean.item()) <= 1e-5 * of_mean.item()


def join_group() -> tuple[str, list[str]]:
    """Makes this process the rank that its arguments name. Returns the transport and the cases."""
    rank, size, store, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    return transport, sys.argv[5:]


def main() -> None:
    transport, chosen = join_group()
    for name in chosen or list(cases):
        cases[name](transport)
        torch.cuda.synchronize()
        print(f"ok {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
