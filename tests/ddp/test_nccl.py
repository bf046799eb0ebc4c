"""Tests the NCCL transport over a fake libnccl on the CPU (tests/fake_nccl)."""

import copy
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pybind11
import pytest
import torch
import torch.distributed as dist
from shard_cases import OURS, Odd, expect_equal, train
from test_shard_scatter import Shapes, Sizes, assert_equal_bits
from torch import nn

import ddp_contract_cases as contract
from ddp_cases import (
    SMALL_BUCKETS,
    OnRanks,
    assert_equal_grads,
    assert_means,
    inputs,
    linear_chain,
    local_grads,
    make_net,
    mean_over_ranks,
    message_of,
    pair,
    step_alike,
)
from drivetrain import DistributedDataParallel as DDP
from drivetrain.ddp import transport
from ranks import run_on
from shared_builds import built_once, files_in
from warm_python import warm_python

BUILD_TIMEOUT_S = 600
TIMEOUT_S = 5.0  # of the fake's collectives, where none is to fail
SHORT_TIMEOUT_S = 0.5
GPU_SCRIPT_TIMEOUT_S = 120
LATEST = "22907"


# ---- The fakes.


def build(source: Path, folder: Path, *options: str) -> None:
    """Builds tests/fake_nccl, or skips the test where a header is missing."""
    if not transport.nccl_package():
        pytest.skip("no nccl.h: pip install --no-deps nvidia-nccl-cu13")
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc, and so no headers of CUDA")
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake, "no cmake: the Makefile installs it into the environment"
    include = Path(transport.nccl_package()).parent.parent / "include"
    for command in (
        [cmake, "-S", source / "tests/fake_nccl", "-B", folder, f"-DNCCL_INCLUDE_DIR={include}", *options],
        [cmake, "--build", folder, "--parallel", "2"],
    ):
        run = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="session")
