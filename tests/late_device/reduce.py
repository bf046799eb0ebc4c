"""Tests data parallelism on a device whose streams run late, with a process group that refuses CPU tensors, as NCCL.

Usage: python reduce.py FOLDER [CASE ...], where FOLDER holds the built late_device. It prints one line per case:
"OK case" or "BAD case: message".
"""

import functools
import importlib
import itertools
import multiprocessing
import queue
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import drivetrain
from drivetrain import _C

WORLD_SIZE = 2
TIMEOUT_S = 20  # timeout of the process group
CASE_S = 40
late: Any = None  # the module, once a rank has loaded it

cases: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    cases[function.__name__] = function
    return function


def add_case(name: str, function: Callable[..., None], *args: Any, **options: Any) -> None:
    cases[name] = functools.partial(function, *args, **options)


# ---- The model, and its expected parameters.


class Net(nn.Module):
    """A model that always uses `first` and `last`, and `maybe` on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.maybe = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, uses_maybe: bool = True) -> Tensor:
        hidden = self.first(x).relu()
        if uses_maybe:
            hidden = self.maybe(hidden).relu()
        out: Tensor = self.last(hidden).square().mean()
        return out


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def rank() -> int:
    return dist.get_rank()


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(0.1 * param.grad)


def expected_after(steps: int, uses: Callable[[int, int], bool] = lambda rank, step: True) -> list[Tensor]:
    """Returns the parameters after so many steps with gradients that are averaged over ranks."""
    model = Net()
    for step in range(steps):
        model.zero_grad()
        for one in range(WORLD_SIZE):
            (model(inputs(one, step), uses(one, step)) / WORLD_SIZE).backward()
        descend(model)
    return [param.detach() for param in model.parameters()]


def check_close(found: list[Tensor], expected: list[Tensor]) -> None:
    late.run(rank())
    on_host = [tensor.cpu() for tensor in found]
    wrong = [i for i, (one, other) in enumerate(zip(on_host, expected, strict=True)) if not torch.allclose(one, other)]
    assert not wrong, f"{len(wrong)} of {len(expected)} wrong: {wrong}"
    assert late.num_late() == 0, "memory was used that is others'"


def run_steps(ddp: nn.Module, steps: int, uses: Callable[[int, int], bool] = lambda rank, step: True) -> None:
    for step in range(steps):
        ddp.zero_grad()
        ddp(inputs(rank(), step).to("late"), uses(rank(), step)).backward()
        descend(ddp)


def check_steps(steps: int, uses: Callable[[int, int], bool] = lambda rank, step: True, **arguments: Any) -> None:
    ddp = drivetrain.DistributedDataParallel(Net().to("late"), **arguments)
    run_steps(ddp, steps, uses)
    check_close(list(ddp.parameters()), expected_after(steps, uses))


# ---- A process group that refuses CPU tensors.


@case
def refuses_cpu_tensors() -> None:
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        with pytest.raises(RuntimeError, match="cpu"):
            call(torch.ones(1))


add_case("plain", check_steps, 4)
add_case("transport_torch", check_steps, 4, transport="torch")
add_case("find_unused", check_steps, 4, find_unused_parameters=True)
add_case("unused_on_one_rank", check_steps, 4, lambda rank, step: (rank + step) % 2 == 0, find_unused_parameters=True)
add_case("static_graph", check_steps, 4, static_graph=True)


@case
def unused_everywhere() -> None:
    ddp = drivetrain.DistributedDataParallel(Net().to("late"), find_unused_parameters=True)
    run_steps(ddp, 3, lambda rank, step: False)
    assert ddp.module.maybe.weight.grad is None
    check_close(list(ddp.parameters()), expected_after(3, lambda rank, step: False))


@case
def check_replicas() -> None:
    check_steps(4, check_replicas_every=1)
    ddp = drivetrain.DistributedDataParallel(Net().to("late"), check_replicas_every=2)
    run_steps(ddp, 1)
    if rank() == 1:
        with torch.no_grad():
            ddp.module.maybe.bias[3] += 1
    with pytest.raises(RuntimeError, match=r"replicas have diverged: parameter 'maybe\.bias'"):
        run_steps(ddp, 1)


def weight_of(rank: int, step: int) -> float:
    return 1.0 + rank + step


def expected_weighted(windows: int, micro_steps: int) -> list[Tensor]:
    model = Net()
    for window in range(windows):
        model.zero_grad()
        pairs = list(itertools.product(range(WORLD_SIZE), range(window * micro_steps, (window + 1) * micro_steps)))
        total = sum(weight_of(*pair) for pair in pairs)
        for one, step in pairs:
            (model(inputs(one, step)) * weight_of(one, step) / total).backward()
        descend(model)
    return [param.detach() for param in model.parameters()]


@case
def weighted() -> None:
    for set_to_none in (True, False):
        ddp = drivetrain.DistributedDataParallel(Net().to("late"))
        for window in range(3):
            ddp.zero_grad(set_to_none=set_to_none)
            for micro in range(2):
                step = 2 * window + micro
                with ddp.no_sync() if micro == 0 else nullcontext():
                    ddp.backward(ddp(inputs(rank(), step).to("late")), weight=weight_of(rank(), step))
            descend(ddp)
        check_close(list(ddp.parameters()), expected_weighted(3, 2))


@case
def weighted_in_bfloat16() -> None:
    """The factor must not be rounded to the gradients' 16 bits."""
    weights, values = (3.0, 10.0), (1.0, 2.0)
    model = nn.Linear(64, 1, bias=False).bfloat16()
    ddp = drivetrain.DistributedDataParallel(model.to("late"))
    x = torch.full((1, 64), values[rank()], dtype=torch.bfloat16).to("late")
    ddp.backward(ddp(x).float().sum(), weight=weights[rank()])
    late.run(0)
    total = sum(weight * value for weight, value in zip(weights, values, strict=True))
    expected = (torch.tensor(total, dtype=torch.bfloat16).float() * (1 / sum(weights))).bfloat16()
    found = model.weight.grad
    assert found is not None
    assert torch.equal(found.cpu(), expected.expand(1, 64)), (found.cpu()[0, 0], expected)


