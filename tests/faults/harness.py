"""Runs rounds: starts the ranks, checks their errors and results, and checks that they leave nothing behind."""

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain import DistributedDataParallel
from warm_python import warm_python

from . import room
from .hosts import Hosts
from .plan import Round, clean, draw, draw_scale

START_S = 60.0  # for the first process to import torch, and for a run without a fault
RANKS_STARTED_IN_TIME = 8  # as many more ranks as there are, so much longer they take
# Added to the process group's timeout, for ranks that share busy cores.
MARGIN_S = 10.0

OUR_ERROR = r"drivetrain: the (all-reduce|broadcast) of (bucket \d+ of \d+ \[.+\]|[a-z' ]+) failed"
# The functions of torch that call torch's own collectives, and gloo's messages about a dead or silent rank.
TORCH_CALLS = ("_sync_buffers", "_sync_module_states", "_verify_param_shape_across_processes", "init_process_group")
TORCH_ERROR = r"Connection (reset|closed) by (remote )?peer|Timed out waiting|Broken pipe|Application timeout"


def transports() -> list[str]:
    """Returns the transports of the installed class that ranks of one host over gloo can use."""
    known = "transport" in inspect.signature(DistributedDataParallel.__init__).parameters
    return ["torch", "shm"] if known else ["torch"]


@dataclass
class Outcome:
    """The outcome of a round."""

    round: Round
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0  # from the fault to the slowest survivor's error, or the whole training where none is due
    errors: list[str] = field(default_factory=list)  # the survivors'

    def report(self) -> str:
        """Returns the problems, and the command that repeats the round."""
        if self.round.ranks_per_host:
            repeat = f"make faults ARGS='--fault scale --seed {self.round.seed}'"
            return "\n".join([f"{self.round}", *(f"* {problem}" for problem in self.problems), f"Again: {repeat}"])
        repeat = (
            f"make faults ARGS='--fault {self.round.fault} --seed {self.round.seed} --rounds 1 "
            f"--transport {self.round.transport} --ranks {self.round.ranks}'"
        )
        return "\n".join([f"{self.round}", *(f"* {problem}" for problem in self.problems), f"Again: {repeat}"])


@dataclass
class Exit:
    code: int
    ended: float  # by the monotonic clock, which all processes of a machine share


