"""Provides real ranks for tests: processes that live for the session and form a new gloo group for every call."""

import functools
import gc
import inspect
import random
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warm_python import warm_context

GROUP_TIMEOUT_S = 20
CALL_TIMEOUT_S = 120


class RankPool:
    """Runs functions on `world_size` processes, which import torch once per session instead of once per test."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self._world_size = world_size
        self._folder = folder
        self._calls = 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(*args)` on every rank; raises AssertionError with all tracebacks if any raised."""
        if not self._workers:
            self._start()
        self._calls += 1
        store = self._folder / f"store-{self._calls}"
        for _, connection in self._workers:
            connection.send((store, function, args))
        results, failures = [], []
        for rank, (_, connection) in enumerate(self._workers):
            if not connection.poll(CALL_TIMEOUT_S):
                self.close()
                raise AssertionError(f"rank {rank} did not answer within {CALL_TIMEOUT_S} s")
            succeeded, result = connection.recv()
            (results if succeeded else failures).append(result if succeeded else f"rank {rank}:\n{result}")
        if failures:
            self.close()  # a failed call may leave state behind, such as torch's count of groups
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = warm_context()
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self._world_size), daemon=True)
            process.start()
            self._workers.append((process, ours))


def run_on(*sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function: each rank of a pool of so many calls it, with the test's arguments.

    With several sizes, the pools run it one after the other.
    """
    pools = [{2: "on_ranks", 3: "on_three_ranks", 4: "on_four_ranks"}[size] for size in sizes]

    def make(function: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def test(**fixtures: Any) -> None:
            for pool in pools:
                fixtures[pool](function, *(fixtures[name] for name in names))

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*pools, *names)]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which pytest reads
        function.__qualname__ += ".__wrapped__"  # by which pickle finds it
        return test

    return make


def _serve(connection: Connection, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # tests collect garbage, which takes a fifth of a second with all that torch imports
    while True:
        try:
            store, function, args = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
            )
            dist.barrier()  # a rank that leaves while another still connects fails it
            answer = (True, function(*args))
        except BaseException:  # the parent gets everything, with pytest's own failures
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)


def dawdle_in_hooks(weights: Iterable[Tensor]) -> None:
    """Makes this rank late with some of its gradients, and another rank with others."""
    rng = random.Random(dist.get_rank())

    def hook(grad: Tensor) -> Tensor:
        if rng.random() < 0.1:
            time.sleep(rng.random() * 3e-3)
        return grad

    for weight in weights:
        weight.register_hook(hook)
