"""Measures what each row of the GPU benchmarks launches on the stand-in, and compares it with launches.md.

`make launches` prints the table. It fails if a row's kernels, graph nodes, copies or bytes differ from the committed
ones. `make launches ARGS=--write` writes the file again, so that a review sees the change.
"""

import argparse
import ctypes
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import drivetrain
import fake_cuda
from drivetrain import optim
from drivetrain.bench.optim import COMPRESSED, MAX_NORM, models
from drivetrain.bench.ranks import BACKENDS, on_ranks
from drivetrain.bench.roofline import least_bytes
from drivetrain.bench.shapes import Shape, gpt2_124m, gpt3_xl, many_small, resnet50
from drivetrain.grad.fuse_wgrad import fuse_wgrad
from drivetrain.grad.main_grads import main_grads
from suite.optim_gpu import LAYOUTS

REPOSITORY = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("launches.md")
HEAD = """<!-- Lists what each row of the GPU benchmarks launches; `make launches ARGS=--write` writes this file. -->

Every dimension of the benchmarks' shapes is divided, so that the number of tensors and the kind of each stay. "Nodes"
counts the nodes of the step's CUDA graph. "Copies" come from the host. "Bytes" are what the package's kernels access
in device memory, over the bytes that the step must move. A byte that one kernel accesses several times counts once.

| Row | Kernels of the package, and collectives | torch's operators | Nodes | Copies | Bytes |
| --- | --- | ---: | ---: | ---: | ---: |
"""
OURS = "our kernel "
# A symbol has the numbers of its formats, not their names.
FORMATS = re.findall(
    r"^  k(\w+),", (REPOSITORY / "csrc/formats/storage.h").read_text().split("enum class Format")[1], re.M
)
Row = tuple[str, ...]  # the cells of a line
Passes = dict[str, int]  # arguments of least_bytes


def narrow(shapes: list[Shape], by: int) -> list[Shape]:
    """Divides dimensions, the vocabulary by more. The stand-in runs about a million elements per second."""
    return [tuple(n // (5 * by) if n > 10_000 else n // by if n >= 64 else n for n in shape) for shape in shapes]


def short(name: str) -> str:
    """Removes namespaces, the returned type and the parameters from a kernel's full name, and names its formats."""
    name = re.sub(r"\(anonymous namespace\)::|drivetrain::|optim::|formats::|^void ", "", name)
    name = re.sub(r"\(Format\)(\d+)", lambda number: FORMATS[int(number[1])], name)
    depth = 0
    for at, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def cells(what: str, ran: list[fake_cuda.Ran], nodes: str = "", least: int = 0) -> Row:
    """Returns the cells of a row from the work that a step ran, in the order of the table."""
    ours = [each for each in ran if each.name.startswith(OURS)]
    names = [short(each.name.removeprefix(OURS)) for each in ours]
    counts = Counter([*names, *(each.name for each in ran if each.name.startswith("NCCL: "))])
    kernels = ", ".join(f"{count} x `{name}`" if count > 1 else f"`{name}`" for name, count in counts.items())
    operators = sum(each.name.startswith("aten::") for each in ran)
    copies = sum(bool(re.match(r"cudaMemcpy\S* of \d+ bytes from (pinned|pageable) to device", e.name)) for e in ran)
    moved = sum(each.bytes_read + each.bytes_written for each in ours)
    return what, kernels, str(operators), nodes, str(copies), f"{moved / least:.2f}" if least else ""


def num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    number = ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(number)) == 0
    return number.value


def stepped(what: str, shapes: list[Shape], dtype: torch.dtype, make: Callable[..., Any], passes: Passes) -> Row:
    """Measures the fourth step and captures a fifth. The first makes states, and the second may place other tables."""
    torch.cuda.empty_cache()  # A step copies its table again where the allocator gives it other memory.
    params = models(shapes, dtype, "cuda")[1]
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    with fake_cuda.recording() as ran:
        optimizer.step()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        optimizer.step()
    return cells(what, ran, str(num_nodes(graph)), least_bytes(params, optimizer, **passes))


def backward(what: str, prepare: Callable[[nn.Module], nn.Module]) -> Row:
    """Measures the third backward of four layers in bfloat16. `prepare` returns the module to call."""
    torch.manual_seed(0)
    model = prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16().cuda())
    x = torch.randn(8, 64, device="cuda").bfloat16()
    for _ in range(3):
        loss = model(x).float().square().mean()
        with fake_cuda.recording() as ran:
            loss.backward()
    return cells(what, ran)


