"""Implements the command `drivetrain` (also `python -m drivetrain`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import cast

from . import arguments

# A command's module is imported only when the command runs: most import torch, which takes more than a second.
_COMMANDS = {
    "run": ("drivetrain.cli.run", "run an unedited training script on drivetrain"),
    "try": ("drivetrain.cli.trial", "run a script's first steps under torch and under drivetrain, and compare"),
    "explain": ("drivetrain.cli.explain", "find the samples that make a script's loss or gradients spike"),
    "bench": ("drivetrain.bench", "measure against torch on this machine"),
    "plan": ("drivetrain.cli.plan", "predict memory, time and cost of a training script"),
    "ckpt": ("drivetrain.cli.ckpt", "list, verify, show, export and clean up checkpoints"),
    "monitor": ("drivetrain.cli.monitor", "show where the time of recorded runs went"),
    "doctor": ("drivetrain.cli.doctor", "check torch, CUDA, NCCL, the build and the process group"),
    "env": ("drivetrain.cli.environment", "print versions and settings for a bug report"),
}
_EXAMPLES = """examples:
  torchrun --nproc-per-node 2 -m drivetrain run train.py           replace DistributedDataParallel in a script
  torchrun --nproc-per-node 2 -m drivetrain run --optim train.py   and the optimizers
  torchrun --nproc-per-node 2 -m drivetrain try train.py           see on your script if it trains the same, and faster
  torchrun --nproc-per-node 2 -m drivetrain explain train.py       find the samples behind a spike of the loss
  drivetrain monitor run.jsonl                                     see where the time of a run went
  drivetrain plan train.py --gpu h100 --gpus 8x8                   see if a script fits, and how long a step takes
  drivetrain doctor                                                find out what is wrong with an installation
  drivetrain bench optim                                           compare optimizer steps with torch's
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments after the program's name; None takes them from `sys.argv`.

    Returns:
        The exit code.

    Raises:
        SystemExit: The arguments contain `--help` or `--version`, or are wrong, or the script of `run` exits.
    """
    args = whole_parser().parse_args(argv)
    handler = cast(Callable[[argparse.Namespace], int], import_module(_COMMANDS[args.command][0]).run)
    return handler(args)


def whole_parser() -> argparse.ArgumentParser:
    """Builds the parser with the arguments of every command; shtab reads it to complete commands in shells."""
    parser = arguments.Parser(
        prog="drivetrain",
        description="DistributedDataParallel and optimizers for existing PyTorch scripts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"drivetrain {version('drivetrain')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (_, summary) in _COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        getattr(arguments, f"of_{command}")(subparser)
    return parser
