"""Runs pytest with the installed plugins and reports which tests are affected by missing ones.

Plugins are loaded by name, because the machine may have others installed that must not load.
"""

import argparse
import importlib.util
import os
import sys

WITHOUT = {  # maps each module to the effect of its absence
    "hypothesis": "tests of random inputs cannot be collected",
    "expecttest": "torch's own tests, and with them tests/optim/test_optim_db*.py, cannot be collected",
    "numpy": "tests that go through NumPy fail",
    "xdist": "the tests run in one process",
}


def is_here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def arguments(num_processes: int, others: list[str]) -> list[str]:
    """Returns the arguments of pytest for the installed plugins."""
    found = ["-p", "gpu_check.outcomes"]
    if is_here("hypothesis"):
        found += ["-p", "_hypothesis_pytestplugin"]
    if num_processes > 1 and is_here("xdist"):  # xdist replaces a process that loses its CUDA context
        found += ["-p", "xdist.plugin", "--numprocesses", str(num_processes), "--dist", "worksteal"]
    return [*found, *others]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu_check.run_tests", description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args()
    for module, what in WITHOUT.items():
        if not is_here(module):
            print(f"missing here: {module}; {what}", flush=True)
    if not is_here("pytest"):
        print("missing here: pytest; no test can run", flush=True)
        sys.exit(127)
    command = [sys.executable, "-m", "pytest", *arguments(args.processes, args.pytest)]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
