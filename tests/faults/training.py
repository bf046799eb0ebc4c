"""Runs the training of every rank of a round, with its fault."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain import DistributedDataParallel
from drivetrain.ddp import transport

from . import room
from .plan import LAYERS, Round

WIDTH = 256  # a layer has 257 KiB, a bucket of its own with the cap below
BUCKET_CAP_MB = 0.2

Strike = Callable[[], None]


class Net(nn.Module):
    """Has layers of one bucket each, so that reductions are in progress while backward runs."""

    def __init__(self, with_buffers: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH) if with_buffers else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def note(folder: Path, name: str, text: str = "") -> None:
    """Writes a file with the time and `text` for the harness, atomically."""
    draft = folder / f"{name}.draft"
    draft.write_text(f"{time.monotonic()} {text}")
    draft.rename(folder / name)


def train(plan: Round, rank: int, folder: Path) -> None:
    """Trains as a script does. An error ends the process as it would end a user's."""
    is_faulty = rank == plan.faulty
    if plan.ranks_per_host:
        pretend_host(f"host {rank // plan.ranks_per_host}")
    if plan.fault == "full-shm" and is_faulty and plan.step < 0:
        fill_shm(folder)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), plan.ranks),
        rank=rank,
        world_size=plan.ranks,
        timeout=timedelta(seconds=plan.timeout_s),
    )
    try:
        torch.manual_seed(0)
        net = Net(plan.buffers)
        if plan.fault == "extra-parameter" and is_faulty:
            net.layers[plan.layer].register_parameter("extra", nn.Parameter(torch.zeros(3)))
            note(folder, "fault")
        train_steps(plan, rank, folder, wrap(plan, net), is_faulty)
    except Exception as error:
        note(folder, f"error-{rank}", str(error))
        raise


def pretend_host(name: str) -> None:
    """Shares memory with the ranks of that host only, and uses gloo to the others."""
    identity = transport.host_identity()
    transport.host_identity = lambda: (*identity, name)


def wrap(plan: Round, net: Net) -> DistributedDataParallel:
    options = {"transport": plan.transport}
    return DistributedDataParallel(
        net,
        bucket_cap_mb=BUCKET_CAP_MB,
        find_unused_parameters=plan.find_unused,
        check_replicas_every=plan.check_replicas_every,
        **options,
    )


def train_steps(plan: Round, rank: int, folder: Path, model: DistributedDataParallel, is_faulty: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(plan.steps):
        strikes_now = is_faulty and step == plan.step
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        if strikes_now and plan.fault == "full-shm":
            fill_shm(folder)
        if strikes_now and plan.fault == "skip-step":
            note(folder, "fault")
            if plan.point == "the backward":
                model(inputs)
            continue
        if strikes_now and plan.fault.startswith(("kill-", "stop")):
            arm(plan, model.module, folder)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    if is_faulty and plan.fault == "skip-step":
        note(folder, "fault")  # now the others wait for the step that was skipped
        if not plan.leaves:
            signal.pause()
    values = torch.cat([param.detach().flatten() for param in model.parameters()])
    note(folder, f"done-{rank}", hashlib.sha256(values.numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


def arm(plan: Round, net: Net, folder: Path) -> None:
    """Puts the fault where this step will run it."""

    def strike() -> None:
        note(folder, "fault")
        os.kill(os.getpid(), signal.SIGSTOP if plan.fault == "stop" else signal.SIGKILL)

    def watch_output(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(lambda _: strike())

    def strike_soon(_: Tensor) -> None:
        threading.Thread(target=lambda: (time.sleep(plan.delay_s), strike()), daemon=True).start()

    layer, last = net.layers[plan.layer], net.layers[0].weight  # its gradient is the last but one, in the last bucket
    match plan.point:
        case "forward":
            layer.register_forward_hook(lambda *_: strike())
        case "backward":
            layer.register_forward_hook(watch_output)
        case "last bucket":  # the others are with the transport
            last.register_hook(lambda _: strike())
        case "after the last gradient":  # up to a millisecond after it
            last.register_hook(strike_soon)
        case _:
            raise ValueError(f"point is {plan.point!r}, which is none of a fault that strikes in a step")


def fill_shm(folder: Path) -> None:
    room.fill()
    note(folder, "fault")
