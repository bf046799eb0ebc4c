"""Runs each kernel once at small odd sizes, for compute-sanitizer: every rule in every storage, norms, accumulation,
packing.

    compute-sanitizer --tool memcheck python -m gpu_kernels --steps     (with PYTORCH_NO_CUDA_MEMORY_CACHING=1)
    compute-sanitizer --tool memcheck python -m gpu_kernels --captured  (capturing needs the caching allocator)

Says "imported", "the device answers" and "all kernels ran", so that one can tell a device that refuses the tool from an
error of ours. Rules and storages are those of the tests, which tests/bench/test_gpu_check.py holds against the sources.
"""

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import drivetrain
from drivetrain import _C, optim
from drivetrain.optim.rule import rule_of
from optim_cases import ADAFACTOR_PRECISIONS, CASES, make_params
from pack_cases import ROUNDED
from precision_cases import PRECISIONS

SHAPES: list[Any] = [(0,), (1,), (257,), (3, 171)]  # on either side of a block of states
MATRICES: list[Any] = [(5, 67), (33, 9)]


def optimizers(device: str) -> Iterator[Any]:
    """Yields one optimizer per rule, storage format and dtype, before its first step."""
    whole = {"max_grad_norm": 1.0, "zero_grads_in_step": True}
    for case in CASES.values():
        for dtype in (torch.float32, torch.float64):
            yield case.ours(_on(device, dtype, SHAPES), **case.options, **whole)
    for precision in PRECISIONS.values():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype == torch.float16 and precision.get("master_bits") == 24:
                continue  # 24 bits are for bfloat16 parameters only.
            for ours, options in _one_case_per_rule():
                yield ours(_on(device, dtype, SHAPES), **options, **precision, min_8bit_size=0, **whole)
            yield optim.Muon(_on(device, dtype, MATRICES), **precision, min_8bit_size=0, **whole)
    for precision in ADAFACTOR_PRECISIONS.values():
        for dtype in (torch.float32, torch.bfloat16):
            yield optim.Adafactor(_on(device, dtype, [*SHAPES, *MATRICES]), **precision, **whole)


def _one_case_per_rule() -> list[tuple[type, dict[str, Any]]]:
    cases: dict[str, tuple[type, dict[str, Any]]] = {}
    for ours, _, options in CASES.values():
        optimizer = ours(make_params(), **options)
        cases.setdefault(rule_of(type(optimizer)).name_of(optimizer.param_groups[0]), (ours, options))
    return list(cases.values())


def _on(device: str, dtype: torch.dtype, shapes: list[Any]) -> list[Tensor]:
    params = [p.detach().to(device).requires_grad_() for p in make_params(dtype, shapes)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def run_steps(device: str) -> None:
    """Makes two steps of every optimizer, the second with states, and accumulates into main gradients."""
    for optimizer in optimizers(device):
        optimizer.step()
        optimizer.step()
    formats = ((torch.bfloat16, 32), (torch.float16, 32), (torch.bfloat16, 24))
    for (dtype, bits), fuses in itertools.product(formats, (False, True)):
        model = nn.Linear(33, 17).to(device, dtype)
        if fuses:
            drivetrain.fuse_wgrad(model)
        drivetrain.main_grads(model, bits)
        for _ in range(2):
            model(torch.ones(3, 33, device=device, dtype=dtype)).sum().backward()


def run_packing(device: str) -> None:
    """Packs into each smaller storage format and back, from memory with and without 8-byte alignment."""
    packings: list[tuple[str, list[torch.dtype]]] = [("bits", [torch.bool]), *ROUNDED.items()]
    for packing, dtypes in packings:
        for dtype, numel, start in itertools.product(dtypes, (0, 1, 7, 257, 1283, 9001), (0, 3)):
            packed = _C.pack(torch.randn(numel + start, device=device).to(dtype)[start:], packing)
            assert packed is not None
            _C.unpack(packed)


def run_captured(device: str) -> None:
    """Replays a step of every optimizer from a CUDA graph; on the CPU, makes the step."""
    for optimizer in optimizers(device):
        optimizer.step()
        if device == "cpu":
            optimizer.step()
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
            optimizer.float32_value(optimizer.param_groups[0]["params"][0])  # converts with a table in the graph
        graph.replay()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu_kernels", description=__doc__)
    parser.add_argument("--steps", action="store_true", help="every kernel but those of captures")
    parser.add_argument("--captured", action="store_true", help="steps captured into CUDA graphs")
    parser.add_argument("--device", default="cuda", help="cpu: shows that this script runs (default: cuda)")
    args = parser.parse_args()
    print("imported", flush=True)
    torch.ones(1, device=args.device).add_(1).item()
    print("the device answers", flush=True)
    torch.manual_seed(0)
    if args.steps:
        run_steps(args.device)
        run_packing(args.device)
    if args.captured:
        run_captured(args.device)
    if args.device != "cpu":
        torch.cuda.synchronize()
    print("all kernels ran", flush=True)


if __name__ == "__main__":
    main()
