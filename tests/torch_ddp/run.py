"""Runs torch's DDP tests with one class and prints each outcome: `python -m torch_ddp.run --ours [-k regex]`."""

import argparse
import re
import sys

from . import baseline
from .pool import Pool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_ddp.run", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--ours", action="store_const", dest="kind", const="drivetrain", help="drivetrain's class")
    which.add_argument("--torch", action="store_const", dest="kind", const="torch", help="torch's class")
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests whose name matches")
    parser.add_argument("-q", action="store_true", help="one line per failure instead of every rank's traceback")
    parser.add_argument("--all", action="store_true", help="those that torch's class does not pass on a CPU, too")
    options = parser.parse_args()
    recorded = {} if options.all else baseline.recorded()
    pool = Pool(options.kind)
    counts: dict[str, int] = {}
    try:
        for name in pool.names():
            if not re.search(options.k, name) or recorded.get(name, baseline.PASSES) != baseline.PASSES:
                continue
            outcome = pool.run(name)
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
            print(f"{outcome.status} {outcome.seconds:5.1f} s  {name}  {outcome.why}".rstrip(), flush=True)
            if outcome.status == "failed" and not options.q:
                print(outcome.detail)
    finally:
        pool.close()
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return int(bool(counts.get("failed")))


if __name__ == "__main__":
    sys.exit(main())
