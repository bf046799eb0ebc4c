"""Implements `drivetrain completion`: prints a shell script that completes drivetrain's commands and options."""

from __future__ import annotations

import argparse

import shtab

_HELP = """Prints a completion script for a shell.

  bash:  eval "$(drivetrain completion bash)"        # in ~/.bashrc
  zsh:   eval "$(drivetrain completion zsh)"         # in ~/.zshrc, after compinit
  tcsh:  drivetrain completion tcsh >~/.drivetrain.completion; source ~/.drivetrain.completion"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `completion`."""
    parser.description = _HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="shell that runs the script")


def run(args: argparse.Namespace) -> int:
    """Prints the completion script and returns 0."""
    from drivetrain.cli import whole_parser

    print(shtab.complete(whole_parser(), args.shell))
    return 0
