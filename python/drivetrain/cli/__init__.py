"""The command line `drivetrain run | bench | doctor`, also `python -m drivetrain`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

# The modules are imported when their command is the one asked for, so that the others stay fast.
_COMMANDS = {
    "run": ("drivetrain.cli.run", "run an unedited training script on drivetrain"),
    "bench": ("drivetrain.bench", "measure against torch on this machine"),
    "doctor": ("drivetrain.cli.doctor", "check torch, CUDA, NCCL, the build and the process group"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments after the program's name; those of this process if None.

    Returns:
        The exit code.

    Raises:
        SystemExit: `--help` was asked for, the arguments are wrong, or the script that `run` runs exits.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    args = _parser(command).parse_args(arguments)
    handler = cast(Callable[[argparse.Namespace], int], _command_module(args.command).run)
    return handler(args)


def _command_module(command: str) -> Any:
    return import_module(_COMMANDS[command][0])


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain", description="DistributedDataParallel and optimizers for existing PyTorch scripts."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run | bench | doctor")
    for command, (_, summary) in _COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if command == chosen:
            _command_module(command).add_arguments(subparser)
    return parser
