"""Runs one check by name and exits with 1 if a finding fails."""

import argparse
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import devices, ranks, side_stream, steps, waits
from .findings import Finding, Findings

Check = Callable[[torch.device, bool], Iterator[Finding]]
CHECKS: dict[str, Check] = {
    "two-ranks": functools.partial(ranks.run, 2),
    "four-ranks": functools.partial(ranks.run, 4),
    "side-stream": side_stream.run,
    "waits": waits.run,
    "bits": steps.run,
    "second-device": devices.run_second,
    "huge": devices.run_huge,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_check.checks", description=__doc__)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU with small sizes")
    parser.add_argument("--json", type=Path, help="file for the findings")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("torch sees no NVIDIA GPU here", file=sys.stderr)
        return 2
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", torch.cuda.current_device())
    findings = Findings(args.json)
    try:
        for finding in CHECKS[args.name](device, args.dry_run):
            findings.add(finding)
    except Exception as error:  # an error keeps the findings so far
        traceback.print_exc()
        findings.add(Finding("the check itself", False, f"{type(error).__name__}: {error}"))
    return findings.exit_code


if __name__ == "__main__":
    sys.exit(main())