@case
def weights_that_sum_to_nothing() -> None:
    ddp = drivetrain.DistributedDataParallel(Net().to("late"))
    with pytest.raises(ValueError, match="sum to 0"):
        ddp.backward(ddp(inputs(rank(), 0).to("late")), weight=0.0)
    ddp.zero_grad()
    run_steps(ddp, 1)
    check_close(list(ddp.parameters()), expected_after(1))


@case
def weight_of_nothing_on_one_rank() -> None:
    ddp = drivetrain.DistributedDataParallel(Net().to("late"))
    ddp.backward(ddp(inputs(rank(), 0).to("late")), weight=float(rank()))
    model = Net()
    model(inputs(1, 0)).backward()
    check_close([p.grad for p in ddp.parameters() if p.grad is not None], [p.grad for p in model.parameters()])  # type: ignore[misc]


@case
def gradients_that_no_weight_counts() -> None:
    """The device finds them, and the host raises the error one step later."""
    ddp = drivetrain.DistributedDataParallel(Net().to("late"))
    run_steps(ddp, 1)
    ddp.backward(ddp(inputs(rank(), 0).to("late")), weight=1.0)
    settle()
    with pytest.raises(ValueError, match=r"no weight counts.*an earlier backward"):
        ddp.backward(ddp(inputs(rank(), 1).to("late")), weight=1.0)
    ddp.zero_grad()
    ddp.backward(ddp(inputs(rank(), 1).to("late")), weight=1.0)


@case
def plain_after_weighted() -> None:
    """Zeroing in place forgets the weights of earlier gradients."""
    ddp = drivetrain.DistributedDataParallel(Net().to("late"))
    ddp.backward(ddp(inputs(rank(), 7).to("late")), weight=weight_of(rank(), 7))
    for step in range(3):
        ddp.zero_grad(set_to_none=False)
        ddp(inputs(rank(), step).to("late")).backward()
        descend(ddp)
    check_close(list(ddp.parameters()), expected_after(3))


@case
def accumulated() -> None:
    for set_to_none in (True, False):
        ddp = drivetrain.DistributedDataParallel(Net().to("late"))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)
        optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none)  # type: ignore[method-assign]
        with drivetrain.accumulate(ddp, optimizer, 2) as window:
            for step in range(6):
                window.backward(ddp(inputs(rank(), step).to("late")), weight=weight_of(rank(), step))
        check_close(list(ddp.parameters()), expected_weighted(3, 2))


