"""Implements `drivetrain plan`, which predicts memory, time and cost of an unedited training script."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planner.devices import Device
    from ..planner.result import Plan
    from ..planner.trace import StepTrace

_PROCESS_S = 600  # limit of the plan of one batch size
_SAME_NAMES = ("shard", "accumulate", "state_bits", "master_bits", "release", "expandable")  # as of Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments to its parser. Options may stand before or after the script."""
    parser.usage = "drivetrain plan [-h] [OPTION]... script.py [OPTION or ARGUMENT]... [-- ARGUMENT...]"
    parser.epilog = "Options may follow the script. Options unknown to plan, and all after --, belong to the script."
    parser.allow_abbrev = False  # options like plan's may be the script's
    _add_options(parser)
    parser.add_argument("script", help="path of the script")
    plain = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        namespace, others = plain(given[:end], namespace)
        namespace.arguments = [*others, *given[end + 1 :]]
        return namespace, []

    # argparse itself cannot tell "script.py --" from "script.py".
    parser.parse_known_args = parse  # type: ignore[method-assign]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="h100", metavar="NAME", help="device of the table, or cpu (default: h100)")
    parser.add_argument(
        "--gpus", type=_layout, default=(1, 1), metavar="HOSTSxGPUS", help="such as 8x8, or 8 (default: 1)"
    )
    parser.add_argument("--batch", type=_count, metavar="N", help="batch size of every DataLoader, per rank")
    parser.add_argument("--budget", metavar="BYTES", help="most bytes of activations kept for backward, such as 20GiB")
    parser.add_argument(
        "--accumulate", type=_count, default=1, metavar="N", help="micro-batches of a step (default: 1)"
    )
    parser.add_argument("--shard", choices=["optimizer", "gradients"], help="divide these among the ranks")
    parser.add_argument("--state-bits", type=int, choices=[32, 16, 8], help="format of optimizer states")
    parser.add_argument("--master-bits", type=int, choices=[32, 24], help="format of master weights")
    parser.add_argument("--release", action="store_true", help="free each gradient in backward")
    parser.add_argument("--expandable", action="store_true", help="use expandable segments of CUDA's allocator")
    parser.add_argument("--devices", type=Path, metavar="FILE", help="TOML file with more devices")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="with --gpu cpu: measure operations and the script's iterations here, for a minute at most",
    )
    parser.add_argument("--price", type=Path, metavar="FILE", help="TOML file with your prices")
    parser.add_argument("--steps", type=_count, metavar="N", help="optimizer steps of the run, for its time and price")
    parser.add_argument("--questions", action="store_true", help="also say what fits, and which options help")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="JSONL file of drivetrain.Monitor: print the errors"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory over the step as .svg or .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")


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


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def _layout(text: str) -> tuple[int, int]:
    matched = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if matched is None or not int(matched[2]) or matched[1] == "0":
        raise argparse.ArgumentTypeError(f"'{text}' is not HOSTSxGPUS, such as 8x8, or a number of GPUs of one host")
    return int(matched[1] or 1), int(matched[2])
