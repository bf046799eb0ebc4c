"""Runs the benchmarks behind tables of the documentation, beyond those that `drivetrain bench` prints.

python benchmarks/run.py TOPIC
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from drivetrain import _C
from drivetrain.bench.measure import Row, lacks_folder, print_table, write_rows

HELP = """Measures drivetrain against torch and other packages, and prints one table per topic.

Both sides run interleaved in one process. A row shows medians, the median of the paired ratios and its 95 % bootstrap
interval. The last column shows if the project's own target was met. `drivetrain bench` has further topics."""
_TOPICS = {
    "accumulate": "gradient accumulation",
    "activations": "activation budgets and checkpointed regions",
    "checkpoint": "checkpoints on this disk",
    "data": "loops that wait for their loader",
    "monitor": "the monitor's overhead and account",
    "plan": "plans of models for the CPU",
    "scale": "memory and construction of DistributedDataParallel on many ranks",
    "shard": "DistributedDataParallel(shard=...)",
    "scaling": "a cost model of data parallelism on clusters",
    "gpu": "all measurements of a GPU",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True)
    for topic, summary in _TOPICS.items():
        one = topics.add_parser(topic, help=summary, description=f"Measures {summary}.")
        one.add_argument("--threads", type=int, default=2, help="CPU threads of a process (default: 2)")
        one.add_argument("--rounds", type=int, default=31, help="timed rounds per row (default: 31)")
        one.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
        if topic == "checkpoint":
            what = "measure the disk of this folder (default: of temporary files)"
            one.add_argument("--directory", type=Path, help=what)
            one.add_argument("--gib", type=float, default=1.0, help="size of the model (default: 1)")
        if topic == "scaling":
            one.add_argument("--cluster", default="h100-ib", help="a cluster of suite/clusters.toml")
            one.add_argument("--tokens", type=int, default=8192, help="tokens of a rank in a step")
            what = "measured all-reduces to fit (default: results/clusters/published_nccl.json)"
            one.add_argument("--fit", type=Path, metavar="FILE", help=what)
        if topic == "gpu":
            one.add_argument("--only", metavar="NAME", help="run this measurement only")
            what = "run tiny sizes on the CPU, as a test without meaningful figures"
            one.add_argument("--dry-run", action="store_true", help=what)
    return parser


def _table(args: argparse.Namespace) -> tuple[str, Callable[[], list[Row]]]:
    """Returns the title of a topic's table, and the function that measures its rows."""
    from suite import accumulate, activations, checkpoint, data, monitor, plan, scale, shard

    threads, rounds = args.threads, args.rounds
    other = "the first column of figures is the other side"
    if args.topic == "accumulate":
        title = f"Gradient accumulation of GPT-2 124M's linear layers, {accumulate.MICRO_STEPS} micro-steps"
        return f"{title}, {threads} threads, {_C.isa()}", lambda: accumulate.run(threads=threads, rounds=rounds)
    if args.topic == "activations":
        title = f"Activation budgets, and {activations.REGIONS} checkpointed regions, CPU time of one thread"
        return title, lambda: activations.run(rounds=rounds)
    if args.topic == "checkpoint":
        title = f"Checkpoints of one process on this disk; {other}"
        return title, lambda: checkpoint.run(args.directory, min(rounds, 7), args.gib)
    if args.topic == "monitor":
        return f"The monitor; {other}", lambda: monitor.run(threads=threads, rounds=rounds)
    if args.topic == "plan":
        title = "Plans for the CPU; the first column of figures is measured, the second is planned"
        return title, lambda: plan.run(threads=threads)
    if args.topic == "data":
        return "Loops that wait for their loader", lambda: data.run(threads=threads, rounds=rounds)
    if args.topic == "scale":
        return "DistributedDataParallel on many CPU ranks", lambda: scale.run(rounds)
    title = f"DistributedDataParallel(shard=...), {shard.RANKS} CPU ranks of 1 thread; {other}"
    return title, lambda: shard.run(rounds=rounds)


def main() -> int:
    """Runs a topic. Returns exit code 0 whatever the figures are."""
    args = _parser().parse_args()
    if lacks_folder(args.json, f"run.py {args.topic}"):
        return 2
    if args.topic == "gpu":
        from suite import gpu

        return gpu.run(only=args.only, is_dry=args.dry_run, rounds=args.rounds, json_file=args.json)
    if args.topic == "scaling":
        from suite import scaling

        return scaling.run(args.cluster, args.tokens, args.fit or scaling.PUBLISHED, args.json)
    title, measure = _table(args)
    rows = measure()
    print_table(title, rows)
    if args.json:
        write_rows(args.json, {args.topic: rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
