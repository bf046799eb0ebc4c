"""Tests that a training makes a CUDA context on no GPU but its own, where each takes 500 MB."""

import ctypes
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_collectives import on_ranks

import fake_cuda
from warm_python import warm_python

TRAINING = """
import gc
import drivetrain
from drivetrain import _C
from drivetrain.checkpointing import Checkpointer
from drivetrain.monitor import Monitor
from torch import nn
import fake_cuda

def train(model, device, folder):
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.01)
    pool = _C.OffloadPool(1 << 20)
    pack, unpack = lambda x: (pool.begin(x.contiguous()), x.shape), lambda held: held[0].take().view(held[1])
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    loader = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=4)
    loader = drivetrain.data.prefetch(loader, device)
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, every=4, signals=())
    with checkpointer, Monitor(model, optimizer, progress=False, flops=None) as monitor:
        for number, batch in enumerate(monitor(loader)):
            if number == 12:
                time.sleep(1.5)  # the watchdog looks at a device that stands still
            with hooks:
                output = model(batch)
            output.pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            gc.collect()
            time.sleep(0.02)
    torch.cuda.synchronize(device)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        graph.replay()
    torch.cuda.synchronize(device)

def make_model():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

def check(own):
    assert fake_cuda.context_of(own)
    assert not fake_cuda.context_of(1 - own), fake_cuda.context_of(1 - own)
    assert not fake_cuda.num_errors()
    print("fine")
"""


@pytest.mark.parametrize("transport", ["torch", "nccl"])
def test_ranks_have_contexts_on_their_own_gpus(tmp_path: Path, transport: str) -> None:
    script = f"""
    gloo = dist.new_group(backend="gloo")
    model = drivetrain.DistributedDataParallel(
        make_model().cuda(), device_ids=[rank], transport={transport!r}, report_hang_after=0.4
    )
    train(model, "cuda", {str(tmp_path / "saves")!r})
    del model
    gc.collect()
    dist.destroy_process_group()
    check(own=rank)
    """
    for code, output in on_ranks(TRAINING + textwrap.dedent(script), 2, tmp_path):
        assert code == 0, output
        assert "fine" in output


def run(script: str) -> tuple[int, str]:
    """Runs a script of one process."""
    code = "import time, torch\n" + TRAINING + textwrap.dedent(script)
    environment = {**os.environ, "FAKE_CUDA_ON_ERROR": "record"}
    command = [warm_python(), "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("sets_device", [True, False])
def test_a_process_has_one_context(tmp_path: Path, sets_device: bool) -> None:
    code, output = run(f"""
    if {sets_device}:
        torch.cuda.set_device(1)
    train(make_model().to("cuda:1"), "cuda:1", {str(tmp_path)!r})
    check(own=1)
    """)
    assert code == 0, output
    assert "fine" in output


@pytest.mark.parametrize(
    ("call", "makes_one"),
    [
        ("torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.get_device_properties(0)", False),
        ("torch.ones(1, device='cuda:1').pin_memory", False),
        ("torch.cuda.cudart().cudaHostRegister(torch.ones(5000).data_ptr(), 16384, 0)", True),
        ("event.query()", True),
        ("event.elapsed_time(event)", True),
        ("threads.settle_on_device(), event.query(), event.elapsed_time(event), leave()", False),
    ],
)
def test_a_new_thread_makes_a_context_on_the_first_gpu(call: str, makes_one: bool) -> None:
    code, output = run(f"""
    import threading
    from drivetrain import threads
    torch.cuda.set_device(1)
    event = torch.Event("cuda:1", enable_timing=True)
    event.record(torch.Stream("cuda:1"))
    event.synchronize()
    def leave():
        with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
            pass
    assert not fake_cuda.context_of(0), fake_cuda.context_of(0)
    thread = threading.Thread(target=lambda: ({call}), name="new")
    thread.start()
    thread.join()
    text = fake_cuda.context_of(0)
    assert bool(text) == {makes_one}, text
    assert text is None or (text.startswith("cuda") and " on thread " in text and 'in run' in text), text
    """)
    assert code == 0, output


def test_registered_memory_is_counted(new_errors: Callable[[], list[str]]) -> None:
    before = fake_cuda.pinned_bytes()
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    begin = -(-memory.data_ptr() // 4096) * 4096
    assert int(cudart.cudaHostRegister(begin, 10000, 0)) == 0
    assert fake_cuda.pinned_bytes() == before + 12288
    assert int(cudart.cudaHostRegister(begin + 8192, 4096, 0)) != 0
    ctypes.CDLL(None).cudaGetLastError()  # which torch's next call would raise
    assert int(cudart.cudaHostUnregister(begin)) == 0
    assert fake_cuda.pinned_bytes() == before
    assert fake_cuda.peak_pinned_bytes() >= before + 12288
    assert fake_cuda.peak_pinned_bytes() == before
    assert not new_errors()
