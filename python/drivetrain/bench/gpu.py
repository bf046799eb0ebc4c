"""What `bench gpu` measures: one row in MEASUREMENTS per topic, each of which may fail without the others."""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .. import __version__
from . import accumulate, activations, activations_compiled, comm, ddp, end_to_end, host, large, optim_gpu, repeats
from .measure import Row, print_table

# Yields rows as they are measured, from the device, the rounds and whether all is to be tiny.
Measurement = Callable[[torch.device, int, bool], Iterator[Row]]
MEASUREMENTS: dict[str, tuple[str, Measurement]] = {
    "copy": ("Copy bandwidth", optim_gpu.run_copy),
    "optim": ("Optimizer steps, against torch's fused and foreach", optim_gpu.run_steps),
    "tail": ("The tail of a step, against torch's four calls", optim_gpu.run_tails),
    "rivals": ("Optimizer steps of 1.3 B parameters, against FlashAdamW", optim_gpu.run_rivals),
    "ddp": ("DistributedDataParallel, against torch's", ddp.run_gpu),
    "comm": ("All-reduce, against the process group's", comm.run_gpu),
    "accumulate": (
        f"Gradient accumulation of GPT-2 124M's linear layers, {accumulate.MICRO_STEPS} micro-steps",
        accumulate.run_gpu,
    ),
    "activations": ("Activation budget of a GPT, against torch's checkpointing at equal peaks", activations.run_gpu),
    "compiled": ("Activation budget of compiled blocks, against torch's memory budget", activations_compiled.run),
    "host": ("Host time of steps, and DDP on a host-bound model", host.run),
    "large": ("8 B parameters trained on one card of 80 GB, all of them", large.run_gpu),
    "repeats": ("Repeated runs of a training step, by their bits", repeats.run_gpu),
    "end to end": ("GPT-2 124M end to end, against the stock script", end_to_end.run),
}
DRY_ROUNDS = 2


def run(only: str | None, is_dry: bool, rounds: int, json_file: Path | None) -> int:
    """Measures all, or one alone; prints a table of each and keeps `json_file` up to date row by row.

    Returns the exit code: 0, 1 if a measurement failed (the others are done), 2 if there is nothing to do here.
    """
    if only is not None and only not in MEASUREMENTS:
        print(f"bench gpu: --only is {only!r}, expected one of {', '.join(MEASUREMENTS)}", file=sys.stderr)
        return 2
    if not is_dry and not torch.cuda.is_available():
        print("bench gpu: torch sees no NVIDIA GPU here (--dry-run shows on the CPU that it runs)", file=sys.stderr)
        return 2
    device = torch.device("cpu") if is_dry else torch.device("cuda", torch.cuda.current_device())
    where = "dry run on the CPU, figures mean nothing" if is_dry else torch.cuda.get_device_name()
    results: dict[str, list[Row]] = {}
    failed = []
    for name in [only] if only else MEASUREMENTS:
        title, measure = MEASUREMENTS[name]
        results[name] = []
        try:
            for row in measure(device, DRY_ROUNDS if is_dry else rounds, is_dry):
                results[name].append(row)
                _write(json_file, where, results)
        except Exception:  # whatever it is, the other measurements are not concerned
            traceback.print_exc()
            failed.append(name)
        print_table(f"{title}; {where}", results[name])
    if failed:
        print(f"bench gpu: failed: {', '.join(failed)}; see above", file=sys.stderr)
    return int(bool(failed))


def _write(file: Path | None, where: str, results: dict[str, list[Row]]) -> None:
    """Whole at any time, even for who reads it after a kill."""
    if file is None:
        return
    facts = {"torch": torch.__version__, "drivetrain": __version__, "device": where}
    rows = {MEASUREMENTS[name][0]: [row.as_dict() for row in rows] for name, rows in results.items()}
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps({**facts, "tables": rows}, indent=2) + "\n")
    part.replace(file)
