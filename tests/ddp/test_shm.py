"""Tests the transport through shared memory on real ranks: its values, its remains and its errors."""

import ctypes
import errno
import gc
import multiprocessing
import os
import platform
import re
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ddp_cases import SMALL_BUCKETS, OnRanks, Products, script_ranks, started
from drivetrain import _C, processes
from drivetrain import DistributedDataParallel as DDP
from drivetrain.ddp import transport
from namespaces import needs_namespaces
from polling import wait_until
from ranks import RankPool, dawdle_in_hooks, run_on
from warm_python import warm_python

TorchDDP = torch.nn.parallel.DistributedDataParallel
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
# SIZES cover no element, one, an odd number, a vector with a tail, several tiles, and several chunks.
WEIGHTS = (1, 65, 70_000, 1000, 40_000)
SIZES = [0, 1, 3, 17, 513, 4099, 100_003]


@pytest.fixture(params=[2, 3])
def on_some_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """Runs on two ranks, then on three."""
    run: OnRanks = request.getfixturevalue("on_ranks" if request.param == 2 else "on_three_ranks")
    return run


def shm_comm() -> _C.Comm:
    comm = transport.make_comm("shm", dist.group.WORLD, torch.device("cpu"))
    assert comm.name == "shm", comm.why_not
    return comm


def transport_of(model: DDP) -> str:
    return str(model._get_ddp_logging_data()["transport"])


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).mul_(3).to(dtype)
    return torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int64).to(dtype)


@run_on(2)
def test_a_step_given_up_leaves_the_staging_place() -> None:
    """Gives up a step on one rank while the map of used parameters is in the staging area."""
    model = DDP(nn.Linear(4, 1, bias=False), transport="shm", find_unused_parameters=True)
    start = torch.ones((), requires_grad=True)

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    for step in range(4):
        model.zero_grad()
        scale = start * 1
        x = torch.full((1, 4), 1.0 + step + dist.get_rank()) * scale
        if step == 1 and dist.get_rank() == 1:
            scale.register_hook(fail)
            with pytest.raises(ArithmeticError):
                model(x).backward()
            model.reducer._reset_state()
        else:
            model(x).backward()
            assert model.module.weight.grad.tolist() == [[1.5 + step] * 4]


def sums_and_means(isa: str) -> list[bytes]:
    _C.force_isa(isa)
    world = range(dist.get_world_size())
    comm = shm_comm()
    buffer = comm.allocate(8 * sum(SIZES) + 64 * len(SIZES))
    assert not buffer.any()
    results = []
    for dtype in DTYPES:
        offset = 0
        for size in SIZES:
            flat = buffer[offset : offset + size * dtype.itemsize].view(dtype)
            offset += (size * dtype.itemsize + 63) // 64 * 64
            inputs = [values_of(rank, size, dtype) for rank in world]
            for mean in (True, False) if dtype.is_floating_point else (False,):
                flat.copy_(inputs[dist.get_rank()])
                comm.all_reduce(flat, mean)
                results.append(flat.view(torch.uint8).numpy(force=True).tobytes())
                check_sum(flat, inputs, mean)
    _C.force_isa("")
    return results


def check_sum(found: Tensor, inputs: list[Tensor], mean: bool) -> None:
    """Compares with sums in rank order (16-bit types in float32, rounded once at the end) and with sums in double."""
    dtype = found.dtype
    if not dtype.is_floating_point:
        assert torch.equal(found, sum(inputs[1:], start=inputs[0]))
        return
    wide = [x.to(dtype if dtype.itemsize >= 4 else torch.float32) for x in inputs]
    expected = sum(wide[1:], start=wide[0])
    if mean:
        expected = expected * (1 / len(inputs))
    assert torch.equal(found, expected.to(dtype)), f"{dtype}, {found.numel()} elements"
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    epsilon = torch.finfo(dtype).eps
    error = (found.double() - (exact / len(inputs) if mean else exact)).abs()
    assert (error <= 2 * epsilon * torch.stack([x.double().abs() for x in inputs]).sum(0)).all()


