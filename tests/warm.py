"""Starts processes in milliseconds by forking a process that has already imported torch."""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

# torch's optimizers import torch._dynamo on first use, which takes more than a second.
IMPORTED = ["torch", "torch._dynamo", "torch.distributed", "drivetrain", "pytest"]


def warm_context() -> ForkServerContext:
    """Returns the context whose processes fork from the preloaded one.

    The preloaded process starts with the first of them and ends with this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class WarmScript:
    """Runs a script in a new process, like subprocess.Popen with stderr=PIPE and text=True."""

    def __init__(self, script: Path, environment: dict[str, str]) -> None:
        context = warm_context()
        here, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_script, args=(str(script), environment, there), daemon=True)
        self._process.start()
        there.close()
        self.stderr = os.fdopen(os.dup(here.fileno()), errors="replace")
        here.close()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Returns (None, the rest of stderr). Raises TimeoutError if the script does not end in time."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the script did not end within {timeout} s")
        with self.stderr:
            return None, self.stderr.read()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _run_script(script: str, environment: dict[str, str], stderr: Connection) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    os.environ.update(environment)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