def fakes() -> Path:
    """Returns the folder with the module `fake_nccl` and the libraries that it opens."""
    if torch.version.cuda is not None:
        pytest.skip("the CUDA runtime that this torch has loaded hides the fake one")
    options = {
        "TORCH_DIR": Path(torch.__file__).parent,
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    return built("fake_nccl", *defines)


def built(name: str, *options: str) -> Path:
    """Returns the folder with the build of tests/fake_nccl that has these options."""
    repository = Path(__file__).parents[2]
    sources = files_in(repository / "csrc", repository / "tests/fake_nccl")
    return built_once(name, [*sources, Path(__file__)], lambda folder: build(repository, folder, *options))


def with_sanitizer(sanitizer: str) -> Path:
    return built(f"fake_nccl-{sanitizer.split(',')[0]}", f"-DDRIVETRAIN_SANITIZE={sanitizer}")


@contextmanager
def faked(fakes: Path, version: str = LATEST, fault: str = "", timeout_s: float = TIMEOUT_S) -> Iterator[Callable]:
    """Makes every DDP of this rank use the fake, and yields a function that reads the library's log."""
    gc.collect()  # models of earlier tests, which log how they end
    sys.path.insert(0, str(fakes))
    import fake_nccl

    log = fakes / f"log-{os.getpid()}-{time.monotonic_ns()}"
    log.touch()
    os.environ.update(FAKE_NCCL_LOG=str(log), FAKE_NCCL_FAULT=fault)
    original = transport.make_comm
    library = str(fakes / f"libnccl_{version}.so")
    transport.make_comm = lambda choice, group, *_: fake_nccl.nccl_comm(library, group.group_name, timeout_s)
    try:
        yield lambda: log.read_text().splitlines()
    finally:
        transport.make_comm = original
        sys.path.remove(str(fakes))
        log.unlink()
        os.unsetenv("FAKE_NCCL_FREED")
        del os.environ["FAKE_NCCL_LOG"], os.environ["FAKE_NCCL_FAULT"]


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_communicator_compiles(sanitizer: str) -> None:
    with_sanitizer(sanitizer)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_communicator_is_clean(sanitizer: str) -> None:
    program = with_sanitizer(sanitizer) / "communicator_tests"
    run = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "communicator tests passed" in run.stdout


# ---- Gradients.


def transport_of(model: DDP) -> str:
    return str(model._get_ddp_logging_data()["transport"])


def life_of_a_model(fakes: Path) -> list[str]:
    with faked(fakes) as log:
        ours, theirs = pair(make_net(), **SMALL_BUCKETS)
        assert transport_of(ours) == "nccl 2.29.7, registered window"
        step_alike(ours, theirs, steps=3)
        assert len(ours.reducer.buckets()) > 2
        del ours
        gc.collect()
        return log()


def test_life_of_a_model(on_ranks: OnRanks, fakes: Path) -> None:
    logs = on_ranks(life_of_a_model, fakes)
    assert [log.count("GetUniqueId") for log in logs] == [1, 0]
    for rank, log in enumerate(logs):
        calls = [line for line in log if line != "GetUniqueId"]
        assert calls[0] == f"Init rank {rank} of 2"
        kind, size = calls[1].split()
        assert kind == "MemAlloc"
        assert calls[2] == f"WindowRegister {size}"
        # All buckets are small, so that every step has one group, besides the exchanges between ranks.
        groups = [line for line in calls if line.startswith("Group: float sum")]
        assert len(groups) == 3
        assert all(group.count("sum") > 2 for group in groups)
        assert calls[-4:] == ["WindowDeregister", "Finalize", "Destroy", "MemFree"]
    without_rank = [[line for line in log if not line.startswith(("GetUniqueId", "Init"))] for log in logs]
    assert without_rank[0] == without_rank[1]


@run_on(2)
def test_the_profiler_sees_buckets_and_launches(fakes: Path) -> None:
    with faked(fakes):
        model = DDP(make_net(), **SMALL_BUCKETS)
        for _ in range(6):
            model(inputs()).pow(2).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(inputs()).pow(2).sum().backward()
        path = fakes / f"trace-{os.getpid()}.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        path.unlink()
    buckets = model.reducer.buckets()
    all_reduces = [event for event in profile.events() if event.name == "nccl:all_reduce"]
    assert len(all_reduces) == len(buckets) > 1
    assert all(event.is_async for event in all_reduces)
    # Collectives that begin together are one launch, under which a device's profiler finds the kernels.
    (comms,) = (event["args"] for event in events if event.get("name") == "record_param_comms")
    assert comms["Collective name"] == "allreduce_coalesced"
    assert comms["Process Group Ranks"] == "[0, 1]"
    assert 4 * comms["In msg nelems"] >= sum(bucket.bytes for bucket in buckets)


def large_and_small_buckets(fakes: Path) -> list[str]:
    """Mixes buckets of 400 KiB and of a few bytes: a small one begins with a later one."""
    with faked(fakes) as log:
        torch.manual_seed(dist.get_rank())
        layers = [nn.Linear(1, 8), nn.Linear(8, 100), nn.Linear(100, 1000), nn.Linear(1000, 8), nn.Linear(8, 2)]
        ours, theirs = pair(nn.Sequential(*layers), **SMALL_BUCKETS)
        for model in (ours, theirs):
            model(torch.ones(3, 1)).pow(2).sum().backward()
        assert_equal_grads(ours, theirs)
        return [line for line in log() if line.startswith("Group: float sum")]


def test_only_small_buckets_begin_together(on_ranks: OnRanks, fakes: Path) -> None:
    logs = on_ranks(large_and_small_buckets, fakes)
    assert logs[0] == logs[1]
    sizes = [[int(part.split()[-1]) for part in line.split(",")] for line in logs[0]]
    assert len(sizes) > 1
    assert max(map(len, sizes)) > 1
    for group in sizes[:-1]:
        assert 4 * sum(group) >= 256 * 1024
        assert 4 * sum(group[:-1]) < 256 * 1024


class Gates(nn.Module):
    """Computes its gradients element by element, so that their bits do not depend on their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.linspace(-1, 1, 500), torch.linspace(2, 3, 500)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weights
        return torch.tanh(x * first) * second


@pytest.mark.parametrize("how", ["fresh", "kept", "accumulated", "create_graph"])
@run_on(3)
def test_sums_in_torchs_bits(fakes: Path, how: str) -> None:
    """torch divides before it sums, which over three ranks rounds differently from dividing the sum."""
    with faked(fakes) as log:
        model = DDP(Gates(), bucket_cap_mb=1e-3)
        plain = copy.deepcopy(model.module)
        for step in range(3):
            torch.manual_seed(dist.get_world_size() * step + dist.get_rank())
            batches = [torch.randn(500) for _ in range(2 if how == "accumulated" else 1)]
            model.zero_grad(set_to_none=how != "kept")
            plain.zero_grad()
            for x in batches:
                plain(x).pow(2).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what create_graph=True leaves out
                with model.no_sync():
                    for x in batches[:-1]:
                        model(x).pow(2).sum().backward()
                model(batches[-1]).pow(2).sum().backward(create_graph=how == "create_graph")
            local = [param.grad for param in plain.parameters()]
            for param, grad in zip(model.parameters(), local, strict=True):
                everyones = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, grad)
                total = torch.zeros_like(grad)
                for one in everyones:
                    total += one.mul(1 / dist.get_world_size())
                assert torch.equal(param.grad, total)
        assert not [line for line in log() if "mean" in line]  # ncclAvg switches off NVLS and symmetric kernels


def buckets_that_fill_in_different_orders(fakes: Path) -> list[str]:
    """Leaves a parameter of rank 1's first bucket out of its forward, which the end of its backward finds."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = [0, 1, 2, 3] if dist.get_rank() == 0 else [3, 1, 0]
            for i in order:
                x = self.layers[i](x)
            return x

    with faked(fakes) as log:
        torch.manual_seed(0)
        ours, theirs = pair(Branches(), find_unused_parameters=True, **SMALL_BUCKETS)
        for _ in range(3):
            x = torch.randn(3, 4)
            for model in (ours, theirs):
                model.zero_grad()
                model(x).pow(2).sum().backward()
            assert_equal_grads(ours, theirs)
        return [line for line in log() if line.startswith("Group: ")]


def test_ranks_group_alike_whatever_fills_first(on_ranks: OnRanks, fakes: Path) -> None:
    logs = on_ranks(buckets_that_fill_in_different_orders, fakes)
    assert logs[0] == logs[1]


def over_the_fake(fakes: Path, function: Callable[..., None], *args: Any) -> None:
    with faked(fakes) as log:
        function(*args)
        assert any(line.startswith("Group: ") for line in log())


@pytest.mark.parametrize(
    "call",
    [
        (contract.flag_set_after_forward,),
        (contract.several_backwards_with_unused_parameters,),
        (contract.static_graph_and_no_sync,),
        (contract.weighted_mean, False),
        (contract.weighted_mean, True),
        (contract.diverged_replicas,),
        (contract.sparse_gradients,),
        (contract.uneven_sparse,),
        (contract.measured_order,),
        (contract.gradients_behind_another_tensor,),
    ],
    ids=lambda call: call[0].__name__,
)
def test_keeps_the_contract(on_ranks: OnRanks, fakes: Path, call: tuple[Any, ...]) -> None:
    on_ranks(over_the_fake, fakes, *call)


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(inputs()).pow(2).sum().backward()


def interrupt(_: torch.Tensor) -> torch.Tensor:
    raise InterruptedError


def start_a_step_again() -> str:
    """Starts a step again on rank 1, while rank 0 has started later buckets of the same size, which no host awaits."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4))), bucket_cap_mb=1e-6)
    for _ in range(3):
        step(model)
    if dist.get_rank() == 1:
        handle = model.module[1].weight.register_hook(interrupt)
        with pytest.raises(InterruptedError):
            step(model)
        handle.remove()
        model.reducer._reset_state()
    return message_of(RuntimeError, lambda: [step(model) for _ in range(4)])


def a_step_started_again(fakes: Path) -> str:
    with faked(fakes):
        message = start_a_step_again()
        gc.collect()
        return message


def test_collectives_that_do_not_belong_together(on_ranks: OnRanks, fakes: Path) -> None:
    for message in on_ranks(a_step_started_again, fakes):
        assert "the ranks start different collectives: " in message
        assert "bucket 2 in synchronized step 4" in message
        assert "bucket 0 in synchronized step 4" in message


# ---- Sharded wrappers.


def calls_in(log: list[str]) -> set[str]:
    """Returns the kinds of calls in groups, such as "float scatter"."""
    groups = [line.removeprefix("Group: ").split(", ") for line in log if line.startswith("Group: ")]
    return {call.rpartition(" ")[0] for calls in groups for call in calls}


def scattered_gradients(fakes: Path) -> list[list[str]]:
    """Returns the kinds of calls for gradients of rows that ranks divide evenly, unevenly, and hardly."""
    found = []
    shapes: list[Shapes] = [((6000, 64), (600, 100)), ((), (1001, 513), (2, 90000)), ((30,), (7, 3), ())]
    for sizes in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            with faked(fakes) as log:
                nets = [DDP(Sizes(dtype, sizes), shard=mode, bucket_cap_mb=9.0) for mode in (None, "gradients")]
                assert_equal_bits(nets[0], nets[1], (sizes, dtype))
                found.append(sorted(call for call in calls_in(log()) if call.split()[0] in ("float", "half")))
                del nets
    return found


def test_gradients_are_scattered(on_ranks: OnRanks, on_three_ranks: OnRanks, fakes: Path) -> None:
    expected = [
        *(["float scatter", "float sum"], ["half scatter", "half sum"]),  # "sum" is the wrapper's without `shard`
        *(["float reduce", "float scatter", "float sum"], ["half reduce", "half scatter", "half sum"]),
        *(["float sum"], ["half sum"]),
    ]
    for found in on_ranks(scattered_gradients, fakes):
        assert found == expected
    expected[2:4] = ["float reduce", "float sum"], ["half reduce", "half sum"]
    for found in on_three_ranks(scattered_gradients, fakes):
        assert found == expected


def sharded_training(fakes: Path) -> list[str]:
    with faked(fakes) as log:
        for name in ("AdamW", "SGD"):
            expected, _ = train(OURS[name], Odd())
            for mode in ("optimizer", "gradients"):
                for overlaps in (False, True):
                    found, _ = train(OURS[name], Odd(), shard=mode, overlap_gather=overlaps)
                    expect_equal(found, expected, (name, mode, overlaps))
        return sorted(calls_in(log()) & {"int gather", "int broadcast"})


def test_sharded_wrappers_have_the_bits_of_unsharded_ones(
    on_ranks: OnRanks, on_three_ranks: OnRanks, fakes: Path
) -> None:
    for call in (on_ranks, on_three_ranks):
        assert call(sharded_training, fakes) == [["int broadcast", "int gather"]] * (2 if call is on_ranks else 3)


def refused_scatter(fakes: Path) -> str:
    with faked(fakes, fault="float scatter 192000 is refused"):
        model = DDP(Sizes(torch.float32, ((6000, 64),)), shard="gradients")
        return message_of(RuntimeError, lambda: model(0).backward())


def test_a_refused_scatter_is_an_error(on_ranks: OnRanks, fakes: Path) -> None:
    for message in on_ranks(refused_scatter, fakes):
        assert "ncclReduceScatter failed with NCCL error 5" in message
        assert "bucket 0 of 1 [weights.0]" in message


# ---- Other versions of the library.


def construct(fakes: Path, version: str, fault: str) -> list[str]:
    with faked(fakes, version, fault) as log:
        model = DDP(make_net())
        model(inputs()).sum().backward()
        return [transport_of(model), *log()]


@pytest.mark.parametrize(
    ("version", "fault", "name", "calls"),
    [
        ("22907", "no window", "nccl 2.29.7, registered buffer", ["MemAlloc", "WindowRegister", "Register"]),
        ("22809", "", "nccl 2.28.9, registered buffer", ["MemAlloc", "Register"]),
        ("22104", "", "nccl 2.21.4, registered buffer", ["MemAlloc", "Register"]),
        ("21805", "", "nccl 2.18.5", []),
    ],
)
def test_memory_is_registered_as_well_as_the_library_can(
    on_ranks: OnRanks, fakes: Path, version: str, fault: str, name: str, calls: list[str]
) -> None:
    for said, *log in on_ranks(construct, fakes, version, fault):
        assert said == name
        assert [line.split()[0] for line in log if line.startswith(("Mem", "Window", "Register"))] == calls


def wait_for_window(fakes: Path) -> str:
    """Registers nothing on rank 1: a call that rank 0's thread has begun must not count as finished."""
    with faked(fakes, fault="window hangs" if dist.get_rank() == 1 else "", timeout_s=SHORT_TIMEOUT_S):
        return message_of(RuntimeError, lambda: DDP(make_net()))


def test_a_registration_is_waited_for(on_ranks: OnRanks, fakes: Path) -> None:
    for message in on_ranks(wait_for_window, fakes):
        assert "ncclCommWindowRegister of " in message
        assert "bytes (every rank must register as many) did not end within the timeout of 0.5 s" in message


# ---- Memory.


def construct_in_full_memory(fakes: Path) -> list[str]:
    with faked(fakes, fault="full memory") as log:
        import fake_nccl

        before, _ = fake_nccl.nccl_memory_bytes()
        model = DDP(make_net())
        model(inputs()).sum().backward()
        now, most = fake_nccl.nccl_memory_bytes()
        assert most >= now == before + model.reducer.buffer_bytes()
        return [transport_of(model), *log()]


def test_torchs_cache_is_released_for_nccls_memory(on_ranks: OnRanks, fakes: Path) -> None:
    for said, *log in on_ranks(construct_in_full_memory, fakes):
        assert said == "nccl 2.29.7, registered window"
        calls = [line.split()[0] for line in log if line.startswith(("Mem", "Window", "Register"))]
        assert calls == ["MemAlloc", "MemAlloc", "WindowRegister"]


def free_from_python(fakes: Path, is_used: bool) -> str:
    with faked(fakes) as log:
        model = DDP(make_net())
        if is_used:
            model(inputs()).sum().backward()
            model.zero_grad()
        del model
        gc.collect()
        return log()[-1]


@pytest.mark.parametrize("is_used", [False, True])
def test_memory_is_freed_without_the_gil(on_ranks: OnRanks, fakes: Path, is_used: bool) -> None:
    """Freeing memory waits for the device, for which other threads may need the GIL.

    The fake therefore ends a process that frees memory with the GIL held.
    """
    assert on_ranks(free_from_python, fakes, is_used) == ["MemFree", "MemFree"]


ENDS_AFTER_A_COLLECTIVE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], 2), rank=rank, world_size=2)
import fake_nccl, drivetrain
comm = fake_nccl.nccl_comm(sys.argv[1] + "/libnccl_22907.so", dist.group.WORLD.group_name, 500.0)
flat = comm.allocate(100003, "cpu")
flat[-1] = 3
comm.all_reduce(flat, False)
print(flat[0].item(), flush=True)
del flat
"""


def test_python_may_end_right_after_a_collective(fakes: Path, tmp_path: Path) -> None:
    """Checks that the communicator's thread frees memory without the GIL: asking for it would end the process."""
    command = [warm_python(has_whole_end=True), "-c", ENDS_AFTER_A_COLLECTIVE, str(fakes)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=GPU_SCRIPT_TIMEOUT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], errors


