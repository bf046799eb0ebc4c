"""Runs one rank with logical ranks under a pure "nccl" group, on GPUs or on tests/fake_cuda.

python logical_nccl_ranks.py RANK SIZE STORE TRANSPORT CASE ...; the cases are those of the CPU's tests. Saves their
results, by case, in the folder of the store.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import test_logical_ranks as on_cpu
import torch
import torch.distributed as dist
from torch import nn

import drivetrain
from drivetrain import DistributedDataParallel as DDP
from drivetrain.ddp.logical_ranks import random_streams
from drivetrain.ddp.logical_ranks.random_streams import Use
from nccl_ranks import join_group

try:
    import fake_cuda
except ModuleNotFoundError:  # a GPU
    fake_cuda = None

WAYS: tuple[dict[str, Any], ...] = ({}, on_cpu.SHARDED, on_cpu.IN_ROWS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def trained(name: str) -> list[Any]:
    # The stand-in has no norms of 16-bit values.
    on_cpu.Model.Norm = nn.Identity if name == "bfloat16" else nn.BatchNorm1d
    result = on_cpu.train_on_ranks(DTYPES[name], {}, on_cpu.WINDOWS)
    if name != "bfloat16":
        sharded = on_cpu.train_on_ranks(DTYPES[name], on_cpu.SHARDED, on_cpu.WINDOWS)
        on_cpu.assert_same_bits(sharded, result, f"{name}, sharded")
    if dist.get_world_size() == 1:
        on_cpu.assert_same_bits(result, on_cpu.train_in_one_process(DTYPES[name]), f"{name}, one process")
    return result


def sums() -> list[Any]:
    on_cpu.check_order(os.environ["DRIVETRAIN_TRANSPORT"])
    return []


def scaled_in_groups() -> list[Any]:
    """With four ranks, two share states and rows, and the other two have them as well."""
    return on_cpu.train_scaled(on_cpu.IN_ROWS, 2 if dist.get_world_size() == 4 else 0)


def in_shards(name: str) -> list[Any]:
    on_cpu.PARTS = 8  # each rank's last one uses all parameters
    return [row for options in (on_cpu.SHARDED, on_cpu.IN_ROWS) for row in on_cpu.train_all(name, options)]


def streams(steps: int) -> list[Any]:
    """Gradients are written on one stream, accumulate on another, and parts end on two more. The host does not wait."""
    forward, first, second, third = (torch.cuda.Stream() for _ in range(4))
    torch.manual_seed(on_cpu.SEED)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 5)).cuda()
    wrapped = DDP(model, logical_ranks=on_cpu.PARTS)
    for stream in (forward, first, second, third):
        stream.wait_stream(torch.cuda.current_stream())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parts = on_cpu.PARTS // dist.get_world_size()
    with drivetrain.accumulate(wrapped, optimizer, steps) as window:
        for step in range(3 * parts * steps):
            if step == 2 * parts * steps and fake_cuda is not None:
                waits = fake_cuda.num_host_waits()
            part, is_last = step // steps % parts, step % steps == steps - 1
            with torch.cuda.stream(forward):
                loss = wrapped(torch.ones(3, 64, device="cuda")).sum()
            ends_on = second if 2 * (part + 1) <= parts else third
            backward = ends_on if is_last or part + 1 == parts else first
            loss.record_stream(backward)
            backward.wait_stream(forward)
            with torch.cuda.stream(backward):
                if window.backward(loss, weight=not is_last):  # nothing else orders the stream on which a part ends
                    forward.wait_stream(backward)
        assert fake_cuda is None or fake_cuda.num_host_waits() == waits
    torch.cuda.synchronize()
    return [[param.detach() for param in model.parameters()]]


def written() -> list[Any]:
    """A gradient is written between the micro-batches of a part: the weights count all the same."""
    model = nn.Linear(3, 2).cuda()
    nn.init.zeros_(model.bias)
    wrapped = DDP(model, logical_ranks=on_cpu.PARTS)
    x = torch.ones(1, 3, device="cuda")
    with drivetrain.accumulate(wrapped, torch.optim.SGD(model.parameters(), lr=1.0), 2) as window:
        for _ in range(on_cpu.PARTS // dist.get_world_size()):
            window.backward(wrapped(x).sum(), 3)
            model.bias.grad.mul_(0.5)
            window.backward(wrapped(x).sum(), 5)
    assert model.bias.eq(-0.8125).all(), model.bias
    return [[model.bias.detach()]]


def generators() -> list[Any]:
    """All GPUs have the same streams, whose states come back, and no other GPU gets a context."""
    saved = random_streams.states()
    drawn = []
    for _ in range(2):
        random_streams.begin(Use.MODEL, 1, 2, 3)
        drawn.append([torch.rand(5, device="cuda"), torch.nn.functional.dropout(torch.ones(50, device="cuda"))])
    on_cpu.assert_same_bits(drawn[:1], drawn[1:], "streams")
    random_streams.restore(saved)
    assert all(torch.equal(*pair) for pair in zip(random_streams.states()[0], saved[0], strict=True))
    others = [index for index in range(torch.cuda.device_count()) if index != torch.cuda.current_device()]
    assert fake_cuda is None or not any(fake_cuda.context_of(index) for index in others)
    return drawn


CASES: dict[str, Callable[[], list[Any]]] = {
    **{name: lambda name=name: trained(name) for name in DTYPES},
    "scaled": lambda: [row for way in WAYS for row in on_cpu.train_scaled(way)],
    "scaled in groups": scaled_in_groups,
    **{name: lambda name=name: in_shards(name) for name in on_cpu.ALL},
    "sums": sums,
    "streams": lambda: streams(2) + streams(3),
    "written": written,
    "generators": generators,
}


def main() -> None:
    os.environ["DRIVETRAIN_TRANSPORT"], chosen = join_group()
    on_cpu.DEVICE = "cuda"
    if fake_cuda is not None:
        fake_cuda.set_delay(30_000)  # so that the host is ahead of most work
    found: dict[str, Any] = {}
    for name in chosen:
        on_cpu.PARTS, on_cpu.WINDOWS = 4, 2
        rows = CASES[name]()
        found[name] = [[None if value is None else value.cpu() for value in row] for row in rows]
        if fake_cuda is not None:
            assert not fake_cuda.num_errors(), f"{name}:\n" + "\n".join(fake_cuda.errors()[:5])
    torch.save(found, Path(sys.argv[3]).with_name(f"result-{dist.get_rank()}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
