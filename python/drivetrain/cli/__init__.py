"""Implements the command `drivetrain` (also `python -m drivetrain`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, cast

# Each command's module is imported only when the command runs, so that other commands start faster.
_COMMANDS = {
    "run": ("drivetrain.cli.run", "run an unedited training script on drivetrain"),
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
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    args = _parser([command] if command else []).parse_args(arguments)
    handler = cast(Callable[[argparse.Namespace], int], _command_module(args.command).run)
    return handler(args)


def whole_parser() -> argparse.ArgumentParser:
    """Builds the parser with the arguments of every command, for tools such as shtab, which completes it in shells."""
    return _parser(_COMMANDS)


def _command_module(command: str) -> Any:
    return import_module(_COMMANDS[command][0])


def _parser(with_arguments: Sequence[str] | dict[str, tuple[str, str]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain",
        description="DistributedDataParallel and optimizers for existing PyTorch scripts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"drivetrain {version('drivetrain')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (_, summary) in _COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if command in with_arguments:
            _command_module(command).add_arguments(subparser)
    return parser
