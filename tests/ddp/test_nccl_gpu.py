"""Tests transports over NCCL on GPUs, or on the stand-in of tests/fake_cuda: gradients, records and lost ranks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import nccl_ranks
from warm_python import warm_python

pytestmark = pytest.mark.gpu

GPU_SCRIPT_TIMEOUT_S = 120
# A driver of CUDA may refuse to work in forks; the stand-in does not.
ON_THE_STAND_IN = "FAKE_CUDA_ON_ERROR" in os.environ

GPU_PREAMBLE = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from drivetrain import DistributedDataParallel as DDP
from drivetrain import _C
from drivetrain.ddp import transport

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group(
    "BACKEND", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=15)
)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).cuda()
"""


def on_gpu(
    script: str, size: int, folder: Path, awaited: int | None = None, backend: str = "cpu:gloo,cuda:nccl"
) -> list[tuple[int, str]]:
    """Runs the script on ranks; returns exit code and output of all or of the first."""
    code = textwrap.dedent(GPU_PREAMBLE.replace("BACKEND", backend)) + textwrap.dedent(script)
    return run_ranks(["-c", code], size, folder, awaited=awaited)


def run_ranks(
    command: list[str], size: int, folder: Path, *arguments: str, awaited: int | None = None
) -> list[tuple[int, str]]:
    """Runs Python on ranks, which share a GPU if they must; adds rank, size and the store's path to the arguments."""
    python = warm_python(has_whole_end=True) if ON_THE_STAND_IN else sys.executable
    ranks = []
    for rank in range(size):
        environment = dict(os.environ)
        environment["FAKE_NCCL_LOG"] = str(folder / f"log-{rank}")  # of tests/fake_nccl, where that is NCCL
        if size > torch.cuda.device_count():
            # NCCL then takes each rank for a host of its own. Otherwise it refuses two ranks on one GPU.
            environment.update(NCCL_HOSTID=f"host-{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1")
        whole = [python, *command, str(rank), str(size), str(folder / "store"), *arguments]
        ranks.append(
            subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    deadline = time.monotonic() + GPU_SCRIPT_TIMEOUT_S * (3 if command[0] != "-c" else 1)
    try:
        results = []
        for process in ranks[:awaited]:
            output, _ = process.communicate(timeout=deadline - time.monotonic())
            results.append((process.returncode, output))
            if "Duplicate GPU detected" in output:
                pytest.xfail("this NCCL refuses two ranks on one GPU")
        return results
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_torchs_class_under_a_pure_nccl_group(
    tmp_path: Path, repository: Path, ranks: int, carrier: str
) -> None:
    """Runs the cases of tests/nccl_ranks.py in a group that takes no CPU tensors."""
    results = run_ranks([str(repository / "tests/nccl_ranks.py")], ranks, tmp_path, carrier)
    for code, output in results:
        assert code == 0, output
        assert output.count("ok ") == len(nccl_ranks.cases), output
    for log in tmp_path.glob("log-*"):  # of the stand-in
        calls = log.read_text().splitlines()
        assert not [call for call in calls if "mean" in call]
        registered = [call.split()[1] for call in calls if call.startswith(("WindowRegister", "Register"))]
        assert [call.split()[1] for call in calls if call.startswith("MemAlloc")] == registered
        assert bool(registered) == (carrier == "nccl")


def train_example(repository: Path, folder: Path, engine: str, carrier: str) -> list[float]:
    """Returns the losses of five steps of examples/gpt on at most two GPUs."""
    ranks = min(2, torch.cuda.device_count())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(repository / "examples/gpt/train.py"), "--device=cuda", "--preset=tiny", "--steps=5"]
    command += ["--batch-size=4", "--sample-bytes=0", f"--engine={engine}", f"--json={folder / engine}"]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "DRIVETRAIN_TRANSPORT": carrier}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + 3 * GPU_SCRIPT_TIMEOUT_S
    try:
        for process in processes:
            output, _ = process.communicate(timeout=deadline - time.monotonic())
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return list(json.loads((folder / engine).read_text())["losses"])


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
def test_the_example_trains_as_with_torchs_class(repository: Path, tmp_path: Path, carrier: str) -> None:
    ours = train_example(repository, tmp_path, "drivetrain", carrier)
    assert len(ours) == 5
    assert ours == pytest.approx(train_example(repository, tmp_path, "torch", "auto"), abs=1e-4)


def test_one_rank_on_a_gpu(tmp_path: Path) -> None:
    script = """
    import copy
    plain, model = copy.deepcopy(net), DDP(net, transport="nccl", bucket_cap_mb=0.1)
    print(model._get_ddp_logging_data()["transport"])
    for _ in range(3):
        x = torch.randn(8, 10, device="cuda")
        for m in (plain, model):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        for p, q in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad, p.grad)
    path, version = _C.nccl_library("")
    comm = _C.nccl_comm(process_group=dist.group.WORLD.group_name, device="cuda:0", timeout_s=15, fallback="")
    flat = comm.allocate(4096, "cuda:0")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        values = flat.view(dtype)
        values.copy_(torch.arange(values.numel()))
        before = values.clone()
        comm.all_reduce(values, mean=False)
        assert torch.equal(values, before)
    del comm
    assert torch.equal(values, before)  # memory outlives its communicator
    del flat, values, model
    print("fine with", version)
    """
    ((code, output),) = on_gpu(script, 1, tmp_path)
    assert code == 0, output
    assert "nccl 2." in output
    assert "registered" in output
    assert "fine with 2." in output


