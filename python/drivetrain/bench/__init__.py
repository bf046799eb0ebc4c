"""Implements `drivetrain bench`, which measures optimizers, DDP and all-reduce against torch on this machine."""

import argparse
from pathlib import Path

HELP = """Measures drivetrain against torch and prints one table per topic.

Both sides run interleaved in one process. A row shows medians, the median of the paired ratios and its 95 % bootstrap
interval. The last column shows if the project's own target was met."""
_TOPICS = {
    "all": "optim, ddp and comm (the default)",
    "optim": "steps of optimizers on the CPU",
    "ddp": "DistributedDataParallel on 2 CPU ranks",
    "comm": "all-reduce between CPU ranks of this machine",
    "allreduce": "every transport by size, in the columns of nccl-tests; also under torchrun",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments to its parser."""
    parser.description = HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(topic="all", threads=2, rounds=31, json=None)
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC")
    for topic, summary in _TOPICS.items():
        one = topics.add_parser(topic, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if topic in ("all", "optim"):
            one.add_argument("--threads", type=int, default=2, help="CPU threads of a process (default: 2)")
        if topic != "allreduce":
            one.add_argument("--rounds", type=int, default=31, help="timed rounds per row (default: 31)")
        one.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
        if topic == "allreduce":
            one.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks without torchrun (default: 2)")
            one.add_argument("--transport", metavar="NAME", help="measure this one only")
            one.add_argument("--minbytes", default="1KiB", metavar="BYTES", help="smallest buffer (1KiB)")
            one.add_argument("--maxbytes", default="64MiB", metavar="BYTES", help="largest buffer (64MiB)")
            one.add_argument("--stepfactor", type=int, default=4, help="between two sizes (default: 4)")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmarks and prints their tables. Returns exit code 0 whatever the figures are."""
    from .. import _C
    from . import allreduce, comm, ddp, optim
    from .measure import Row, lacks_folder, print_table, write_rows

    if lacks_folder(args.json, f"bench {args.topic}"):
        return 2
    if args.topic == "allreduce":
        return allreduce.run(
            ranks=args.ranks,
            least=args.minbytes,
            most=args.maxbytes,
            factor=args.stepfactor,
            only=args.transport,
            json_file=args.json,
        )
    results: dict[str, list[Row]] = {}
    if args.topic in ("all", "optim"):
        results["optim"] = optim.run(threads=args.threads, rounds=args.rounds)
        print_table(f"Optimizer step on the CPU, {args.threads} threads, {_C.isa()}", results["optim"])
    if args.topic in ("all", "ddp"):
        results["ddp"] = ddp.run(rounds=args.rounds)
        print_table("DistributedDataParallel, 2 CPU ranks of 1 thread", results["ddp"])
    if args.topic in ("all", "comm"):
        results["comm"] = comm.run(rounds=args.rounds)
        print_table("All-reduce between 2 CPU ranks of a host: gloo against shared memory", results["comm"])
    if args.json:
        write_rows(args.json, results)
    return 0