def one_rank_without_memory(fakes: Path) -> list[str]:
    with (
        faked(fakes, fault="no memory" if dist.get_rank() == 1 else "") as log,
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        ours, theirs = pair(make_net(), **SMALL_BUCKETS)
        step_alike(ours, theirs, steps=3)
        assert transport_of(ours) == "nccl 2.29.7, unregistered"
        assert not [line for line in log() if "Register" in line]
        return [str(warning.message) for warning in w if "torch's allocator" in str(warning.message)]


def test_ranks_agree_where_one_has_too_little_memory(on_ranks: OnRanks, fakes: Path) -> None:
    (message,), others = on_ranks(one_rank_without_memory, fakes)
    assert "rank 1: NCCL 2.29.7, rank 1 of 2: ncclMemAlloc of " in message
    assert "bytes failed with NCCL error 1" in message
    assert "Leave more device memory free" in message
    assert others == []


def too_old(fakes: Path) -> str:
    with faked(fakes, "21300"):
        return message_of(RuntimeError, lambda: DDP(make_net()))


def test_a_library_that_is_too_old_is_named(on_ranks: OnRanks, fakes: Path) -> None:
    for message in on_ranks(too_old, fakes):
        assert f"NCCL 2.13.0 at {fakes}/libnccl_21300.so has no ncclCommInitRankConfig" in message
        assert "install NCCL 2.14 or newer" in message


def on_the_cpu() -> str:
    return message_of(RuntimeError, lambda: DDP(make_net(), transport="nccl"))


def test_refused_for_parameters_on_the_cpu(on_ranks: OnRanks) -> None:
    for message in on_ranks(on_the_cpu):
        assert (
            "transport 'nccl' cannot be used, on rank 0: the parameters are on cpu, expected a CUDA device" in message
        )


# ---- What goes wrong.


def alone(fakes: Path, rank: int) -> str:
    """Lets only that rank come."""
    if dist.get_rank() != rank:
        return ""
    with faked(fakes, timeout_s=SHORT_TIMEOUT_S):
        model = DDP(make_net(), init_sync=False, broadcast_buffers=False)
        return message_of(RuntimeError, lambda: model(inputs()).sum().backward())


def test_a_rank_that_does_not_come(on_ranks: OnRanks, fakes: Path) -> None:
    message = on_ranks(alone, fakes, 0)[0]
    assert "ncclCommInitRankConfig (meeting the other ranks) did not end within the timeout of 0.5 s" in message
    message = on_ranks(alone, fakes, 1)[1]
    assert "rank 1 did not get the NCCL id of rank 0 from the process group's store within 0.5 s" in message


def failing_step(fakes: Path, fault: str) -> tuple[str, list[str]]:
    with faked(fakes, fault=fault, timeout_s=SHORT_TIMEOUT_S) as log:
        model = DDP(linear_chain(), bucket_cap_mb=1e-4)
        loss = model(inputs()).sum()
        message = message_of(RuntimeError, loss.backward)
        loss = model(inputs()).sum()
        assert message.partition("reports: ")[2] in message_of(RuntimeError, loss.backward)  # and it stays failed
        model.zero_grad()
        del model, loss
        gc.collect()
        return message, log()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("float sum 96 errors", "failed with NCCL error 6 (remote process exited or there was a network error)"),
        ("float sum 96 hangs", "group 1 of collectives (3 of them, the first of "),
        ("float sum 96 is refused", "ncclAllReduce failed with NCCL error 5 (fake error): fake NCCL refuses it"),
    ],
)
def test_a_failure_names_the_bucket_and_its_parameters(on_ranks: OnRanks, fakes: Path, fault: str, words: str) -> None:
    for message, log in on_ranks(failing_step, fakes, fault):
        assert "drivetrain: the all-reduce of bucket 0 of 3 [" in message
        assert "4.weight" in message
        assert "failed in synchronized step 1" in message
        assert words in message
        assert log.count("Abort") == 1
        assert "Destroy" not in log


