"""Runs torch's DDP tests one after another on long-lived rank processes, each test on a fresh gloo group."""

import contextlib
import faulthandler
import functools
import inspect
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from warm_python import warm_context

WORLD_SIZE = 2
RPC_RANKS = 4  # tests with remote parts: two trainers, a worker that holds the remote parts, and a master
START_TIMEOUT_S = 120
TEST_TIMEOUT_S = 180  # the longest test takes 20 s on two idle cores; busy cores slow down torch.compile
_STUCK = "Stuck while the other rank failed"
GRACE_S = 3  # seconds for a rank to finish after the other one has failed
GROUP_TIMEOUT_S = 60  # torch uses this value for these tests


@dataclass(frozen=True)
class Outcome:
    """Result of one test: "passed", "failed" or "skipped", with the reason or all ranks' tracebacks."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    built: dict[str, int] = field(default_factory=dict)  # DistributedDataParallel modules of rank 0, by package

    @property
    def why(self) -> str:
        """The last error line of the first rank's traceback."""
        lines = [line for line in self.detail.partition("\nrank ")[0].splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b|Timed out|Died", line)]
        return (errors or lines or [""])[-1].strip()


_Rank = tuple[Any, Connection]  # a process and the pipe to it
_Answer = tuple[str, str, dict[str, int]]  # status, traceback or reason, number of modules by package


class Pool:
    """Runs tests with the class of `kind`, "torch" or "drivetrain", as DistributedDataParallel."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._ranks: list[_Rank] = []
        self._folder = Path(tempfile.mkdtemp(prefix="torch-ddp-"))
        self._count = 0
        self._last = ""

    def names(self) -> list[str]:
        """Returns the names of the DDP tests of the installed torch."""
        self._start(WORLD_SIZE)
        self._ranks[0][1].send(("names",))
        return self._ranks[0][1].recv()

    def run(self, name: str) -> Outcome:
        dead = next((process.exitcode for process, _ in self._ranks if not process.is_alive()), None)
        if dead is not None:
            log = "\n".join(self._log(rank) for rank in range(len(self._ranks)))
            self._stop()
            return Outcome(name, "failed", f"Died with exit code {dead} before this test, after {self._last}\n{log}")
        is_rpc_test = "." in name
        if is_rpc_test:  # RPC does not reliably start a second time in a process
            self._stop()
        ranks = self._start(RPC_RANKS if name.startswith("DdpUnderDistAutogradTest.") else WORLD_SIZE)
        self._count += 1
        self._last = name
        folder = self._folder / str(self._count)
        for part in ("barrier", "test_dir", "init_dir"):
            (folder / part).mkdir(parents=True)
        started = time.monotonic()
        for _, connection in ranks:
            connection.send(("run", name, str(folder)))
        answers, intact = self._collect(ranks, started + TEST_TIMEOUT_S)
        if is_rpc_test or not intact:
            self._stop()
        seconds = time.monotonic() - started
        failures = [(text, rank) for rank, (status, text, _) in sorted(answers.items()) if status == "failed"]
        if failures:
            failures.sort(key=lambda failure: failure[0].startswith(_STUCK))  # puts the cause first
            return Outcome(name, "failed", "\n".join(f"rank {rank}:\n{text}" for text, rank in failures), seconds)
        skips = [text for status, text, _ in answers.values() if status == "skipped"]
        if skips:
            return Outcome(name, "skipped", skips[0], seconds)
        return Outcome(name, "passed", "", seconds, answers[0][2])

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, ranks: list[_Rank], deadline: float) -> tuple[dict[int, _Answer], bool]:
        """Returns the ranks' answers, and True if the ranks can go on. A rank that does not answer counts as failed."""
        answers: dict[int, _Answer] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
        intact = True
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = any(status == "failed" for status, _, _ in answers.values())
                words = _STUCK if failed else f"Timed out after {TEST_TIMEOUT_S} s"
                for rank in waiting.values():
                    answers[rank] = ("failed", f"{words}\n{self._stacks(rank)}", {})
                return answers, False
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    process = self._ranks[rank][0]
                    process.join(5)
                    answers[rank] = ("failed", f"Died with exit code {process.exitcode}\n{self._log(rank)}", {})
                    intact = False
                if answers[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers, intact

    def _stacks(self, rank: int) -> str:
        """Returns the log of a stuck rank after its faulthandler has written every thread's stack into it."""
        process = self._ranks[rank][0]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._log(rank)

    def _log(self, rank: int) -> str:
        return (self._folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]

    def _start(self, count: int) -> list[_Rank]:
        """Returns the first `count` ranks and starts those that are missing."""
        context = warm_context()
        running = len(self._ranks)
        for rank in range(running, count):
            here, there = context.Pipe()
            log = str(self._folder / f"rank{rank}.log")
            process = context.Process(target=_serve, args=(there, rank, self._kind, log), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))
        for rank, (_, connection) in list(enumerate(self._ranks))[running:]:
            if connection.poll(START_TIMEOUT_S):
                with contextlib.suppress(EOFError):  # the rank ended before it sent "ready"
                    connection.recv()
                    continue
            log = self._log(rank)
            self._stop()
            raise RuntimeError(f"rank {rank} did not import torch's tests within {START_TIMEOUT_S} s:\n{log}")
        return self._ranks[:count]

    def _stop(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []


def _serve(connection: Connection, rank: int, kind: str, log: str) -> None:
    """Runs a rank's main loop."""
    stream = Path(log).open("w", buffering=1)  # noqa: SIM115  # lives as long as the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="-1",  # the comparison runs on the CPU on every machine
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        TEMP_DIR=str(Path(log).parent),
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",  # the printed command works only in torch's repository
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1",  # test_ddp_hook_pickling_powerSGD expects the old default
    )
    tests, ddp_class = _import_tests(kind)
    connection.send("ready")
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        if command == "names":
            connection.send(_ddp_tests(tests))
        else:
            connection.send(_run(tests, ddp_class, rank, *arguments))


def _import_tests(kind: str) -> tuple[ModuleType, Any]:
    """Imports torch's test module with the class of `kind` under every name that its tests use."""
    import torch
    from torch.testing._internal import common_distributed

    from .on_cpu import open_gpu_marks

    torch.set_num_threads(1)
    if kind == "drivetrain":
        import drivetrain

        drivetrain.install()
    ddp_class = torch.nn.parallel.DistributedDataParallel
    open_gpu_marks(common_distributed)
    from torch.testing._internal.distributed import distributed_test

    assert distributed_test.DistributedDataParallel is ddp_class
    assert ddp_class.__module__.partition(".")[0] == kind, f"{ddp_class} is not {kind}'s"
    return distributed_test, ddp_class


def _test_class(tests: ModuleType, suite: str) -> Any:
    """Derives a test case that two ranks on gloo can run from torch's class with the tests of `suite`."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as tensorpipe

    if suite:
        bases = tensorpipe.TensorPipeRpcAgentTestFixture, getattr(_rpc_tests(), suite)
        return type(suite, (common_utils.TestCase, *bases), {})
    bases = common_utils.TestCase, tests.DistributedTest._DistTestBase
    return type("GlooTest", bases, {"world_size": str(WORLD_SIZE)})  # torch's class also holds a string


def _rpc_tests() -> ModuleType:
    """Returns torch's module of DDP tests with remote parts, set to two trainers instead of four."""
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as module

    module.NUM_TRAINERS = WORLD_SIZE
    module.TRAINER_RANKS = list(range(WORLD_SIZE))
    module.REMOTE_WORKER_RANK, module.MASTER_RANK = range(WORLD_SIZE, RPC_RANKS)
    module.WORLD_SIZE = RPC_RANKS
    return module


def _ddp_tests(tests: ModuleType) -> list[str]:
    """Lists all DDP tests with remote parts, and other tests that mention DDP in their code or a helper method."""
    base = tests.DistributedTest._DistTestBase

    def mentions(name: str, seen: set[str]) -> bool:
        seen.add(name)
        function = inspect.unwrap(getattr(base, name))
        source = inspect.getsource(function)
        if re.search(r"DistributedDataParallel|DDP|ddp", source):
            return True
        helpers = set(re.findall(r"self\.(_\w+)\(", source)) - seen
        return any(mentions(helper, seen) for helper in helpers if hasattr(base, helper))

    names = [name for name in vars(base) if name.startswith("test") and mentions(name, set())]
    rpc_tests = _rpc_tests()
    for suite in ("DdpComparisonTest", "CudaDdpComparisonTest", "DdpUnderDistAutogradTest"):
        names += [f"{suite}.{name}" for name in vars(getattr(rpc_tests, suite)) if name.startswith("test")]
    return names


def _run(tests: ModuleType, ddp_class: Any, rank: int, name: str, folder: str) -> _Answer:
    """Runs one test on this rank, then removes its process group and restores the environment variables."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    from .on_cpu import on_cpu, opened

    environment = dict(os.environ)
    os.environ["TEMP_DIR"] = tempfile.tempdir = folder
    tests.Barrier.barrier_id = 0
    built: dict[str, int] = {}
    try:
        suite, _, method = name.rpartition(".")
        case = _test_class(tests, suite)(method)
        case.rank, case.file_name = rank, f"{folder}/group"
        test, is_for_gpus = opened(getattr(type(case), method))
        with_group = not suite  # tests of a suite create their own group
        if with_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{case.file_name}",
                world_size=WORLD_SIZE,
                rank=rank,
                timeout=timedelta(seconds=tests.CUSTOM_PG_TIMEOUT.get(name, GROUP_TIMEOUT_S)),
            )
            case._barrier()
        common_utils.set_rng_seed()
        with (
            _counting(ddp_class, built),
            _all_ranks_in_the_group(),
            on_cpu(tests, ddp_class, rank, WORLD_SIZE) if is_for_gpus else contextlib.nullcontext(),
        ):
            test(case)
        if with_group:
            case._barrier()
        return "passed", "", built
    except unittest.SkipTest as skip:
        return "skipped", str(skip), built
    except SystemExit as leave:
        reasons = {skip.exit_code: skip.message for skip in tests.TEST_SKIPS.values()}
        return "skipped", reasons.get(leave.code, f"exit code {leave.code}"), built
    except BaseException:  # the parent process reports every error
        return "failed", traceback.format_exc(), built
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        dist.set_debug_level_from_env()


@contextlib.contextmanager
def _all_ranks_in_the_group() -> Iterator[None]:
    """Makes init_process_group() return only after every rank has joined the group.

    In torch's tests with remote parts, the master requests a new group from a trainer after joining the default group.
    A trainer that has not joined yet would answer with an error.
    """
    import torch.distributed as dist

    join = dist.init_process_group

    @functools.wraps(join)
    def join_and_wait(*args: Any, **kwargs: Any) -> None:
        join(*args, **kwargs)
        dist.barrier()

    with mock.patch.object(dist, "init_process_group", join_and_wait):
        yield


@contextlib.contextmanager
def _counting(ddp_class: type, built: dict[str, int]) -> Iterator[None]:
    """Counts constructed modules of `ddp_class`, and of torch's class if that is another class."""

    def count(cls: type) -> Any:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            if cls is ddp_class or not isinstance(self, ddp_class):
                package = cls.__module__.partition(".")[0]
                built[package] = built.get(package, 0) + 1
            init(self, *args, **kwargs)

        return mock.patch.object(cls, "__init__", wrapper)

    with contextlib.ExitStack() as stack:
        for cls in ddp_class.__mro__:
            if cls.__name__ == "DistributedDataParallel":
                stack.enter_context(count(cls))
        yield