def test_sums_and_means(on_some_ranks: OnRanks, isa: str) -> None:
    results = on_some_ranks(sums_and_means, isa)
    assert all(other == results[0] for other in results), "the ranks' bits differ"


@run_on(2)
def test_tensors_outside_the_buffer() -> None:
    """Sends small tensors through the staging area, and several at once and large ones through the process group."""
    comm = shm_comm()
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in (1, 1000, 1_000_000):
        counts = torch.full((size,), rank + 1, dtype=torch.int32)
        comm.all_reduce(counts, mean=False)
        assert (counts == world * (world + 1) // 2).all()
        values = torch.full((size,), float(rank))
        comm.all_reduce(values, mean=True)
        assert torch.equal(values, torch.full((size,), (world - 1) / 2))
    with pytest.raises(ValueError, match=r"tensor is Float \[2, 2\], expected a flat, real, contiguous one"):
        comm.all_reduce(torch.zeros(2, 2), mean=True)
    with pytest.raises(ValueError, match="no mean of Int"):
        comm.all_reduce(torch.zeros(2, dtype=torch.int32), mean=True)


class Net(nn.Module):
    """Has weights of several sizes and types, and a layer that not every forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 37)
        self.second = nn.Linear(37, 300, bias=False)
        self.optional = nn.Linear(300, 300)
        self.last = nn.Linear(300, 5, dtype=torch.bfloat16)

    def forward(self, x: Tensor, use_optional: bool) -> Tensor:
        x = self.second(self.first(x).relu())
        return self.last((self.optional(x) if use_optional else x).bfloat16()).float()


def trains_as_torch() -> None:
    torch.manual_seed(dist.get_rank())
    theirs = TorchDDP(Net(), find_unused_parameters=True)
    net = Net()
    ours = DDP(net, find_unused_parameters=True, transport="shm", **SMALL_BUCKETS)
    net.load_state_dict(theirs.module.state_dict())
    assert transport_of(ours) == "shm"
    for step in range(6):
        use_optional = step % 3 != 0 and (step % 3 == 1 or dist.get_rank() == 0)
        batches = [torch.randn(4, 10) for _ in range(2)]
        for model in (ours, theirs):
            model.zero_grad(set_to_none=step % 2 == 0)
            with model.no_sync():
                model(batches[0], use_optional).pow(2).sum().backward()
            model(batches[1], use_optional).pow(2).sum().backward()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                tolerance = 2e-2 if a.dtype == torch.bfloat16 else 1e-4
                torch.testing.assert_close(
                    a.grad, b.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_gradients_are_torchs(on_some_ranks: OnRanks) -> None:
    on_some_ranks(trains_as_torch)


def dawdling_ranks() -> None:
    """Lets any rank be the last to start a bucket, and the first to write the next step's gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ours = DDP(Products(*WEIGHTS), transport="shm", **SMALL_BUCKETS)
    weights = ours.module.weights
    dawdle_in_hooks(weights)
    for step in range(150):
        # Sums of small integers are exact in every order.
        inputs = [torch.full_like(w, (step * 7 + i * 3) % 64 + 1) for i, w in enumerate(weights)]
        ours.zero_grad(set_to_none=step % 2 == 0)
        ours(*[x * (rank + 1) for x in inputs]).backward()
        for weight, x in zip(weights, inputs, strict=True):
            expected = x * (world * (world + 1) // 2) * torch.tensor(1 / world)
            assert torch.equal(weight.grad, expected), f"step {step}, {weight.numel()} elements"


def test_steps_on_ranks_that_dawdle(on_some_ranks: OnRanks) -> None:
    on_some_ranks(dawdling_ranks)


def entries(folder: str) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


def wait_for_files(count: int) -> None:
    """Waits until so many files are open, because a thread that watches ranks opens one at times."""
    wait_until(lambda: len(entries("/proc/self/fd")) == count, f"moment with {count} open files")


def shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:drivetrain")


@run_on(2)
def test_leaves_no_memory_and_no_file() -> None:
    DDP(nn.Linear(2, 2), report_hang_after=0)  # makes the group's board of tags, which stays
    gc.collect()
    dist.barrier()
    files = min(len(entries("/proc/self/fd")) for _ in range(100))  # a thread of an earlier model opens one at times
    mappings = shared_mappings()  # torch.compile's caches keep models of before
    for _ in range(3):
        net = Products(*WEIGHTS)
        ours = DDP(net, transport="shm", report_hang_after=0)
        ours(*[torch.ones_like(w) for w in net.weights]).backward()
        kept = net.weights[2].grad
        world = dist.get_world_size()
        assert shared_mappings() == mappings + 2 * world  # control block and gradient buffer of every rank
        # Each rank has a pidfd of every rank, and its own memory for forked children, but no other rank's.
        wait_for_files(files + world + 2)
        del ours, net
        gc.collect()
        assert shared_mappings() == mappings + 1  # A gradient keeps this rank's buffer mapped.
        dist.barrier()
        assert (kept == 1).all()
        del kept
        assert shared_mappings() == mappings
    wait_for_files(files)


# ---- Forked children.


def shared_ddp(module: nn.Module) -> DDP:
    return DDP(module, transport="shm")


@pytest.mark.parametrize("wrap", [TorchDDP, shared_ddp], ids=["torch", "drivetrain"])
@run_on(2)
def test_a_forked_child_has_gradients_of_its_own(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Linear(4, 3)
    model = wrap(net)
    x = torch.full((1, 4), 1.0 + dist.get_rank())
    model(x).sum().backward()
    dist.barrier()
    assert (net.weight.grad == 1.5).all()

    def read_and_write(depth: int) -> None:
        assert (net.weight.grad == 1.5 + depth).all()
        net.weight.grad += 1
        assert (net.weight.grad == 2.5 + depth).all()

    def in_child() -> None:
        read_and_write(0)
        assert status_of_fork(lambda: read_and_write(1)) == 0
        assert (net.weight.grad == 2.5).all()

    assert status_of_fork(in_child) == 0
    assert (net.weight.grad == 1.5).all()

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have children now
    seen = list(DataLoader(WritesGradients(net.weight), num_workers=1, multiprocessing_context="fork"))
    assert [value.item() for value in seen] == [1.5, 7.0]
    assert (net.weight.grad == 1.5).all()

    model.zero_grad()
    model(2 * x).sum().backward()
    assert (net.weight.grad == 3).all()


class WritesGradients(Dataset[float]):
    """Returns a gradient as a data loader's worker sees it before and after the worker writes it."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        assert self._weight.grad is not None
        found = self._weight.grad.mean().item()
        self._weight.grad.fill_(7)
        return found


def status_of_fork(child: Callable[[], None]) -> int:
    """Returns 0 if a forked process runs `child` without an error."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        except BaseException:  # everything: the parent goes on, and this process must not
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@run_on(2)
def test_a_forked_child_takes_no_part_in_reductions() -> None:
    net = nn.Linear(3, 3)
    model = DDP(net, transport="shm")

    def child() -> None:
        with pytest.raises(RuntimeError, match=rf"was forked from rank {dist.get_rank()}, and only the process that"):
            model(torch.ones(1, 3)).sum().backward()

    assert status_of_fork(child) == 0
    model(torch.ones(1, 3)).sum().backward()
    assert (net.weight.grad == 1).all()


def deleted_early() -> str:
    ours = DDP(nn.Linear(3, 3), transport="shm")
    if dist.get_rank() == 1:
        return ""
    backward = ours(torch.ones(1, 3)).sum().backward
    with pytest.raises(RuntimeError, match="the all-reduce of bucket 0 of 1") as caught:
        backward()
    return str(caught.value)


def test_a_rank_that_deletes_its_wrapper(on_ranks: OnRanks) -> None:
    assert "rank 1 has already deleted its DistributedDataParallel" in on_ranks(deleted_early)[0]


KILLED_RANK = """
    import os, signal, torch, torch.distributed as dist
    from datetime import timedelta
    from torch import nn
    from drivetrain import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    model = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.02, transport="shm")
    for step in range(10_000):
        def die(grad):
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 3:
                shared = [line.split() for line in open("/proc/self/maps") if " rw-s " in line]
                print(*[line[5] for line in shared if line[-1] == "(deleted)" or line[5].startswith("/dev/shm")])
            return grad
        handle = model.module[3].weight.register_hook(die)
        model(torch.randn(4, 64)).sum().backward()
        handle.remove()
"""


def test_a_rank_that_is_killed_in_mid_step(tmp_path: Path) -> None:
    with script_ranks(tmp_path, KILLED_RANK, 2) as ranks:
        out, error = ranks[0].communicate(timeout=60)  # the group's own timeout is far longer
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert "the all-reduce of bucket" in error
    assert "rank 1 has died" in error
    # The memory has no name and is freed with the last process.
    assert out.split() == ["/memfd:drivetrain"] * 6  # the shared state, the buffers and the board of tags


# ---- Real limits that prevent one rank from sharing memory.


def limited(which: int, limit: int, bytes_at_once: int) -> list[str]:
    """Returns the warnings of wrapping while rank 1 has the resource limit. The gradients must still be right."""
    soft, hard = resource.getrlimit(which)
    DDP(nn.Linear(2, 2), report_hang_after=0)  # makes the group's board of tags, which stays
    gc.collect()
    mapped = shared_mappings()
    net = nn.Linear(bytes_at_once // 4, 1, bias=False)
    if dist.get_rank() == 1:
        resource.setrlimit(which, (limit, hard))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = DDP(net)
    finally:
        resource.setrlimit(which, (soft, hard))
    assert transport_of(ours) == "torch"
    ours(torch.full((1, bytes_at_once // 4), float(dist.get_rank() + 1))).sum().backward()
    assert (net.weight.grad == 1.5).all()
    assert shared_mappings() == mapped
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("limit", [16 << 10, 1 << 20], ids=["at the shared state", "at the buffer"])
def test_falls_back_where_files_are_limited(on_ranks: OnRanks, limit: int) -> None:
    warned, silent = on_ranks(limited, resource.RLIMIT_FSIZE, limit, 4 << 20)
    assert silent == []
    assert len(warned) == 1
    assert "through the process group, not through shared memory: rank 1: ftruncate" in warned[0]
    assert "File too large" in warned[0]


def full_memory() -> str:
    buffer = 256 << 20
    comm = shm_comm()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == 1:
        # The limit leaves room for this rank's own buffer, but not for a peer's.
        resource.setrlimit(resource.RLIMIT_AS, (in_use + buffer * 3 // 2, hard))
    try:
        flat = comm.allocate(buffer).view(torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert comm.name == "torch"
    assert not comm.averages
    flat[-1] = dist.get_rank() + 1
    comm.all_reduce(flat[-1000:], mean=False)
    assert flat[-1] == 3
    return comm.why_not


# It passes no filter of system calls to the kernel, and its own memory is within no limit of a program's.
real_kernel = pytest.mark.skipif("QEMU_CPU" in os.environ, reason="qemu emulates limits and filters of system calls")


@real_kernel
def test_falls_back_where_memory_is_limited(on_ranks: OnRanks) -> None:
    reasons = on_ranks(full_memory)
    assert reasons[0] == reasons[1]
    assert "rank 1: mmap" in reasons[0]
    assert "Cannot allocate memory" in reasons[0]


class SocketFilter(ctypes.Structure):
    """Mirrors struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def forbid(system_call: int, code: int) -> None:
    """Makes that system call fail with that code in this thread from now on, as in a sandbox."""
    load, jump, answer, allowed, failed = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    program = [(load, 0, 0, 0), (jump, 0, 1, system_call), (answer, 0, 0, failed | code), (answer, 0, 0, allowed)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_filter, filter_mode, ctypes.byref(SocketFilter(len(program), packed))) == 0


def in_a_sandbox(system_call: int, code: int) -> tuple[str, str]:
    """Returns the transport, and a warning, where rank 1 lacks that system call."""

    def train() -> tuple[str, str]:
        if dist.get_rank() == 1:
            forbid(system_call, code)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = DDP(nn.Linear(4, 3))
        model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
        assert (model.module.weight.grad == 1.5).all()
        return transport_of(model), "".join(str(warning.message) for warning in caught)

    with ThreadPoolExecutor(1) as thread:  # a filter ends with its thread
        return thread.submit(train).result()


PIDFD_OPEN, MEMFD_CREATE = 434, 279 if platform.machine() == "aarch64" else 319  # system calls


@real_kernel
def test_shares_memory_without_pidfd_open(on_ranks: OnRanks) -> None:
    assert on_ranks(in_a_sandbox, PIDFD_OPEN, errno.ENOSYS) == [("shm", "")] * 2


@real_kernel
def test_falls_back_without_memfd_create(on_ranks: OnRanks) -> None:
    (first, warned), second = on_ranks(in_a_sandbox, MEMFD_CREATE, errno.EPERM)
    assert (first, second) == ("torch", ("torch", ""))
    assert "not through shared memory: rank 1: memfd_create: Operation not permitted" in warned


NO_EXECUTABLE_FILES = """
    import os, sys, torch, torch.distributed as dist
    from pathlib import Path

    Path("/proc/sys/vm/memfd_noexec").write_text("2")
    from drivetrain import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    child = os.fork()
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[0] + ".store", 2), rank=int(child == 0), world_size=2)
    os.write(1, DDP(torch.nn.Linear(3, 3))._get_ddp_logging_data()["transport"].encode() + b"\\n")
    dist.destroy_process_group()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_shares_memory_where_no_file_may_be_executable(tmp_path: Path) -> None:
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    needs_namespaces(*namespace, "sh", "-c", "echo 2 > /proc/sys/vm/memfd_noexec")
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(NO_EXECUTABLE_FILES))
    run = subprocess.run([*namespace, sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "shm\nshm\n"), run.stdout + run.stderr


# ---- Containers that hide what identifies a host.


def where_hosts_are_not_told_apart(hidden: list[str]) -> list[str]:
    saved = {name: getattr(processes, name) for name in hidden}
    for name in hidden:
        setattr(processes, name, Path("/nowhere"))
    try:
        return [transport_of(DDP(nn.Linear(3, 3), transport=choice)) for choice in ("torch", "auto")]
    finally:
        for name, path in saved.items():
            setattr(processes, name, path)


def test_needs_no_boot_id(on_ranks: OnRanks) -> None:
    assert on_ranks(where_hosts_are_not_told_apart, ["BOOT_ID"]) == [["torch", "shm"]] * 2
    # Every rank counts as a host of its own if nothing identifies the host.
    assert on_ranks(where_hosts_are_not_told_apart, ["BOOT_ID", "NAMESPACES"]) == [["torch", "torch"]] * 2


SEPARATE_RANK = """
    import torch, torch.distributed as dist
    from drivetrain.ddp import transport
    from drivetrain import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    for is_mistaken in (False, True):
        if is_mistaken:  # hosts that look the same
            transport.host_identity = lambda: ("host",)
        model = DDP(torch.nn.Linear(3, 3), transport="shm")
        model(torch.ones(1, 3)).sum().backward()
        assert (model.module.weight.grad == 1).all()
        print(model._get_ddp_logging_data()["transport"])
    dist.destroy_process_group()
"""


def test_falls_back_between_containers(tmp_path: Path) -> None:
    unshare = ("unshare", "--pid", "--fork", "--kill-child")
    needs_namespaces(*unshare, "true")
    with script_ranks(tmp_path, SEPARATE_RANK, 2, started(warm_python(has_whole_end=True), prefix=unshare)) as ranks:
        results = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], results
    assert [out for out, _ in results] == ["torch\ntorch\n"] * 2
    assert results[0][1].count("RuntimeWarning") == 2
    assert "no two ranks are on the same host, in the same container" in results[0][1]
    assert re.search(
        r"not through shared memory: rank \d: (pidfd_open of process|/proc/|open of /proc/)", results[0][1]
    )
    assert "RuntimeWarning" not in results[1][1]


@run_on(2)
def test_choices() -> None:
    net = nn.Linear(3, 3)
    assert transport_of(DDP(net)) == "shm"
    assert transport_of(DDP(net, transport="torch")) == "torch"
    os.environ[transport.VARIABLE] = "torch"
    try:
        assert transport_of(DDP(net)) == "torch"
        assert transport_of(DDP(net, transport="shm")) == "shm"
        os.environ[transport.VARIABLE] = "pigeon"
        with pytest.raises(
            ValueError, match="DRIVETRAIN_TRANSPORT is 'pigeon', expected one of: 'auto', 'torch', 'shm'"
        ):
            DDP(net)
    finally:
        del os.environ[transport.VARIABLE]
    with pytest.raises(ValueError, match="transport is 'pigeon'"):
        DDP(net, transport="pigeon")
    mine = ["shm", "torch"][dist.get_rank()]
    with pytest.raises(RuntimeError, match="argument 'transport' differs: rank 0: 'shm'; rank 1: 'torch'"):
        DDP(net, transport=mine)
    model = DDP(net, transport=mine, init_sync=False)
    with pytest.raises(RuntimeError, match="same transport on every rank, but it differs: rank 0: 'shm'; rank 1: 'to"):
        model(torch.ones(1, 3)).sum().backward()


# ---- Resident memory.


def resident_shared_bytes() -> int:
    """Returns this process's resident bytes as the kernel counts them: a shared page counts in full."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssShmem:"))


def resident_beyond_own() -> list[float]:
    """Measures after steps in which ranks are late by turns, so that each sums for every other."""
    rank, world, buffer_bytes = dist.get_rank(), dist.get_world_size(), 12 << 20
    comm = shm_comm()
    before = resident_shared_bytes()
    flat = comm.allocate(buffer_bytes).view(torch.float32)
    found = []
    for step in range(2 * world):
        if step % world == rank:
            time.sleep(0.05)
        flat.fill_(rank + step)
        comm.all_reduce(flat, mean=False)
        assert (flat == world * step + world * (world - 1) // 2).all()
        found.append((resident_shared_bytes() - before) / buffer_bytes - 1)
    return found


def test_little_of_other_ranks_memory_is_resident(tmp_path: Path) -> None:
    pool = RankPool(8, tmp_path)
    try:
        for found in pool.run(resident_beyond_own):
            assert max(found) < 3.1, found  # of seven buffers
    finally:
        pool.close()


# ---- Ranks that are bound to cores before they construct the wrapper.


def spins_on(cores: list[list[int]]) -> bool:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[dist.get_rank()])
    try:
        return shm_comm().spins
    finally:
        os.sched_setaffinity(0, mine)


def test_ranks_spin_where_each_has_a_core(on_ranks: OnRanks) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    assert on_ranks(spins_on, [[first], [first]]) == [False, False]
    if not others:
        pytest.skip("one core alone here")
    assert on_ranks(spins_on, [[first], others[:1]]) == [True, True]
    assert on_ranks(spins_on, [[first, others[0]], [first]]) == [True, True]
