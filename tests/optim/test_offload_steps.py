"""Tests steps on the CPU for parameters on a GPU: bits, order, waits and what scripts do, on a late device and on GPUs.

The cases of the late device are in tests/late_device/offload_steps.py.
"""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain import optim
from warm_python import warm_python

SCRIPT = Path(__file__).parents[1] / "late_device/offload_steps.py"
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


def test_on_a_late_device(late_device: Path) -> None:
    command = [warm_python(has_whole_end=True), str(SCRIPT), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(run.stdout)
    assert re.findall(r"^OK (\w+)", run.stdout, re.MULTILINE) == CASES, run.stdout + run.stderr
    assert run.returncode == 0


def test_parameters_on_the_cpu_are_stepped_as_without_it() -> None:
    values = [torch.randn(5, 700), torch.randn(3)]
    optimizers = []
    for offload in ("cpu", None):
        params = [value.clone().requires_grad_() for value in values]
        optimizers.append(optim.AdamW(params, max_grad_norm=0.1, zero_grads_in_step=True, offload=offload))  # type: ignore[arg-type]
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, 0.1 + step)
            optimizers[-1].step()
            assert not any(param.grad.any() for param in params)  # type: ignore[union-attr]
    ours, theirs = ([param for group in one.param_groups for param in group["params"]] for one in optimizers)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert optimizers[0]._drivetrain.twins is None  # type: ignore[attr-defined]


def test_parameters_that_ranks_share_are_refused(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,))))
    with pytest.raises(ValueError, match="offload is 'cpu', but parameter 0 of the group is a DTensor"):
        optim.AdamW([weight], offload="cpu")


# ---- Tests that need a GPU.


def net(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 5)).to("cuda", dtype)


def assert_same_as_on_the_gpu(ours: Any, theirs: Any) -> None:
    mine, others = ([p for group in one.param_groups for p in group["params"]] for one in (ours, theirs))
    for one, other in zip(mine, others, strict=True):
        assert torch.equal(one, other)
        for name, value in theirs.state[other].items():
            assert ours.state[one][name].device.type == "cpu"
            assert torch.equal(ours.state[one][name], value.cpu()), name


@pytest.mark.gpu
@pytest.mark.parametrize("overlaps", [False, True], ids=["at once", "overlapped"])
@pytest.mark.parametrize(
    ("dtype", "formats"),
    [(torch.float32, {"state_bits": 8}), (torch.bfloat16, {"state_bits": 8, "master_bits": 24}), (torch.float16, {})],
    ids=str,
)
def test_steps_have_the_bits_of_the_gpu(dtype: torch.dtype, formats: dict[str, Any], overlaps: bool) -> None:
    """Trains with micro-batches, a scaler whose scale overflows at first, a learning rate on the GPU, and clipping."""
    theirs_of = net(dtype)
    ours_of = copy.deepcopy(theirs_of)
    options: dict[str, Any] = {"max_grad_norm": 0.01, "min_8bit_size": 1, **formats}
    ours = optim.AdamW(ours_of.parameters(), lr=torch.tensor(0.01, device="cuda"), offload="cpu", **options)
    theirs = optim.AdamW(theirs_of.parameters(), lr=0.01, **options)
    overlapped = ours.overlap_offload(ours_of, bucket_cap_mb=0.01) if overlaps else None
    scalers = [drivetrain.amp.GradScaler("cuda", init_scale=2.0**120) for _ in range(2)]
    for step in range(6):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
        for model, optimizer, scaler in ((ours_of, ours, scalers[0]), (theirs_of, theirs, scalers[1])):
            for micro_batch in x.split(4):
                scaler.scale(model(micro_batch).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert ours.last_step_skipped == theirs.last_step_skipped
        if step == 1:
            for scaler in scalers:
                scaler.update(16.0)
    if overlapped is not None:
        overlapped.wait()
    assert not ours.last_step_skipped
    assert ours.grad_norm == theirs.grad_norm
    assert_same_as_on_the_gpu(ours, theirs)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_same_as_on_the_gpu(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("overlaps", [False, True], ids=["at once", "overlapped"])
def test_gradients_that_torch_unscales_and_clips(overlaps: bool) -> None:
    theirs_of = net(torch.float32)
    ours_of = copy.deepcopy(theirs_of)
    ours, theirs = optim.AdamW(ours_of.parameters(), offload="cpu"), optim.AdamW(theirs_of.parameters())
    overlapped = ours.overlap_offload(ours_of, bucket_cap_mb=0.01) if overlaps else None
    scalers = [torch.amp.GradScaler("cuda", init_scale=64.0) for _ in range(2)]
    for step in range(4):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).cuda()
        for model, optimizer, scaler in ((ours_of, ours, scalers[0]), (theirs_of, theirs, scalers[1])):
            scaler.scale(model(x).square().mean()).backward()
            if step > 0:
                scaler.unscale_(optimizer)
            if step > 1:
                (torch.nn.utils.clip_grad_norm_ if step > 2 else drivetrain.clip_grad_norm_)(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step > 1)
    if overlapped is not None:
        overlapped.wait()
    assert_same_as_on_the_gpu(ours, theirs)


@pytest.mark.gpu
def test_adagrad_moves_its_first_sums() -> None:
    params = [torch.ones(9, device="cuda", requires_grad=True) for _ in range(2)]
    optimizers = [optim.Adagrad([params[0]], offload="cpu"), optim.Adagrad([params[1]])]
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    assert_same_as_on_the_gpu(*optimizers)


@pytest.mark.gpu
def test_what_the_cpu_cannot_step_is_refused() -> None:
    embedding = nn.Embedding(4, 4, sparse=True, device="cuda")
    embedding(torch.tensor([1], device="cuda")).sum().backward()
    with pytest.raises(NotImplementedError, match="offload is 'cpu', but a gradient is sparse"):
        optim.SGD(embedding.parameters(), offload="cpu").step()
    model = net(torch.float32)
    optimizer = optim.SGD(model.parameters(), offload="cpu")
    model(torch.ones(1, 40, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(3, device="cuda")  # torch warns of empty graphs
        with pytest.raises(RuntimeError, match="a CUDA graph cannot capture"):
            optimizer.step()
