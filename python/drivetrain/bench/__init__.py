"""Implements `drivetrain bench`, which measures the tables of benchmarks/RESULTS.md against torch in one process."""

import argparse
import json
import platform
import sys
from pathlib import Path

HELP = """Measures drivetrain against torch and prints one table per topic.

Both sides run interleaved in one process. A row shows medians, the median of the paired ratios and its 95 % bootstrap
interval. The last column shows if the project's own target was met."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments to its parser."""
    parser.description = HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "topic",
        nargs="?",
        default="all",
        choices=[
            "optim",
            "accumulate",
            "activations",
            "ddp",
            "comm",
            "allreduce",
            "shard",
            "checkpoint",
            "monitor",
            "plan",
            "data",
            "gpu",
            "ablation",
            "scaling",
            "all",
        ],
        help="the topic to measure (default: all, optim, accumulate, activations, ddp and comm)",
    )
    parser.add_argument("--only", metavar="NAME", help="for topic gpu: run this measurement only")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="for topic gpu: run tiny sizes on the CPU, as a test without meaningful figures",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="for topic checkpoint: measure the disk of this folder (default: of temporary files)",
    )
    parser.add_argument("--transport", metavar="NAME", help="for topic allreduce: measure this one only")
    for name, default, what in (
        ("--minbytes", "1KiB", "smallest buffer"),
        ("--maxbytes", "64MiB", "largest buffer"),
    ):
        parser.add_argument(name, default=default, metavar="BYTES", help=f"for topic allreduce: {what} ({default})")
    parser.add_argument("--stepfactor", type=int, default=4, help="for topic allreduce: between two sizes (default: 4)")
    parser.add_argument("--gib", type=float, default=1.0, help="for topic checkpoint: size of the model (default: 1)")
    parser.add_argument(
        "--ranks",
        type=_counts,
        metavar="N,N,...",
        help="for topic comm: measure these numbers of ranks on this machine, for topic scaling to fit. For topic "
        "allreduce without torchrun: one number of ranks (default: 2)",
    )
    parser.add_argument("--cluster", default="h100-ib", help="for topic scaling: a cluster of planner/clusters.toml")
    parser.add_argument("--tokens", type=int, default=8192, help="for topic scaling: tokens of a rank in a step")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="for topic scaling: fit the JSON of comm --ranks")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a process (default: 2)")
    parser.add_argument("--rounds", type=int, default=31, help="timed rounds per row (default: 31)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _comm_of_ranks(args: argparse.Namespace) -> int:
    import os

    import torch

    from . import comm

    if args.topic != "comm":
        print(f"bench {args.topic}: --ranks requires topic comm or allreduce", file=sys.stderr)
        return 2
    if min(args.ranks) < 2:
        print(
            f"bench comm: --ranks has {min(args.ranks)}, expected numbers of 2 or more, such as 2,4,8", file=sys.stderr
        )
        return 2
    add_s = comm.add_seconds()
    points = comm.run_ranks(args.ranks, args.rounds)
    for point in points:
        what = f"{point['engine']}, {point['ranks']} ranks, {point['bytes']} bytes"
        print(f"{what}: {1e6 * point['seconds']:.0f} us")
    if args.json:
        cores = len(os.sched_getaffinity(0))
        facts = {"torch": torch.__version__, "machine": platform.machine(), "cores": cores, "add_s": add_s}
        args.json.write_text(json.dumps({**facts, "comm_ranks": points}, indent=2) + "\n")
    return 0


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmarks and prints their tables. Returns exit code 0 whatever the figures are."""
    import torch

    from .. import _C, __version__
    from . import (
        ablation,
        accumulate,
        activations,
        allreduce,
        checkpoint,
        comm,
        data,
        ddp,
        gpu,
        monitor,
        optim,
        plan,
        scaling,
        shard,
    )
    from .measure import Row, print_table

    if args.json and not args.json.absolute().parent.is_dir():
        print(f"bench {args.topic}: --json is {args.json}, and there is no folder for it", file=sys.stderr)
        return 2
    if args.topic == "gpu":
        return gpu.run(only=args.only, is_dry=args.dry_run, rounds=args.rounds, json_file=args.json)
    if args.only or args.dry_run:
        print(f"bench {args.topic}: --only and --dry-run require topic gpu", file=sys.stderr)
        return 2
    if args.topic == "allreduce":
        if args.ranks and len(args.ranks) > 1:
            print(f"bench allreduce: --ranks has {len(args.ranks)} numbers, expected one", file=sys.stderr)
            return 2
        return allreduce.run(
            ranks=args.ranks[0] if args.ranks else 2,
            least=args.minbytes,
            most=args.maxbytes,
            factor=args.stepfactor,
            only=args.transport,
            json_file=args.json,
        )
    if args.topic == "ablation":
        return ablation.run(args.json)
    if args.topic == "scaling":
        return scaling.run(args.cluster, args.tokens, args.fit, args.json)
    if args.ranks:
        return _comm_of_ranks(args)
    topics = ["optim", "accumulate", "activations", "ddp", "comm"] if args.topic == "all" else [args.topic]
    results: dict[str, list[Row]] = {}
    for topic in topics:
        if topic == "optim":
            results[topic] = optim.run(threads=args.threads, rounds=args.rounds)
            print_table(f"Optimizer step on the CPU, {args.threads} threads, {_C.isa()}", results[topic])
        elif topic == "accumulate":
            results[topic] = accumulate.run(threads=args.threads, rounds=args.rounds)
            title = f"Gradient accumulation of GPT-2 124M's linear layers, {accumulate.MICRO_STEPS} micro-steps"
            print_table(f"{title}, {args.threads} threads, {_C.isa()}", results[topic])
        elif topic == "activations":
            results[topic] = activations.run(rounds=args.rounds)
            title = f"Activation budgets, and {activations.REGIONS} checkpointed regions, CPU time of one thread"
            print_table(title, results[topic])
        elif topic == "checkpoint":
            results[topic] = checkpoint.run(args.directory, min(args.rounds, 7), args.gib)
            print_table(
                "Checkpoints of one process on this disk; the first column of figures is the other side", results[topic]
            )
        elif topic == "monitor":
            results[topic] = monitor.run(threads=args.threads, rounds=args.rounds)
            print_table("The monitor; the first column of figures is the other side", results[topic])
        elif topic == "plan":
            results[topic] = plan.run(threads=args.threads)
            print_table(
                "Plans for the CPU; the first column of figures is measured, the second is planned", results[topic]
            )
        elif topic == "data":
            results[topic] = data.run(threads=args.threads, rounds=args.rounds)
            print_table("Loops that wait for their loader", results[topic])
        elif topic == "shard":
            results[topic] = shard.run(rounds=args.rounds)
            title = f"DistributedDataParallel(shard=...), {shard.RANKS} CPU ranks of 1 thread"
            print_table(f"{title}; the first column of figures is the other side", results[topic])
        elif topic == "ddp":
            results[topic] = ddp.run(rounds=args.rounds)
            print_table("DistributedDataParallel, 2 CPU ranks of 1 thread", results[topic])
        else:
            results[topic] = comm.run(rounds=args.rounds)
            print_table("All-reduce between 2 CPU ranks of a host: gloo against shared memory", results[topic])
    if args.json:
        facts = {"torch": torch.__version__, "drivetrain": __version__, "isa": _C.isa(), "machine": platform.machine()}
        rows = {topic: [row.as_dict() for row in rows] for topic, rows in results.items()}
        args.json.write_text(json.dumps({**facts, **rows}, indent=2) + "\n")
    return 0