def in_main_grads(model: nn.Module, bits: int, fuses: bool) -> nn.Module:
    if fuses:
        fuse_wgrad(model)
    main_grads(model, bits)
    return model


def in_backward(model: nn.Module) -> nn.Module:
    optim.AdamW(model.parameters(), master_bits=24, state_bits=8).step_in_backward(model, bucket_cap_mb=0.02)
    return model


def on_two_ranks(what: str, transport: str) -> Row:
    wrap = partial(drivetrain.DistributedDataParallel, transport=transport)
    found: Row = on_ranks(partial(backward, what, wrap), count=2, backend=BACKENDS["cuda"])
    return found


def rows() -> dict[str, Callable[[], Row]]:
    """Maps the name of each row to a function that measures it."""
    gpt2, resnet, small = narrow(gpt2_124m(), 12), narrow(resnet50(), 4), many_small()
    layer: list[Shape] = [(64, 192), (64, 64), (64, 256), (256, 64)]
    fp32, bf16 = torch.float32, torch.bfloat16
    tail = partial(optim.AdamW, max_grad_norm=MAX_NORM, zero_grads_in_step=True)
    steps: list[tuple[str, list[Shape], torch.dtype, Callable[..., Any], Passes]] = [
        *(
            (
                f"{each.what.split(', against')[0]}, GPT-2",
                gpt2,
                each.dtype,
                partial(each.ours, **each.precision),
                each.passes,
            )
            for each in LAYOUTS
        ),
        ("AdamW fp32, ResNet-50", resnet, fp32, optim.AdamW, {}),
        ("AdamW fp32, 10,000 x 64", small, fp32, optim.AdamW, {}),
        (
            "AdamW 24-bit masters, GPT-3 XL",
            narrow(gpt3_xl(), 32),
            bf16,
            partial(optim.AdamW, master_bits=24, state_bits=8),
            {},
        ),
        ("Muon fp32, a layer", layer, fp32, optim.Muon, {}),
        ("Muon fp32, 48 matrices", layer * 12, fp32, optim.Muon, {}),
        ("clip, AdamW, zero fp32, GPT-2", gpt2, fp32, tail, {"grad_passes": 3}),
        ("clip, AdamW, zero fp32, ResNet-50", resnet, fp32, tail, {"grad_passes": 3}),
        (
            "clip, AdamW, zero bf16, 16-bit remainder, 8-bit states, GPT-2",
            gpt2,
            bf16,
            partial(tail, **COMPRESSED),
            {"grad_passes": 3},
        ),
    ]
    found: dict[str, Callable[[], Row]] = {what: partial(stepped, what, *rest) for what, *rest in steps}
    passes = {"backward of four layers": lambda model: model}
    for bits in (32, 24):
        passes[f"backward into {bits} bits"] = partial(in_main_grads, bits=bits, fuses=False)
        passes[f"backward into {bits} bits, fused"] = partial(in_main_grads, bits=bits, fuses=True)
    passes["backward with AdamW in it, two buckets, 24-bit masters, 8-bit states"] = in_backward
    found |= {what: partial(backward, what, prepare) for what, prepare in passes.items()}
    return found | {
        what: partial(on_two_ranks, what, each)
        for each in ("torch", "nccl")
        for what in [f"DDP, two ranks, transport {each}"]
    }


def line(row: Row) -> str:
    return f"| {' | '.join(row)} |"


def committed() -> dict[str, str]:
    """Returns the lines of the committed table by the name of their row."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {each.split(" | ")[0].removeprefix("| "): each for each in lines if each.startswith("| ")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the committed table again")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure rows whose name contains this text")
    args = parser.parse_args()
    expected, measured, changed = committed(), [], []
    for what, measure in rows().items():
        if args.only not in what:
            continue
        measured.append(line(measure()))
        print(measured[-1], flush=True)
        if measured[-1] != expected.get(what):
            changed.append(f"changed, {TABLE.name} has:\n{expected.get(what, 'no such row')}")
            print(changed[-1], flush=True)
    if args.write and not args.only:
        TABLE.write_text(HEAD + "\n".join(measured) + "\n")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