class Harness:
    """Runs rounds, and knows what a clean run trains to."""

    def __init__(self) -> None:
        self._programs: dict[int, subprocess.Popen[bytes]] = {}  # by process, which is a fork of warm_python
        self._exits: dict[int, Exit] = {}
        self._values: dict[int, str] = {}  # by number of ranks
        tests = str(Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
        self._environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def why_not(self, fault: str) -> str:
        """Returns why that fault cannot be made on this machine; "" where it can."""
        if fault != "full-shm":
            return ""
        with _folder() as folder:
            try:
                self._kill([self._open_room(folder, 4096)])
            except PermissionError as error:
                return str(error)
        return ""

    def run(self, fault: str, seed: int, transport: str, ranks: int = 2, then_clean: bool = True) -> Outcome:
        """Runs the round of that fault and seed, then a clean run. A clean run before the first is the reference."""
        before = Outcome(clean(transport, ranks))
        if ranks not in self._values:
            self._run(before)
        outcome = Outcome(draw(fault, seed, transport, ranks))
        self._run(outcome)
        after = Outcome(clean(transport, ranks))
        if then_clean:
            self._run(after)
        for when, run in (("before", before), ("after", after)):
            outcome.problems += [f"the run {when} it: {problem}" for problem in run.problems]
        return outcome

    def run_scale(self, seed: int) -> Outcome:
        """Runs the round of many ranks on many hosts."""
        outcome = Outcome(draw_scale(seed))
        plan = outcome.round
        try:
            with Hosts(plan.ranks // plan.ranks_per_host) as hosts:
                self._run(outcome, hosts.names)
        except PermissionError as error:
            print(f"{error}; the ranks only take themselves for those of several hosts", file=sys.stderr)
            self._run(outcome)
        return outcome

    def _run(self, outcome: Outcome, hosts: Sequence[str] = ()) -> None:
        """Runs one round. hosts: the names of the hosts of the ranks; empty: all are on this one."""
        plan, problems = outcome.round, outcome.problems
        shm_before = _files_in_shm()
        with _folder() as folder:
            holder = self._open_room(folder, plan.shm_bytes) if plan.fault == "full-shm" else None
            ranks: list[int] = []
            try:
                for rank in range(plan.ranks):
                    host = hosts[rank // plan.ranks_per_host] if hosts else None
                    ranks.append(self._fork(folder=str(folder), rank=rank, plan=asdict(plan), room=holder, host=host))
                if plan.fault in ("", "full-shm"):
                    self._check_training(outcome, folder, ranks)
                else:
                    self._check_survivors(outcome, folder, ranks)
                if plan.fault and not (folder / "fault").exists():
                    problems.append("the fault never came")
                if holder is not None and (left := room.left_behind(holder)):
                    problems.append(f"left in the full {room.SHM}: {', '.join(left)}")
            finally:
                self._kill([pid for pid in [*ranks, *([holder] if holder else [])] if pid not in self._exits])
            # A memfd lives as long as a process that has it, so that none is left without a process.
            if alive := _processes_of([*ranks, *([holder] if holder else [])]):
                problems.append(f"processes are left, and killed now: {', '.join(map(str, alive))}")
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
            if left := _ownerless(_files_in_shm() - shm_before):
                problems.append(f"files are left in {room.SHM}: {', '.join(left)}")
            if problems:
                problems += [f"rank {rank}'s output:\n{_output(folder, rank)}" for rank in range(plan.ranks)]

    def _check_training(self, outcome: Outcome, folder: Path, ranks: list[int]) -> None:
        """Checks that all ranks train to the values of every other clean run."""
        begin = time.monotonic()
        self._wait_for_exits(ranks, begin + START_S)
        values = []
        for rank, pid in enumerate(ranks):
            code = self._exits[pid].code if pid in self._exits else None
            if code != 0:
                outcome.problems.append(
                    f"rank {rank} {_ended(code)}, expected a training to the end within {START_S:g} s"
                )
                continue
            values.append((folder / f"done-{rank}").read_text().split()[1])
            outcome.seconds = max(outcome.seconds, self._exits[pid].ended - begin)
            # A full /dev/shm permits a warning that memory cannot be shared.
            if (said := _output(folder, rank)) and outcome.round.fault != "full-shm":
                outcome.problems.append(f"rank {rank} should have nothing to say, but did: {said}")
        expected = self._values.setdefault(len(ranks), values[0]) if values else ""
        if any(value != expected for value in values):
            outcome.problems.append(f"the ranks trained to {values}, expected {expected} everywhere")

    def _check_survivors(self, outcome: Outcome, folder: Path, ranks: list[int]) -> None:
        plan, problems = outcome.round, outcome.problems
        survivors = [rank for rank in range(plan.ranks) if rank != plan.faulty or plan.fault == "extra-parameter"]
        # Every survivor must learn of a death from the connections that close, not from its own timeout.
        limit = plan.timeout_s + (-MARGIN_S if plan.ranks_per_host else MARGIN_S)
        deadline = time.monotonic() + START_S * max(1, plan.ranks // RANKS_STARTED_IN_TIME)
        while time.monotonic() < deadline:
            if (folder / "fault").exists():  # may be noted again, later
                deadline = _noted(folder, "fault")[0] + limit
            if self._wait_for_exits([ranks[rank] for rank in survivors], min(deadline, time.monotonic() + 0.1)):
                break
        fault_at = _noted(folder, "fault")[0] if (folder / "fault").exists() else deadline
        for rank in survivors:
            exit_ = self._exits.get(ranks[rank])
            if exit_ is None or exit_.code != 1:
                problems.append(
                    f"rank {rank} {_ended(exit_ and exit_.code)}, expected exit code 1 after an error within "
                    f"{limit:g} s; the process group's timeout is {plan.timeout_s:g} s"
                )
                continue
            if not (folder / f"error-{rank}").exists():
                problems.append(f"rank {rank} ended by an error outside of its training")
                continue
            at, error = _noted(folder, f"error-{rank}")
            outcome.seconds = max(outcome.seconds, at - fault_at)
            outcome.errors.append(error)
            if problem := _what_is_wrong_with(error, _output(folder, rank), plan):
                problems.append(f"rank {rank}: {problem}")
        if plan.fault != "extra-parameter":
            self._check_faulty(outcome, folder, ranks[plan.faulty])

    def _check_faulty(self, outcome: Outcome, folder: Path, pid: int) -> None:
        """Checks that the intended fault has happened."""
        plan, problems = outcome.round, outcome.problems
        if plan.fault.startswith("kill-"):
            expected, is_met = "killed", self._wait_for_exits([pid], time.monotonic() + MARGIN_S)
            is_met = is_met and self._exits[pid].code == -signal.SIGKILL
        elif plan.fault == "stop":
            expected, is_met = "stopped", pid not in self._exits and _state(pid) == "T"
        else:
            self._wait_for_exits([pid], time.monotonic() + (MARGIN_S if plan.leaves else 0))
            code = self._exits[pid].code if pid in self._exits else None
            # The faulty rank may also be the one that notices that the ranks' collectives do not match.
            if code == 1 and (folder / f"error-{plan.faulty}").exists():
                error = _noted(folder, f"error-{plan.faulty}")[1]
                if problem := _what_is_wrong_with(error, _output(folder, plan.faulty), plan):
                    problems.append(f"rank {plan.faulty}, which skipped: {problem}")
                return
            expected, is_met = ("at its end", code == 0) if plan.leaves else ("lingering", code is None)
        if not is_met:
            code = self._exits[pid].code if pid in self._exits else None
            problems.append(f"rank {plan.faulty}, the faulty one, {_ended(code)}, expected to find it {expected}")

    # ---- Processes.

    def _open_room(self, folder: Path, size: int) -> int:
        """Starts the process that holds a /dev/shm of that size. Raises PermissionError where that is not allowed."""
        pid = self._fork(folder=str(folder), room_bytes=size)
        deadline = time.monotonic() + START_S
        while not (folder / "room").exists():
            if self._wait_for_exits([pid], min(deadline, time.monotonic() + 0.01)):
                why = (folder / "no-room").read_text() if (folder / "no-room").exists() else _output(folder, "room")
                raise PermissionError(f"no private {room.SHM} can be mounted here, which takes root: {why}")
            if time.monotonic() >= deadline:
                self._kill([pid])
                raise TimeoutError(f"no private {room.SHM} within {START_S:g} s")
        return pid

    def _fork(self, **request: Any) -> int:
        """Starts a process, which leads a session, and returns its number once it runs."""
        folder, rank = Path(request["folder"]), request.get("rank", "room")
        command = [warm_python("torch.profiler", has_whole_end=True), "-m", "faults.rank", json.dumps(request)]
        with _output_file(folder, rank).open("wb") as file:
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            program = subprocess.Popen(command, env=self._environ, start_new_session=True, **files)
        deadline = time.monotonic() + START_S
        while not (folder / f"pid-{rank}").exists():
            if program.poll() is not None or time.monotonic() >= deadline:
                program.kill()
                raise RuntimeError(f"a process did not begin within {START_S:g} s: {_output(folder, rank)}")
            time.sleep(0.002)
        pid = int(_noted(folder, f"pid-{rank}")[1])
        self._programs[pid] = program
        self._exits.pop(pid, None)  # of an earlier process of that number
        return pid

    def _wait_for_exits(self, pids: Iterable[int], deadline: float) -> bool:
        """Returns True once all of them have ended, and False at the deadline."""
        while True:
            left = [pid for pid in pids if pid not in self._exits]
            for pid in left:
                if (code := self._programs[pid].poll()) is not None:
                    self._exits[pid] = Exit(code, time.monotonic())
            if all(pid in self._exits for pid in left):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            if self._programs[pid].poll() is None:  # which it does not outlive
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not self._wait_for_exits(pids, time.monotonic() + START_S):
            raise TimeoutError(f"killed processes did not end within {START_S:g} s: {pids}")


def _what_is_wrong_with(error: str, output: str, plan: Round) -> str:
    """Returns what the error lacks; "" if it names what the rank waited for, or what differs in the model."""
    if plan.fault == "extra-parameter":
        name = f"parameter 'layers.{plan.layer}.extra' differs"
        return "" if name in error and f"rank {plan.faulty}: (3,)" in error else f"expected {name!r}, got {error!r}"
    if plan.ranks_per_host:
        is_named = re.search(rf"[Rr]ank {plan.faulty} has (died|ended)", error)
        return "" if is_named else f"its error does not name rank {plan.faulty}: {error!r}"
    if re.search(OUR_ERROR, error):
        return ""
    if re.search(TORCH_ERROR, error) and any(f", in {call}" in output for call in TORCH_CALLS):
        return ""
    return f"its error does not name what it waited for: {error!r}"


def _noted(folder: Path, name: str) -> tuple[float, str]:
    at, _, text = (folder / name).read_text().partition(" ")
    return float(at), text


def _output_file(folder: Path, rank: int | str) -> Path:
    return folder / (f"rank-{rank}.txt" if isinstance(rank, int) else f"{rank}.txt")


def _output(folder: Path, rank: int | str) -> str:
    path = _output_file(folder, rank)
    return path.read_text(errors="replace")[-6000:] if path.exists() else ""


def _ended(code: int | None) -> str:
    if code is None:
        return "is still there"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _stat(pid: int) -> list[str]:
    """Returns the fields after the name, which may contain anything; none where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _state(pid: int) -> str:
    return (_stat(pid) or [""])[0]


def _processes_of(leaders: list[int]) -> list[int]:
    """Returns the living processes of the sessions that these led. Every rank leads one."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[3]) in leaders and fields[0] != "Z"]


def _files_in_shm() -> set[str]:
    return {path.name for path in room.SHM.iterdir()}


def _ownerless(names: set[str]) -> list[str]:
    """Returns the files in /dev/shm that no living process has open or mapped, as others on this machine use it, too.

    By their numbers: a semaphore of Python's multiprocessing is mapped under a name that it has no more.
    """
    if not names:
        return []
    used: set[int] = set()
    in_shm = f"{room.SHM}{os.sep}"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for line in (process / "maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(in_shm):
                    used.add(int(fields[4]))
            for entry in (process / "fd").iterdir():
                if os.readlink(entry).startswith(in_shm):  # noqa: PTH115
                    used.add(entry.stat().st_ino)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # has gone, or is another user's
    return sorted(name for name in names if (number := _number(room.SHM / name)) is not None and number not in used)


def _number(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


class _folder:
    """Yields a folder for the files of a round's processes, and deletes it."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="drivetrain-faults-"))
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path)
