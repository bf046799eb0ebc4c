"""Measures DistributedDataParallel(shard=...): bytes of states and gradients per rank, and the time of a step."""

import functools
import importlib.util
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.bench.ddp import _GPT
from drivetrain.bench.measure import Row, ratio_of_medians
from drivetrain.bench.ranks import meet, on_ranks
from drivetrain.ddp.distributed import DistributedDataParallel
from drivetrain.optim import AdamW
from drivetrain.optim.sharded.dtensors import local_part

RANKS = 4
WARM_UP = 5
MOST_BYTES = 1.03  # times 1 / RANKS of the unsharded wrapper's
MOST_OF_UNSHARDED = 1.05
MOST_OF_ZERO = 0.7
MIB = 2**20
SHARDED = ("optimizer", "gradients")
OVERLAPS = {"optimizer, overlap_gather": "optimizer", "gradients, overlap_gather": "gradients"}  # and what they vary

Engine = tuple[nn.Module, Any]  # a wrapped model and its optimizer


def run(rounds: int) -> list[Row]:
    """Returns the rows. Each rank has one thread, and all ranks share this machine's cores."""
    if importlib.util.find_spec("deepspeed") is None:
        print(
            "run.py shard: deepspeed is not installed, so its rows are omitted (DS_BUILD_OPS=0 pip install "
            "--no-build-isolation deepspeed)",
            file=sys.stderr,
        )
    measured = on_ranks(functools.partial(_measure, rounds), count=RANKS)
    return [*_byte_rows(measured["bytes"]), *_time_rows(measured["seconds"])]


def _unsharded(module: nn.Module) -> Engine:
    return _ours(None, module)


def _ours(shard: str | None, module: nn.Module, overlaps: bool = False) -> Engine:
    net = DistributedDataParallel(module, shard=shard, overlap_gather=overlaps)
    return net, AdamW(net.parameters(), lr=1e-4)


def _zero(module: nn.Module) -> Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)


def _fsdp(module: nn.Module) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def _deepspeed(module: nn.Module) -> Engine:
    """ZeRO-2 on the CPU. The engine has all three calls of a step, and its optimizer keeps torch's inside."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # which the import reads
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = importlib.import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return engine, engine


def _step(net: Any, optimizer: Any, tokens: Tensor) -> None:
    optimizer.zero_grad()
    if net is optimizer:
        net.backward(net(tokens))
    else:
        net(tokens).backward()
    optimizer.step()


ENGINES: dict[str, Callable[[nn.Module], Engine]] = {
    "unsharded": _unsharded,
    "optimizer": functools.partial(_ours, "optimizer"),
    "gradients": functools.partial(_ours, "gradients"),
    **{name: functools.partial(_ours, shard, overlaps=True) for name, shard in OVERLAPS.items()},
    "ZeroRedundancyOptimizer": _zero,
    "fully_shard": _fsdp,
}
if importlib.util.find_spec("deepspeed") is not None:
    ENGINES["DeepSpeed"] = _deepspeed


def _measure(rounds: int) -> dict[str, Any]:
    """Returns the largest bytes over ranks and the seconds of the slowest rank, by engine."""
    tokens = torch.randint(0, 256, (1, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
    engines = {}
    for name, make in ENGINES.items():
        torch.manual_seed(0)
        module = _GPT()
        module._ddp_params_and_buffers_to_ignore = ["mask"]  # type: ignore[assignment]
        engines[name] = make(module)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(WARM_UP + rounds):
        for name in engines if index % 2 else reversed(engines):
            net, optimizer = engines[name]
            meet()
            begin = time.perf_counter()
            _step(net, optimizer, tokens)
            slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if index >= WARM_UP:
                seconds[name].append(slowest.item())
    found = {}
    for name, (net, optimizer) in engines.items():
        inner: Any = getattr(optimizer, "optim", optimizer)
        if net is optimizer:
            inner = optimizer.optimizer.optimizer
        states = (v for values in inner.state.values() for v in values.values() if isinstance(v, Tensor) and v.ndim)
        gradients = (param.grad for param in net.parameters() if param.grad is not None)
        buffer = net.reducer.buffer_bytes() if isinstance(net, DistributedDataParallel) else 0
        # An unsharded gradient lies in the buffer, and so does what "optimizer" keeps.
        works_in = buffer if name == "gradients" else 0
        most = torch.tensor([_bytes_of(states), _bytes_of(gradients), works_in], dtype=torch.int64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = most.tolist()
    _compare(engines)
    return {"bytes": found, "seconds": seconds}


def _compare(engines: dict[str, Engine]) -> None:
    """Raises RuntimeError if a sharded model does not have the bits of the unsharded one."""
    expected = list(engines["unsharded"][0].parameters())
    for name in (*SHARDED, *OVERLAPS):
        found = engines[name][0].parameters()
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise RuntimeError(f"shard={name!r} has other parameters than the unsharded wrapper")


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        storage = local_part(tensor)
        storages[storage.data_ptr()] = storage.numel() * storage.element_size()
    return sum(storages.values())


def _byte_rows(found: dict[str, list[int]]) -> list[Row]:
    states, gradients, _ = found["unsharded"]
    rows = []
    for name in (*SHARDED, "ZeroRedundancyOptimizer", "fully_shard", *({"DeepSpeed"} & found.keys())):
        mine, kept, works_in = found[name]
        is_ours = name in SHARDED
        for what, whole, part in (("states", states, mine), ("gradients", gradients, kept)):
            if not part:
                continue  # DeepSpeed frees gradients in its step
            has_target = is_ours and (what == "states" or name == "gradients")
            share = part * RANKS / whole
            rows.append(
                Row(
                    f"{what} of a rank, {_title(name)}, against the unsharded wrapper, {RANKS} ranks",
                    "MiB",
                    whole / MIB,
                    part / MIB,
                    part / whole,
                    target=f"<= {MOST_BYTES / RANKS:.4f}" if has_target else "",
                    met=share <= MOST_BYTES if has_target else None,
                )
            )
        if works_in:
            rows.append(Row(f"  buffer in which {_title(name)} reduces them", "MiB", gradients / MIB, works_in / MIB))
    return rows


def _title(name: str) -> str:
    shard, _, option = name.partition(", ")
    return f"shard={shard!r}" + (f" and {option}" if option else "") if shard in SHARDED else name


def _time_rows(seconds: dict[str, list[float]]) -> list[Row]:
    targets = {"unsharded": MOST_OF_UNSHARDED, "ZeroRedundancyOptimizer": MOST_OF_ZERO, "fully_shard": None}
    if "DeepSpeed" in seconds:
        targets["DeepSpeed"] = None
    rows = [_time_row(seconds, ours, other, most) for ours in SHARDED for other, most in targets.items()]
    for ours, without in OVERLAPS.items():
        rows += [_time_row(seconds, ours, "unsharded", MOST_OF_UNSHARDED), _time_row(seconds, ours, without, None)]
    return rows


def _time_row(seconds: dict[str, list[float]], ours: str, other: str, most: float | None) -> Row:
    ratio, low, high = ratio_of_medians(seconds[other], seconds[ours])
    return Row(
        f"step, {_title(ours)} against {_title(other)}, GPT of 10 M, {RANKS} ranks of 1 thread",
        "ms",
        1e3 * statistics.median(seconds[other]),
        1e3 * statistics.median(seconds[ours]),
        ratio,
        low,
        high,
        "" if most is None else f"<= {most}",
        None if most is None else ratio <= most,
    )
