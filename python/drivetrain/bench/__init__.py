"""Implements `drivetrain bench`, which measures optimizers, DDP and all-reduce against torch on this machine."""

import argparse


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmarks and prints their tables. Returns exit code 0 whatever the figures are."""
    from .. import _C
    from . import allreduce, comm, ddp, optim
    from .measure import Row, lacks_folder, print_table, write_rows

    if lacks_folder(args.json, f"bench {args.topic}"):
        return 2
    if args.topic == "allreduce":
        return allreduce.run(args)
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
