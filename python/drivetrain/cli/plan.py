"""Implements `drivetrain plan`, which predicts memory, time and cost of an unedited training script."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planner.devices import Device
    from ..planner.result import Plan
    from ..planner.trace import StepTrace

_PROCESS_S = 600  # limit of the plan of one batch size
_SAME_NAMES = ("shard", "accumulate", "state_bits", "master_bits", "release", "expandable")  # as of Options


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 0, 1 if the step does not fit, or 2 if it cannot be planned."""
    from ..planner.script import ScriptError
    from ..planner.tracer import PlanError

    try:
        _check_files(args)
        plan = _plan(args)
        print(plan)
        _answer(plan, args)
    except (OSError, ValueError, ImportError, PlanError, ScriptError) as error:
        print(f"drivetrain plan: {error}", file=sys.stderr)
        return 2
    return 0 if plan.memory.fits else 1


def _check_files(args: argparse.Namespace) -> None:
    """Finds what the answers would fail on, before a plan that may take a minute.

    Raises:
        OSError: A file that is read is missing, or the folder of one that is written.
        ValueError: --price lacks --steps, a price is wrong, a plot's name has another suffix, or --calibrate is not for
            the CPU.
    """
    from ..planner.cost import read_prices
    from ..planner.devices import device_of

    if args.price is not None and args.steps is None:
        raise ValueError("--price needs --steps, the number of optimizer steps of the run")
    if args.plot is not None and args.plot.suffix not in (".svg", ".png"):
        raise ValueError(f"--plot is {args.plot}, expected a name that ends in .svg or .png")
    for option in ("price", "compare", "devices"):
        path = getattr(args, option)
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"--{option} is {path}, which is no file")
    for option in ("plot", "json"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"--{option} is {path}, and there is no folder {path.absolute().parent}")
    device = device_of(args.gpu, args.devices)
    if args.calibrate and device.kind != "cpu":
        raise ValueError(f"--calibrate measures this machine's CPU, and --gpu is {args.gpu}: leave it out")
    if args.price is not None:
        read_prices(args.price, device.key)


def _plan(args: argparse.Namespace, measures: bool = True) -> Plan:
    """Plans the script. `measures` lets a calibration run it on real values as well."""
    from ..memory import bytes_of
    from ..planner.devices import device_of
    from ..planner.options import Options
    from ..planner.result import Plan
    from ..planner.script import trace_script

    hosts, per_host = args.gpus
    device = device_of(args.gpu, args.devices)
    options = Options(
        world_size=hosts * per_host,
        per_host=per_host,
        budget=None if args.budget is None else bytes_of(args.budget, device.memory_bytes, "--budget"),
        **{name: getattr(args, name) for name in _SAME_NAMES},
    )
    trace = trace_script(
        args.script, args.arguments, device_kind=device.kind, batch=args.batch, world_size=options.world_size
    )
    calibration = None
    if args.calibrate:
        step_s = _iteration_s(trace, device, args) if measures else None
        alone = Plan.of(trace, device, Options()).calibrated()
        calibration = (alone if step_s is None else alone.refine(step_s)).calibration
    return Plan.of(trace, device, options, batch=trace.samples or None, calibration=calibration, devices=args.devices)


def _iteration_s(trace: StepTrace, device: Device, args: argparse.Namespace) -> float | None:
    """Returns the seconds of the script's iteration on real values; None, and a note why, if it cannot be measured."""
    from ..memory import host_memory
    from ..planner.options import Options
    from ..planner.result import Plan
    from ..planner.script import ScriptError, forked, measure_script
    from ..planner.tracer import PlanError

    try:
        # In forks, before this process computes: a fork cannot use threads that its parent has started.
        needed = forked(args.script, lambda _: Plan.of(trace, device, Options()).memory.total)
        assert isinstance(needed, int)
        if needed > host_memory().usable:
            raise PlanError("it needs more memory than is free")
        return measure_script(args.script, args.arguments, period=trace.optimizer_steps, batch=args.batch)
    except (PlanError, ScriptError) as error:
        trace.notes.append(f"the calibration leaves out loaders and Python, because no iteration was measured: {error}")
        return None


def needed_bytes(args: argparse.Namespace) -> int:
    """Returns the bytes that a rank needs, of the plan that the arguments ask for."""
    return _plan(args, measures=False).memory.total


def _largest_batch(plan: Plan, args: argparse.Namespace) -> str:
    """Returns the largest micro-batch that fits, and plans the script for each size in a process of its own."""
    from ..planner.questions import largest

    # A loader gives smaller batches than asked for if a step takes more than half of its data set.
    batch, limit = plan.trace.samples, plan.trace.epoch_samples // 2
    if not batch or not limit:
        return "not known, because the script takes no batches from a DataLoader: plan.largest_batch() answers it"

    def needs(size: int) -> int:
        return plan.memory.total if size == args.batch else _in_a_process({**vars(args), "batch": size})

    found = largest(needs, plan.memory.capacity, batch, limit)
    return f"{found:,}{' or more: half of the data set' if found == limit else ''}"


def _in_a_process(args: dict[str, Any]) -> int:
    """Returns `needed_bytes` from a fresh process, because a traced script leaves its traces in this one.

    Raises:
        ValueError: The script cannot be planned with these arguments.
    """
    code = (
        "import argparse, pickle, sys; from drivetrain.cli.plan import needed_bytes; "
        "print(needed_bytes(argparse.Namespace(**pickle.load(sys.stdin.buffer))))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(args), capture_output=True, check=False, timeout=_PROCESS_S
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the plan with a batch of {args['batch']} did not end within {_PROCESS_S} s") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"the plan with a batch of {args['batch']} failed: {why}")
    return int(done.stdout.split()[-1])


def _answer(plan: Plan, args: argparse.Namespace) -> None:
    from ..notebook import text_table
    from ..planner.cost import Run
    from ..planner.options import duration, formatted

    if args.questions:
        helps = [
            (gain.option, formatted(gain.saved_bytes), f"{1e3 * gain.added_s:+.2f} ms", "yes" if gain.fits else "no")
            for gain in plan.what_helps()
        ]
        fits = [
            (fit.device, formatted(fit.total_bytes), formatted(fit.capacity), "yes" if fit.fits else "no")
            for fit in plan.smallest_device()
        ]
        count = plan.smallest_count()
        print("\n" + text_table(("option", "saves", "costs", "fits"), helps))
        print("\n" + text_table(("device", "needs", "has", "fits"), fits))
        print(f"\nsmallest number of devices: {'none fits' if count is None else count}")
        print(f"largest micro-batch: {_largest_batch(plan, args)}")
    if args.steps is not None:
        print(f"\n{args.steps:,} steps take {duration(args.steps * plan.time.step_s)}")
    if args.price is not None:
        rows = [
            (price.tariff, f"{price.hours:,.1f}", f"{price.device_hours:,.1f}", f"{price.total:,.2f} {price.currency}")
            for price in plan.price(args.price, Run(args.steps))
        ]
        print("\n" + text_table(("tariff", "hours", "device hours", "price"), rows))
    if args.compare is not None:
        from ..planner.compare import compare, table

        print("\n" + table(compare(plan, args.compare)))
    if args.plot is not None:
        plan.plot(args.plot)
        print(f"\nwrote {args.plot}")
    if args.json is not None:
        args.json.write_text(json.dumps(plan.to_dict(), indent=2) + "\n")