def step_left_out(fakes: Path, version: str) -> str:
    """Leaves out a step on rank 1. Below NCCL 2.29.7, an abort would wait for rank 0's kernel on a window."""
    with faked(fakes, version, timeout_s=SHORT_TIMEOUT_S) as log:
        model = DDP(linear_chain())
        if dist.get_rank() == 1:
            return ""
        message = message_of(RuntimeError, model(inputs()).sum().backward)
        del model
        gc.collect()
        assert log()[-1] == "MemFree"
        assert "Aborted" in log()
        return message


@pytest.mark.parametrize("version", [LATEST, "22809"])
def test_a_rank_that_leaves_a_step_out(on_ranks: OnRanks, fakes: Path, version: str) -> None:
    message = on_ranks(step_left_out, fakes, version)[0]
    assert "did not end within the timeout of 0.5 s" in message


@run_on(2)
def test_buckets_held_back_in_a_step_that_was_given_up(fakes: Path) -> None:
    """Gives up a step after buckets were held back: these must not be sent with the next step's."""
    with faked(fakes) as log:
        model = DDP(linear_chain(), bucket_cap_mb=1e-4)
        cut = model.module[2].register_forward_pre_hook(lambda module, args: args[0].detach())
        model(inputs()).sum().backward()
        cut.remove()
        assert "0.weight, 0.bias" in message_of(RuntimeError, lambda: model(inputs()))
        model.reducer._reset_state()
        model.zero_grad()
        x = inputs()
        expected = mean_over_ranks(local_grads(model, x))
        model(x).pow(2).sum().backward()
        assert_means(model, expected)
        assert sum(line.startswith("Group: float sum") for line in log()) == 1
