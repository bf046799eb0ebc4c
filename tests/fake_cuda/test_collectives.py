"""Tests the NCCL stand-in under torch's own process group: collectives, their order on streams, and failures."""

import os
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from warm_python import warm_python

RANKS_S = 180

PREAMBLE = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group(
    "nccl", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
)

def full(value, count=3, dtype=torch.float32):
    return torch.full((count,), value, device="cuda", dtype=dtype)
"""


def on_ranks(script: str, size: int, folder: Path, **variables: str) -> list[tuple[int, str]]:
    """Runs the script on all ranks and returns the exit code and output of each."""
    code = PREAMBLE + textwrap.dedent(script)
    environment = {**os.environ, "FAKE_CUDA_ON_ERROR": "record", **variables}
    command = [warm_python(), "-c", code]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + RANKS_S
    try:
        outputs = [process.communicate(timeout=deadline - time.monotonic())[0] for process in ranks]
        return [(process.returncode, output) for process, output in zip(ranks, outputs, strict=True)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


COLLECTIVES = """
x = full(rank + 1.0, 700_000)  # larger than one chunk of the stand-in
dist.all_reduce(x)
assert (x == size * (size + 1) / 2).all()
dist.all_reduce(x, op=dist.ReduceOp.MAX)
gathered = [torch.empty(3, device="cuda") for _ in range(size)]
dist.all_gather(gathered, full(float(rank)))
assert [one[0].item() for one in gathered] == list(range(size))
part = torch.empty(2, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device="cuda"))
assert part.tolist() == [2.0 * rank * size, (2.0 * rank + 1) * size]
spread = full(float(rank))
dist.broadcast(spread, size - 1)
assert (spread == size - 1).all()
if os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0":  # torch treats ncclInProgress as an error there
    exchanged = torch.empty(size, device="cuda")
    dist.all_to_all_single(exchanged, full(float(rank), size))
    assert exchanged.tolist() == list(range(size))
received = torch.empty(200_000, device="cuda")
right, left = (rank + 1) % size, (rank - 1) % size
operations = [dist.P2POp(dist.isend, full(float(rank), 200_000), right), dist.P2POp(dist.irecv, received, left)]
for work in dist.batch_isend_irecv(operations):
    work.wait()
assert (received == left).all()
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": one} for one in range(size)]
for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8):
    values = full(2, dtype=dtype)
    dist.all_reduce(values)
    assert (values == 2 * size).all(), dtype
half = dist.new_group([0, 1])
if rank < 2:
    pair = full(1.0)
    dist.all_reduce(pair, group=half)
    assert (pair == 2).all()
dist.barrier(device_ids=[torch.cuda.current_device()])
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    assert "No backend type associated with device type cpu" in str(error), error
else:
    raise AssertionError("the group took a CPU tensor")
torch.cuda.synchronize()
print("fine")
dist.destroy_process_group()
"""


DOCTOR = """
from drivetrain.cli import collectives
os.environ["LOCAL_RANK"] = str(rank)
own = dist.PrefixStore("doctor", dist.FileStore(store + "-doctor", size))
outcome = collectives.sum_up(own, rank, size, (4, 1024, 65536), 60, "NCCL")
assert outcome.has_passed, outcome
print("fine")
dist.destroy_process_group()
"""


def test_the_doctors_sums(tmp_path: Path) -> None:
    for code, output in on_ranks(DOCTOR, 2, tmp_path):
        assert code == 0, output


@pytest.mark.parametrize("nonblocking", ["0", "1"])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives(tmp_path: Path, size: int, nonblocking: str) -> None:
    variables = {"TORCH_NCCL_USE_COMM_NONBLOCKING": nonblocking, "FAKE_CUDA_DEVICES": str(size)}
    for code, output in on_ranks(COLLECTIVES, size, tmp_path, **variables):
        assert code == 0, output
        assert "fine" in output


def test_a_collective_that_is_not_waited_for_races(tmp_path: Path) -> None:
    script = """
    from fake_cuda import errors
    x = full(1.0, 1000)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)  # on a stream that does not wait for the collective's
    work.wait()
    torch.cuda.synchronize()
    print("\\n".join(errors()))
    os._exit(0)
    """
    for code, output in on_ranks(script, 2, tmp_path):
        assert code == 0, output
        assert "NCCL: float sum 1000" in output


def test_two_ranks_on_one_gpu_are_refused(tmp_path: Path) -> None:
    for code, output in on_ranks("dist.all_reduce(full(1.0))", 2, tmp_path, FAKE_CUDA_DEVICES="1"):
        assert code != 0
        assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device" in output
    script = """
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    x = full(1.0)
    dist.all_reduce(x)
    assert (x == 2).all()
    """
    (tmp_path / "store").unlink(missing_ok=True)
    for code, output in on_ranks(script, 2, tmp_path, FAKE_CUDA_DEVICES="1"):
        assert code == 0, output


def test_a_rank_that_dies_is_an_error_of_the_others(tmp_path: Path) -> None:
    script = """
    x = full(1.0)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(3)
    time.sleep(0.5)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    """
    (code, output), (other, _) = on_ranks(script, 2, tmp_path, FAKE_NCCL_SOCKETS="1")
    assert other == 3
    assert code not in (0, None)
    assert "remote process exited or there was a network error" in output
    assert "Watchdog caught collective operation timeout" not in output  # the group's timeout has not found it
