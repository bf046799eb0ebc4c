"""Lets ranks agree on what to do at a step, with one small all-reduce per step that no rank waits for."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_logger = logging.getLogger("drivetrain")
_NAMED_AFTER_S = 20.0  # a wait for another rank, so that a script that hangs shows why within half a minute


class Flags(NamedTuple):
    """The values that ranks exchange; the largest of each wins."""

    leave: int = 0  # this rank has been asked to end
    due: int = 0  # a save is due by the clock of rank 0
    busy: int = 0  # the last save is in progress
    failed: int = 0  # the last save has failed
    running: int = 0  # this rank is in its loop
    ended: int = 0  # this rank has left its loop
    number: int = 0  # any number


class Ranks:
    """Exchanges flags over a gloo group of its own, so that it never reorders the collectives of the training.

    Every rank calls the same methods in the same order. The all-reduce of one step runs while the next step computes;
    its result is read at the end of that step. A rank waits only for ranks that are a whole step behind. `connect` is
    called before the first exchange.
    """

    def __init__(self, timeout: float) -> None:
        is_grouped = dist.is_available() and dist.is_initialized()
        if not is_grouped and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and no process group is initialized: call "
                "torch.distributed.init_process_group() before Checkpointer()"
            )
        self.rank = dist.get_rank() if is_grouped else 0
        self.world_size = dist.get_world_size() if is_grouped else 1
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = None
        self._running: tuple[Any, torch.Tensor] | None = None

    def connect(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Makes the group, together with all other ranks.

        A caller first checks its arguments: a rank that gives up while others connect fails them with an error of gloo.
        """
        if self.world_size == 1:
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        except BaseException:
            on_failure()
            raise

    def start(self, flags: Flags) -> None:
        """Begins an exchange. The next call must be `result`."""
        values = torch.tensor(flags, dtype=torch.int64, device="cpu")
        work = None
        if self._group is not None:
            work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._running = work, values

    def result(self) -> Flags:
        """Returns the largest flags of all ranks from the current exchange; waits for ranks that are a step behind."""
        assert self._running is not None, "no exchange is in progress"
        (work, values), self._running = self._running, None
        if work is not None:
            try:
                if not work.is_completed():
                    with named_wait(self._late, _logger.warning, self._timeout.total_seconds()):
                        work.wait(self._timeout)
                work.wait(self._timeout)
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {self.rank} waited at Checkpointer.step() for the other ranks, and one has ended or did not "
                    f"come within {self._timeout}. Every rank must call step() equally often. {error}"
                ) from error
        return Flags(*values.tolist())

    def _late(self) -> str:
        return (
            f"rank {self.rank} waits in Checkpointer.step() for another rank, which is late or does not call it. Every "
            "rank must call it: remove a condition such as `if rank == 0` before it."
        )

    # Each of the next waits for all ranks.

    def exchange(self, flags: Flags) -> Flags:
        """Returns the largest flags of all ranks."""
        self.start(flags)
        return self.result()

    def all_true(self, value: bool) -> bool:
        """Returns whether `value` is true on all ranks."""
        return not self.any_true(not value)

    def any_true(self, value: bool) -> bool:
        """Returns whether `value` is true on any rank."""
        return bool(self.exchange(Flags(number=int(value))).number)

    def agree(self, value: int) -> tuple[int, int]:
        """Returns the smallest and the largest `value` of all ranks."""
        largest = self.exchange(Flags(number=value)).number
        return -self.exchange(Flags(number=-value)).number, largest

    def drop(self) -> None:
        """Forgets the current exchange, which another rank may not join any more."""
        self._running = None

    def close(self) -> None:
        """Ends the group, as far as no exchange is in progress."""
        self._running = None
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


@contextmanager
def named_wait(describe: Callable[[], str | None], log: Callable[[str], None], limit: float) -> Iterator[None]:
    """Logs what the block waits for, if it takes long and `describe` returns a text then. It waits `limit` seconds."""

    def name() -> None:
        if (text := describe()) is not None:
            log(text)

    timer = threading.Timer(min(_NAMED_AFTER_S, limit / 2), name)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
