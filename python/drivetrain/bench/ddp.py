"""Measures DistributedDataParallel against torch's: memory at rest and in a step, and the time added to backward."""

import copy
import ctypes
import functools
import gc
import importlib
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn

from ..ddp.distributed import DistributedDataParallel
from . import comm
from .measure import Row, interleaved, ratio_row
from .ranks import meet, on_ranks, slowest
from .shapes import gpt2_124m

MIB = 2**20
M_MMAP_THRESHOLD = -3  # from malloc.h


def run(rounds: int) -> list[Row]:
    """Returns rows for memory, many small parameters, exposed communication and bound ranks, of rank 0."""
    memory = {}
    for engine in track(("plain", "torch", "drivetrain"), description="memory", transient=True):
        memory[engine] = on_ranks(functools.partial(_memory, engine))
    plain, theirs, ours = on_ranks(functools.partial(_small_parameters, rounds))
    rows = [*_memory_rows(memory), ratio_row("backward beyond no DDP, 1,000 x 64", theirs, ours, 1.0, beyond=plain)]
    for keeps in (False, True):
        plain, theirs, ours = on_ranks(functools.partial(_exposed_communication, rounds, keeps))
        what = f"step beyond no communication, GPT of 10 M ({1e3 * statistics.median(plain):.0f} ms without)"
        what += ", and the script keeps the gradients of the step before" if keeps else ""
        rows.append(ratio_row(what, theirs, ours, 0.25, beyond=plain))
    return rows + comm.run_bound(rounds)


class Products(nn.Module):
    """Has parameters whose gradients are the inputs. Backward is cheap, so the cost of a wrapper is visible."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w * x).sum() for w in self.weights]).sum()


def _wrap(engine: str, module: nn.Module) -> nn.Module:
    if engine == "plain":
        return module
    if engine == "torch":
        return nn.parallel.DistributedDataParallel(module)
    is_on_gpu = any(param.is_cuda for param in module.parameters())
    return DistributedDataParallel(module, transport="nccl" if is_on_gpu else "auto")


def _memory(engine: str) -> dict[str, float]:
    """Returns this process's bytes after some steps, including gradients, and the peak of another step."""
    # Returns freed tensors to the system at once. Otherwise glibc keeps blocks that aligned allocations cannot reuse,
    # and the figures would include fragmentation.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    # torch's class imports this module (about 75 MiB). Every figure includes it, because a wrapper does not need it.
    importlib.import_module("torch._dynamo")
    model = _wrap(engine, Products(gpt2_124m()))
    sizes = [p.nbytes for p in model.parameters()]

    def step() -> None:
        model.zero_grad()
        model(torch.randn(())).backward()

    for _ in range(4):
        step()
    at_rest = _resident_bytes()
    growth = _growth(step)
    peak = max(at_rest, _resident_bytes()) + growth
    return {"at_rest": at_rest, "peak": peak, "gradients": sum(sizes), "largest": max(sizes)}


def _resident_bytes() -> float:
    """Returns the mean over ranks, which does not depend on who has touched a common page first."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    found = torch.tensor(float(_current_bytes("Pss_Anon:", "Pss_Shmem:")), dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def _current_bytes(*kinds: str) -> int:
    """Returns this process's memory of these kinds. A page shared by n processes counts as 1/n (Linux's PSS).

    Pages of files, such as libraries, are left out, because other programs may share them.
    """
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith(kinds))


def _growth(call: Callable[[], None]) -> int:
    """Returns the bytes by which private memory grows at most while `call` runs.

    It is sampled every millisecond because not every kernel can reset VmHWM.
    """
    samples = [_current_bytes("Pss_Anon:")]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            samples.append(_current_bytes("Pss_Anon:"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        call()
    finally:
        done.set()
        thread.join()
    return max(samples) - samples[0]


def _memory_rows(memory: dict[str, dict[str, float]]) -> list[Row]:
    gradients, largest = memory["plain"]["gradients"], memory["plain"]["largest"]
    at_rest = {e: (memory[e]["at_rest"] - memory["plain"]["at_rest"]) / MIB for e in memory}
    peak = {e: (memory[e]["peak"] - memory["plain"]["at_rest"]) / MIB for e in memory}
    share = {e: 100 * mib / (gradients / MIB) for e, mib in at_rest.items()}
    return [
        Row(
            f"memory at rest beyond parameters and gradients ({gradients / MIB:.0f} MiB of them), GPT-2 124M",
            "%",
            share["torch"],
            share["drivetrain"],
            target="<= 2 %",
            met=share["drivetrain"] <= 2,
        ),
        Row(
            "the same at the peak of a step",
            "MiB",
            peak["torch"],
            peak["drivetrain"],
            target=f"at rest + largest gradient: {at_rest['drivetrain'] + largest / MIB:.0f} MiB",
            met=peak["drivetrain"] <= at_rest["drivetrain"] + 1.02 * largest / MIB,
        ),
    ]


def _small_parameters(rounds: int) -> list[list[float]]:
    """Returns the seconds of backward with 1,000 parameters of 64 elements, as `times_of` does."""
    return times_of(Products([(64,)] * 1000), torch.randn(64), rounds, only_backward=True)


def times_of(
    module: nn.Module, x: torch.Tensor, rounds: int, *, only_backward: bool = False, keeps: bool = False
) -> list[list[float]]:
    """Returns the seconds of forward and backward without a wrapper, with torch's and with ours.

    They are by round, from a common start, on the slowest rank.

    Args:
        module: The module; copies of it are measured.
        x: Its input.
        rounds: The number of rounds.
        only_backward: Leaves forward out of the time.
        keeps: Keeps the gradients of the step before until the step has ended.
    """
    models = [_wrap(engine, copy.deepcopy(module)) for engine in ("plain", "torch", "drivetrain")]
    losses: list[torch.Tensor] = []
    kept: list[torch.Tensor | None] = []

    def prepare(which: int) -> None:
        kept[:] = [p.grad for p in models[which].parameters()] if keeps else []
        models[which].zero_grad()
        losses[:] = [models[which](x)] if only_backward else []
        meet()

    def step(which: int) -> None:
        (losses.pop() if only_backward else models[which](x)).backward()

    calls = [functools.partial(step, which) for which in range(len(models))]
    times = interleaved(calls, rounds, prepare=prepare, device=x.device)
    for a, b in zip(models[1].parameters(), models[2].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    return slowest(times)


class _GPT(nn.Module):
    """A GPT of about 10 M parameters, with batches so small that communication is exposed."""

    def __init__(self, width: int = 384, layers: int = 6, time_steps: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        block = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(time_steps), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1]), mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _exposed_communication(rounds: int, keeps: bool) -> list[list[float]]:
    module = _GPT()
    module._ddp_params_and_buffers_to_ignore = ["mask"]  # type: ignore[assignment]  # constant, so not broadcast
    return times_of(module, torch.randint(0, 256, (1, 17)), rounds, keeps=keeps)
