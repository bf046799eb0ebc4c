"""`python -m drivetrain`: the command line."""

import sys

from drivetrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