@pytest.mark.parametrize("ranks", sorted({2, max(2, torch.cuda.device_count())}))
def test_ranks_agree_with_the_process_group(tmp_path: Path, ranks: int) -> None:
    script = """
    import copy
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    model = DDP(net, transport="nccl", bucket_cap_mb=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        x = torch.randn(8, 10, device="cuda")
        for m in (theirs, model):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        for p, q in zip(theirs.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6)
            others = q.grad.clone()
            dist.broadcast(others, 0)
            assert torch.equal(q.grad, others)
    model.zero_grad()  # no weight counts the gradients of the loop
    model.backward(model(x).pow(2).sum(), weight=1 + rank)
    print("fine")
    """
    for code, output in on_gpu(script, ranks, tmp_path):
        assert code == 0, output
        assert "fine" in output


@pytest.mark.parametrize(
    ("how", "links"), [(signal.SIGKILL, "NVLink"), (signal.SIGKILL, "sockets"), (signal.SIGSTOP, "NVLink")]
)
def test_a_lost_rank_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, links: str
) -> None:
    if links == "sockets":
        monkeypatch.setenv("FAKE_NCCL_SOCKETS", "1")  # NCCL itself notices the end of a process
    script = f"""
    model = DDP(net, transport="nccl", bucket_cap_mb=0.1, report_hang_after=2)
    for step in range(100000):
        if step == 20:
            time.sleep(2)  # until each rank has received the other's progress
            begin = time.monotonic()
        if rank == 1 and step == 20:
            os.kill(os.getpid(), {int(how)})
        try:
            model(torch.randn(8, 10, device="cuda")).sum().backward()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"after {{time.monotonic() - begin:.0f}} s: {{error}}")
            break
    os._exit(0)
    """
    ((code, output),) = on_gpu(script, 2, tmp_path, awaited=1)
    assert code == 0, output
    if how == signal.SIGKILL:
        assert re.search(r"Rank 1 has ended: its process \d+ is gone", output), output
        waited = re.search(r"^after (\d+) s", output, re.MULTILINE)
        assert waited, output
        assert int(waited[1]) < 10, output  # the group's timeout is 15 s
    if how == signal.SIGSTOP or links == "sockets":
        # The next reduction raises the loss: the first, or a later one that started before it was noticed.
        assert re.search(r"the all-reduce of bucket \d of \d \[[024]\.(weight|bias)\b", output), output


NVTX_SCRIPT = """
    inputs = torch.randn(8, 10, device="cuda")
    model = DDP(net, transport={transport!r}, bucket_cap_mb=0.1)
    for _ in range(4):
        model(inputs).sum().backward()
    os.environ["NVTX_INJECTION64_PATH"] = {library!r}
    os.environ["NVTX_RECORD"] = f"{folder}/{{rank}}"
    with torch.autograd.profiler.emit_nvtx():
        model(inputs).sum().backward()
    torch.cuda.synchronize()
    print("buckets", len(model.reducer.buckets()))
"""


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
def test_emit_nvtx_shows_every_bucket(tmp_path: Path, carrier: str) -> None:
    library = tmp_path / "nvtx_recorder.so"
    source = Path(__file__).with_name("nvtx_recorder.cpp")
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(compiler, check=True, timeout=GPU_SCRIPT_TIMEOUT_S)
    script = NVTX_SCRIPT.format(transport=carrier, library=str(library), folder=tmp_path)
    for rank, (code, output) in enumerate(on_gpu(script, 2, tmp_path)):
        assert code == 0, output
        found = re.search(r"^buckets (\d+)$", output, re.MULTILINE)
        assert found, output
        buckets = int(found[1])
        assert buckets > 1
        open_ranges: list[str] = []
        counts = Counter[str]()
        for line in (tmp_path / str(rank)).read_text().splitlines():
            if line == "pop":
                open_ranges.pop()  # fails for a range that ends twice
                continue
            name = line.removeprefix("push ").partition(",")[0]
            if name != "nccl:all_reduce" or "drivetrain::all_reduce" in open_ranges:
                counts[name] += 1
            open_ranges.append(name)
        assert not open_ranges
        for name in ("drivetrain::all_reduce", "nccl:all_reduce", "drivetrain::wait"):
            assert counts[name] == buckets, counts


HOSTS_SCRIPT = """
    from drivetrain.ddp import tag_board

    transport.host_identity = lambda: (str(rank),)  # each rank is on a host of its own
    if {has_no_network}:
        tag_board.CONNECT_WITHIN = timedelta(seconds=3)
    if {has_no_network} and rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such-network"
    model = DDP(net, transport={transport!r}, bucket_cap_mb=0.1)
    inputs = torch.randn(8, 10, device="cuda")
    try:
        for step in range(6):
            loss = model(inputs).sum()
            if {parts} and step == 3 and rank == 0:
                loss.backward(retain_graph=True)
                model.zero_grad()
            loss.backward()
            model.zero_grad()
        torch.cuda.synchronize()
        print("fine", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
        time.sleep(1)
    os._exit(0)
"""


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
def test_hosts_compare_collectives_of_a_pure_nccl_group(tmp_path: Path, carrier: str) -> None:
    script = HOSTS_SCRIPT.format(transport=carrier, has_no_network=False, parts=True)
    for code, output in on_gpu(script, 2, tmp_path, backend="nccl"):
        assert code == 0, output
        assert "the ranks start different collectives: " in output, output
        assert "of a second backward, or one whose forward ran under no_sync(), in synchronized step 5" in output, (
            output
        )


def test_hosts_that_gloo_cannot_connect_train_with_a_warning(tmp_path: Path) -> None:
    script = HOSTS_SCRIPT.format(transport="torch", has_no_network=True, parts=False)
    for code, output in on_gpu(script, 2, tmp_path, backend="nccl"):
        assert code == 0, output
        assert "fine" in output, output
        assert "the hosts cannot connect over gloo, so that they do not compare their collectives" in output, output
