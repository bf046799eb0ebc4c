"""Runs a script again and again for `drivetrain try`: on every rank, in fresh processes, in turn by variant."""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .record import RunRecord, Variant

_MEETING_S = 600.0  # the longest wait for another rank between two runs
_LAST_LINES = 15
_RECORD, _SAID = "record", "said"  # files of a run
_FIXED = {"PYTHONHASHSEED": "0"}  # variables that make runs repeat


class TrialError(RuntimeError):
    """A run has given no record: its process was killed, or took longer than the limit."""


@dataclass(frozen=True)
class Trial:
    """Describes what is tried."""

    script: str  # its path
    arguments: Sequence[str]
    steps: int  # optimizer steps of each run
    limit_s: float  # after which a run is ended


def run(
    module: str,
    trial: Trial,
    ranks: Sequence[tuple[dict[str, str], dict[str, Any]]],
    how: str = "",
) -> list[Any]:
    """Runs `python -m module` for the script in a process per rank, and returns the records that they write.

    All end once one has failed, or at the limit.

    Args:
        module: The program.
        trial: The script and its limits.
        ranks: Each rank's further variables, and its input as JSON in addition to what every run gets.
        how: Completes "train.py" in errors.

    Raises:
        TrialError: A rank has given no record. The message has its last lines.
    """
    with (
        tempfile.TemporaryDirectory(prefix="drivetrain-try-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as stack,
    ):
        processes: list[tuple[Path, subprocess.Popen[bytes]]] = []
        for number, (environment, task) in enumerate(ranks):
            folder = Path(name) / str(number)
            (folder / "written").mkdir(parents=True)
            with (folder / _SAID).open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **_FIXED, **environment},
                )
            processes.append((folder, process))
            stack.callback(process.wait)
            stack.callback(process.kill)
            given = {"script": trial.script, "arguments": list(trial.arguments), "steps": trial.steps, **task}
            given |= {"record": str(folder / _RECORD), "folder": str(folder / "written")}
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may have died
                pipe.write(json.dumps(given).encode())
        end = time.monotonic() + trial.limit_s
        failed: int | None = None
        while failed is None and time.monotonic() <= end:
            codes = [process.poll() for _, process in processes]
            if None not in codes:
                break
            failed = next((code for code in codes if code), None)
            time.sleep(0.05)
        for folder, process in sorted(processes, key=lambda one: one[1].poll() in (None, 0)):  # first those that failed
            if not (folder / _RECORD).exists():
                ended = f"ended with status {process.returncode}"
                if process.returncode is None and failed is not None:
                    ended = f"was ended because another rank ended with status {failed}"
                elif process.returncode is None:
                    ended = f"did not make {given['steps']} optimizer steps in {trial.limit_s:.0f} s (--limit)"
                last = "\n".join((folder / _SAID).read_text(errors="replace").splitlines()[-_LAST_LINES:])
                raise TrialError(f"{trial.script}{how} {ended}. Its last lines:\n{last}")
        return [pickle.loads((folder / _RECORD).read_bytes()) for folder, _ in processes]


def free_port() -> int:
    """Returns a port of this host that no other program has."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


class Runs:
    """Starts one process after the other for this rank. All ranks must make the same calls.

    Attributes:
        num_runs: Processes started so far.
    """

    def __init__(self, trial: Trial) -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._trial = trial
        self.num_runs = self._num_shared = 0
        self._address: tuple[str, int] | None = None
        if self.world_size > 1:
            self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            has_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._store = TCPStore(
                *self._address,
                is_master=self.rank == 0 and not has_server,
                timeout=timedelta(seconds=_MEETING_S),
            )

    def run(self, variant: Variant, *, prints: bool = False, noise: float = 0.0) -> RunRecord:
        """Runs the script's first steps once.

        Args:
            variant: The classes that the script gets.
            prints: Records gradients and parameters, and not where the time goes.
            noise: Changes the parameters by this multiple of their rounding before the first step.

        Raises:
            TrialError: There is no record.
        """
        task = {"variant": asdict(variant), "prints": prints, "calls": False, "noise": noise}
        record: RunRecord = self.start("drivetrain.trial.script", task, f" under {variant.name}")
        return record

    def start(self, module: str, task: dict[str, Any], how: str = "") -> Any:
        """Runs `python -m module` with a task for the script, and returns the record that it writes.

        Args:
            module: The program.
            task: Its input as JSON, in addition to what every run gets.
            how: Completes "train.py" in errors.

        Raises:
            TrialError: There is no record.
        """
        self.num_runs += 1
        key, environment = f"drivetrain-try/{self.num_runs}", {}
        if self._address is not None:
            if self.rank == 0:  # where the script's own process group of this run meets
                self._store.set(key, str(free_port()))
            environment = {"MASTER_PORT": self._store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        (record,) = run(module, self._trial, [(environment, {"store": self._address, "key": key, **task})], how)
        return record

    def share(self, said: str) -> list[str]:
        """Returns what each rank says, by rank. All ranks must call it."""
        if self._address is None:
            return [said]
        self._num_shared += 1
        key = f"drivetrain-try/said/{self._num_shared}"
        self._store.set(f"{key}/{self.rank}", said)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]