@case
def frozen_parameter_on_the_cpu() -> None:
    """The frozen parameter comes first, but messages between ranks must be on the device of the other parameters."""
    model = Net().to("late")
    holder = nn.Module()
    holder.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    holder.net = model
    holder.forward = model.forward
    holder._ddp_params_and_buffers_to_ignore = ["frozen"]  # type: ignore[assignment]
    ddp = drivetrain.DistributedDataParallel(holder)
    run_steps(ddp, 3)
    check_close(list(model.parameters()), expected_after(3))


@case
def tensor_freed_by_a_thread() -> None:
    """A thread frees a tensor, with Python's lock held, while work runs that needs this lock, as gloo's does."""
    tensors, runs, is_free = [torch.empty(3, device="late")], threading.Event(), threading.Event()

    def free() -> None:
        runs.wait()
        tensors.clear()
        is_free.set()

    def work() -> None:
        runs.set()
        is_free.wait()

    late.enqueue(work)
    thread = threading.Thread(target=free)
    thread.start()
    late.run(rank())
    thread.join()


@case
def pool_freed_by_a_thread() -> None:
    """A thread frees a pool, which waits for the device, while work runs that needs Python's lock."""
    pools, runs = [_C.OffloadPool(1 << 20, 1 << 10)], threading.Event()
    pools[0].begin(torch.ones(3, device="late"))  # a use that the pool waits for

    def free() -> None:
        runs.wait()
        pools.clear()

    def work() -> None:
        runs.set()
        time.sleep(0.1)

    late.enqueue(work)
    thread = threading.Thread(target=free)
    thread.start()
    late.run(rank())
    thread.join()


# ---- Steps on the CPU.


def check_offload(overlaps: bool, **arguments: Any) -> None:
    """Compares with the same steps of CPU parameters, from the gradients that the wrapper has reduced."""
    ddp = drivetrain.DistributedDataParallel(Net().to("late"), bucket_cap_mb=0.0005, **arguments)
    ours_of, theirs_of = list(ddp.parameters()), list(Net().parameters())
    options: dict[str, Any] = {"lr": 0.1, "max_grad_norm": 0.05, "state_bits": 8, "min_8bit_size": 1}
    ours = drivetrain.optim.AdamW(ours_of, offload="cpu", **options)
    theirs = drivetrain.optim.AdamW(theirs_of, **options)
    overlapped = ours.overlap_offload(ddp, bucket_cap_mb=0.0005) if overlaps else None
    for step in range(6):
        late.seed(100 * step + rank())
        with ddp.no_sync() if step % 3 == 0 else nullcontext():
            ddp(inputs(rank(), step).to("late")).backward()
        if step % 3 == 0:
            continue
        ours.step()
        for one, other in zip(ours_of, theirs_of, strict=True):
            other.grad = None if one.grad is None else one.grad.cpu()
        theirs.step()
        ours.zero_grad()
    if overlapped is not None:
        overlapped.remove()
    assert ours._drivetrain.twins.gradient_pool.num_copies == 4 * len(ours_of)  # each final gradient left once
    assert all(torch.equal(one.cpu(), other) for one, other in zip(ours_of, theirs_of, strict=True))
    assert late.num_late() == 0, "memory was used that is others'"


add_case("offload", check_offload, False)
add_case("offload_overlapped", check_offload, True)
add_case("offload_find_unused", check_offload, True, find_unused_parameters=True)


# ---- Streams.


def settle() -> None:
    """Runs everything that is enqueued."""
    late.run(rank())


