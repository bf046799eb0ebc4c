"""Runs the command line for `python -m drivetrain`."""

import sys

from drivetrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
