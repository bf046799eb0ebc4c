"""Implements `drivetrain completion`: prints a shell script that completes drivetrain's commands and options."""

from __future__ import annotations

import argparse

import shtab

# Older versions of shtab have fewer shells.
_INSTALL = {
    "bash": 'eval "$(drivetrain completion bash)"        # in ~/.bashrc',
    "zsh": 'eval "$(drivetrain completion zsh)"         # in ~/.zshrc, after compinit',
    "tcsh": "drivetrain completion tcsh >~/.drivetrain.completion; source ~/.drivetrain.completion",
    "fish": "drivetrain completion fish >~/.config/fish/completions/drivetrain.fish",
    "powershell": "drivetrain completion powershell | Out-String | Invoke-Expression    # in $PROFILE",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `completion`."""
    lines = (f"  {f'{shell}:':12s}{_INSTALL[shell]}" for shell in shtab.SUPPORTED_SHELLS if shell in _INSTALL)
    parser.description = "\n".join(("Prints a completion script for a shell.", "", *lines))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="shell that runs the script")


def run(args: argparse.Namespace) -> int:
    """Prints the completion script and returns 0."""
    from drivetrain.cli import whole_parser

    print(shtab.complete(whole_parser(), args.shell))
    return 0