def check_streams(build: Callable[[list[nn.Parameter]], None]) -> None:
    """Checks the first steps, with the bucket rebuild, in many orders of streams, with and without fuse_wgrad."""
    wrong: list[str] = []
    choices = itertools.product(range(2), (25, 0.0002), (False, True), (1, 2), (False, True))
    for seed, cap, fuses, micro_steps, hook in choices:
        late.seed(1000 * seed + rank())
        model = Net().to("late")
        if fuses:
            drivetrain.fuse_wgrad(model)
        settle()
        build(list(model.parameters()))
        ddp = drivetrain.DistributedDataParallel(model, bucket_cap_mb=cap)
        late.set_stream(0)
        settle()
        if hook:
            ddp.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
        reference = Net()
        for window in range(3):
            ddp.zero_grad()
            reference.zero_grad()
            for micro in range(micro_steps):
                step = window * micro_steps + micro
                with ddp.no_sync() if micro + 1 < micro_steps else nullcontext():
                    ddp(inputs(rank(), step).to("late")).backward()
                for one in range(WORLD_SIZE):
                    (reference(inputs(one, step)) / WORLD_SIZE).backward()
            descend(ddp)
            descend(reference)
        late.run(seed + rank())
        pairs = zip(ddp.parameters(), reference.parameters(), strict=True)
        bad = sum(not torch.allclose(one.cpu(), other) for one, other in pairs)
        if bad:
            wrong.append(f"{seed=}, {cap=}, fuse_wgrad={fuses}, {micro_steps} micro-steps, hook={hook}: {bad} of 6")
        del ddp
    assert not wrong, f"{len(wrong)} of 32 orders, first: {wrong[0]}"
    assert late.num_late() == 0, "memory was used that is others'"


@case
def built_on_a_side_stream() -> None:
    check_streams(lambda params: late.set_stream(1))


@case
def hooks_on_different_streams() -> None:
    """A parameter's accumulator belongs to the stream that is current at its first use."""
    kept: list[Any] = []

    def build(params: list[nn.Parameter]) -> None:
        for number, param in enumerate(params):
            late.set_stream(1 + number % 3)
            kept.append(param.expand_as(param).grad_fn)
        late.set_stream(1)

    check_streams(build)


# ---- Ranks.


def load(folder: str) -> None:
    """Registers the device and its process group with torch."""
    global late
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    late = importlib.import_module("late_device")
    module = types.ModuleType("torch.late")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    torch._register_device_module("late", module)  # type: ignore[no-untyped-call]
    late.let_host_wait(True)

    def make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return late.make_backend(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend("late", make_backend, devices=["late"])


def serve(folder: str, rank: int, work: str, names: list[str], answers: Any, connected: Any) -> None:
    load(folder)
    for name in names:
        dist.init_process_group(
            "late",
            store=dist.FileStore(f"{work}/{name}", WORLD_SIZE),
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        connected.wait(TIMEOUT_S)  # a rank that leaves while another still connects fails it
        try:
            cases[name]()
            late.run(rank)
            answers.put((name, ""))
        except Exception as error:
            what = str(error).strip().split("\n")[0] or "no message"
            where = traceback.extract_tb(error.__traceback__)[-1]
            answers.put(
                (name, f"rank {rank}: {type(error).__name__}: {what} ({Path(where.filename).name}:{where.lineno})")
            )
            # Other ranks may wait for this one, and its leftover state must not reach the next case.
            break
        finally:
            dist.destroy_process_group()


def run_ranks(folder: str, names: list[str]) -> list[str]:
    """Prints the outcome of each case up to the first that fails. Returns the cases after that one."""
    context = multiprocessing.get_context("fork")  # this process has no thread yet, and has imported torch
    left, heard = list(names), 0
    with tempfile.TemporaryDirectory() as work:
        answers, connected = context.Queue(), context.Barrier(WORLD_SIZE)
        shared = names, answers, connected
        ranks = [context.Process(target=serve, args=(folder, r, work, *shared)) for r in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        wrong = ""
        while left and not wrong:
            try:
                _, wrong = answers.get(timeout=CASE_S)
                heard += 1
            except queue.Empty:
                wrong = f"some rank has not ended within {CASE_S} s: exit codes {[one.exitcode for one in ranks]}"
            if wrong or heard == WORLD_SIZE:
                print(f"BAD {left[0]}: {wrong}" if wrong else f"OK {left[0]}", flush=True)
                del left[0]
                heard = 0
        for process in ranks:
            process.kill()
            process.join()
    return left


def main() -> None:
    left = sys.argv[2:] or list(cases)
    while left:
        left = run_ranks(sys.argv[1], left)


if __name__ == "__main__":
    main()
