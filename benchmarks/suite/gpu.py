"""Runs `benchmarks/run.py gpu`: one entry of MEASUREMENTS per table. A failing measurement does not stop the others."""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from drivetrain import __version__
from drivetrain.bench.measure import Row, print_table

from . import accumulate, activations, activations_compiled, end_to_end, host, large, optim_gpu, ranks_gpu, repeats

# Yields rows as they are measured; takes the device, the rounds, and True for a dry run with tiny sizes.
Measurement = Callable[[torch.device, int, bool], Iterator[Row]]
MEASUREMENTS: dict[str, tuple[str, Measurement]] = {
    "copy": ("Copy bandwidth", optim_gpu.run_copy),
    "optim": ("Optimizer steps, against torch's fused and foreach", optim_gpu.run_steps),
    "tail": ("The tail of a step, against torch's four calls", optim_gpu.run_tails),
    "rivals": ("Optimizer steps of 1.3 B parameters, against FlashAdamW", optim_gpu.run_rivals),
    "ddp": ("DistributedDataParallel, against torch's", ranks_gpu.run_ddp),
    "comm": ("All-reduce, against the process group's", ranks_gpu.run_comm),
    "accumulate": (
        f"Gradient accumulation of GPT-2 124M's linear layers, {accumulate.MICRO_STEPS} micro-steps",
        accumulate.run_gpu,
    ),
    "activations": ("Activation budget of a GPT, against torch's checkpointing at equal peaks", activations.run_gpu),
    "compiled": ("Activation budget of compiled blocks, against torch's memory budget", activations_compiled.run),
    "host": ("Host time of steps, and DDP on a host-bound model", host.run),
    "large": ("Full training of 8 B parameters on one 80 GB card", large.run_gpu),
    "repeats": ("Bits of repeated training runs", repeats.run_gpu),
    "end to end": ("GPT-2 124M end to end, against the stock script", end_to_end.run),
}
DRY_ROUNDS = 2


def run(only: str | None, is_dry: bool, rounds: int, json_file: Path | None) -> int:
    """Runs all measurements or one, prints a table for each, and updates `json_file` after every row.

    Returns the exit code: 0, 1 if a measurement failed (the others are complete), or 2 if nothing can be measured here.
    """
    if only is not None and only not in MEASUREMENTS:
        print(f"run.py gpu: --only is {only!r}, expected one of {', '.join(MEASUREMENTS)}", file=sys.stderr)
        return 2
    if not is_dry and not torch.cuda.is_available():
        print("run.py gpu: torch sees no NVIDIA GPU here (use --dry-run to test the code on the CPU)", file=sys.stderr)
        return 2
    device = torch.device("cpu") if is_dry else torch.device("cuda", torch.cuda.current_device())
    where = "dry run on the CPU, figures are meaningless" if is_dry else torch.cuda.get_device_name()
    results: dict[str, list[Row]] = {}
    failed = []
    for name in [only] if only else MEASUREMENTS:
        title, measure = MEASUREMENTS[name]
        results[name] = []
        try:
            for row in measure(device, DRY_ROUNDS if is_dry else rounds, is_dry):
                results[name].append(row)
                _write(json_file, where, results)
        except Exception:  # the other measurements still run
            traceback.print_exc()
            failed.append(name)
        print_table(f"{title}; {where}", results[name])
    if failed:
        print(f"run.py gpu: failed: {', '.join(failed)}; see above", file=sys.stderr)
    return int(bool(failed))


def _write(file: Path | None, where: str, results: dict[str, list[Row]]) -> None:
    """Replaces the file atomically, so it is complete even after a kill."""
    if file is None:
        return
    facts = {"torch": torch.__version__, "drivetrain": __version__, "device": where}
    rows = {MEASUREMENTS[name][0]: [row.as_dict() for row in rows] for name, rows in results.items()}
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps({**facts, "tables": rows}, indent=2) + "\n")
    part.replace(file)
