"""Continues a training in the same processes on the ranks that are left after another rank has died."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import secrets
import shutil
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ..processes import Process, has_ended, this_process
from .store import directory as disk

_logger = logging.getLogger("drivetrain")
_Result = TypeVar("_Result")
_POLL_S = 0.02
_ENDING_S = 2.0  # a process that ends closes its connections first, and is gone later
_depth = 0  # calls of continue_in_place that are in progress


def are_expected() -> bool:
    """Returns whether a failed training is about to continue in this process."""
    return _depth > 0


def continue_in_place(
    train: Callable[[], _Result],
    directory: str | os.PathLike[str],
    *,
    min_ranks: int = 1,
    settle: float = 3.0,
    timeout: float = 60.0,
) -> _Result:
    """Calls `train()`, and calls it again in a smaller process group each time that ranks have died.

    Call it on every rank, after init_process_group("gloo"). `train` builds everything from the default group: models,
    DistributedDataParallel, optimizers, loaders and a `Checkpointer`, which finds the newest checkpoint. No process
    starts again, so that imports, compiled code and caches stay. A rank whose `train` raises while all ranks are alive
    raises that error. Once its process has ended, the others continue without it.

    Ranks agree by files in `directory`. A rank of the same host has died when its process is gone. A rank of another
    host counts as dead when it does not come within `settle`. Ranks on several hosts need transport="torch" in
    DistributedDataParallel, because shared memory does not tell that a rank has left. The launcher must not end the
    others: torchrun does.

    Args:
        train: The training, whose result is returned.
        directory: A directory that all ranks see, such as the checkpoints' directory.
        min_ranks: The fewest ranks to continue on. With fewer, the error of `train` is raised.
        settle: Seconds without another rank's message after which the ranks of other hosts count as lost.
        timeout: Limit in seconds on each wait for another rank.

    Raises:
        ValueError: No process group is initialized, its backend is not gloo, or an argument is out of its range.
        RuntimeError: The others have continued without this rank, which came too late.
        TimeoutError: A rank that is alive did not come in time.
    """
    global _depth
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        found = f"backend {dist.get_backend()!r}" if dist.is_initialized() else "no process group"
        raise ValueError(f'continue_in_place finds {found}: call torch.distributed.init_process_group("gloo") first')
    if min_ranks < 1 or not settle > 0 or not timeout > 0:
        raise ValueError(
            f"min_ranks is {min_ranks}, settle {settle} and timeout {timeout}: expected 1 or more, and seconds above 0"
        )
    meeting = _Meeting(Path(directory).absolute(), settle, timeout)
    _depth += 1
    try:
        while True:
            rank, world_size = dist.get_rank(), dist.get_world_size()
            try:
                result = train()
            except Exception as error:
                began = time.monotonic()
                dist.distributed_c10d._abort_process_group()  # so that no other rank waits for this one
                if not meeting.may_have_lost():
                    raise
                ranks = meeting.survivors(rank, world_size)
                if len(ranks) == world_size or len(ranks) < min_ranks:
                    raise
                lost = ", ".join(meeting.describe(one) for one in range(world_size) if one not in ranks)
                _logger.warning(
                    "%s lost. %d of %d ranks continue from the newest checkpoint and repeat the steps since then. "
                    "This rank is %d now and was %d; it saw: %s",
                    *(lost, len(ranks), world_size, ranks.index(rank), rank, error),
                )
                traceback.clear_frames(error.__traceback__)  # they keep models, loaders and their workers
            else:
                meeting.end()
                return result
            gc.collect()
            meeting.form(ranks, rank)
            _logger.info("the group of %d ranks was formed within %.1f s", len(ranks), time.monotonic() - began)
    finally:
        _depth -= 1


class _Meeting:
    """Lets ranks find out by files who is left. The first complete list of members that is written holds for all."""

    def __init__(self, directory: Path, settle: float, timeout: float) -> None:
        token: list[Any] = [secrets.token_hex(8)]
        dist.broadcast_object_list(token, src=0)
        self._settle, self._timeout = settle, timeout
        self._folder = directory / f".survivors-{token[0]}"
        self._processes: list[Process] = [this_process()] * dist.get_world_size()
        dist.all_gather_object(self._processes, this_process())
        disk.make_folders(self._folder)
        self._count = 0

    def describe(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank]['pid']})"

    def may_have_lost(self) -> bool:
        """Returns whether a rank of this host has ended, or a rank of another host may have."""
        deadline = time.monotonic() + _ENDING_S
        while not any(self._is_lost(one, True) for one in range(len(self._processes))):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def survivors(self, rank: int, world_size: int) -> list[int]:
        """Tells the others that this rank is left, and returns the ranks that are."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(exist_ok=True)
        (folder / f"rank-{rank}").touch()
        members, deadline = folder / "members", time.monotonic() + self._timeout
        seen, changed = {rank}, time.monotonic()
        while not members.exists():
            now = time.monotonic()
            here = {int(path.name.removeprefix("rank-")) for path in folder.glob("rank-*")}
            if here != seen:
                seen, changed = here, now
            absent = [one for one in range(world_size) if one not in here]
            is_silent = now - changed >= self._settle
            if all(self._is_lost(one, is_silent) for one in absent):
                proposal = folder / f"proposal-{rank}"
                proposal.write_text(json.dumps(sorted(here)))
                with contextlib.suppress(FileExistsError):  # another rank was first
                    os.link(proposal, members)
            elif now >= deadline:
                raise TimeoutError(
                    f"rank {rank} waited {self._timeout:g} s for {', '.join(map(self.describe, absent))} after the "
                    "training failed: it is alive and does not come. Raise `timeout` above the time of a step."
                )
            time.sleep(_POLL_S)
        ranks: list[int] = json.loads(members.read_text())
        if rank not in ranks:
            raise RuntimeError(f"the others continue without rank {rank}, which came too late: raise `settle`")
        return ranks

    def form(self, ranks: list[int], rank: int) -> None:
        """Makes the default group of the ranks that are left, which get new numbers in their order."""
        for name, value in (("RANK", ranks.index(rank)), ("WORLD_SIZE", len(ranks))):
            if name in os.environ:
                os.environ[name] = str(value)
        self._processes = [self._processes[one] for one in ranks]
        store = FileStore(str(self._folder / f"store-{self._count}"), len(ranks))
        store.set_timeout(timedelta(seconds=self._timeout))
        dist.init_process_group("gloo", store=store, rank=ranks.index(rank), world_size=len(ranks))

    def end(self) -> None:
        """Removes the files once all ranks are done with them."""
        try:
            dist.barrier()
        except RuntimeError as error:
            _logger.warning("%s is left, because a rank has ended early: %s", self._folder, error)
            return
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _is_lost(self, rank: int, is_silent: bool) -> bool:
        process, host = self._processes[rank], this_process()["host"]
        return has_ended(process) if host and process["host"] == host else is_silent
