"""`Checkpointer`: saves the whole training state while the training goes on, and resumes it exactly."""

import datetime
import functools
import logging
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from .. import phases
from ..ddp.accumulate import Window
from . import survivors
from .preemption.agreement import Flags, Ranks, named_wait
from .preemption.cloud import Source
from .preemption.interval import Interval, seconds_of
from .preemption.notices import Notices, Preempted, say_how_to_continue
from .restore import describe_run, differing_config, load_newest, of_another_run, warn_of_differences
from .saver import Saver
from .state.data_position import position_of
from .state.position import Position, Stateful
from .state.training_state import FORMAT, TrainingState
from .store.audit import AUDIT
from .store.encryption import Encryption
from .store.errors import CheckpointError
from .store.reading import Checkpoint
from .store.remote import Remote, TierStatus
from .store.store import Store
from .tiers import Tiers

_logger = logging.getLogger("drivetrain")
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
_members: dict["Checkpointer", bool] = {}  # inside of their blocks; True: has saved its last step and waits for others
_UNEQUAL = (
    "a rank has left the loop, and another one goes on: every rank must call Checkpointer.step() equally often, as "
    "with drivetrain.data.ResumableSampler or torch's DistributedSampler"
)


class Checkpointer:
    """Saves the training state while the training goes on, and continues it after a crash or a preemption.

    ::

        ckpt = Checkpointer("runs/gpt", model=model, optimizer=optimizer, data=loader, every="5min")
        with ckpt:                           # restores the newest complete checkpoint, if there is one
            for batch in loader:             # continues with the next batch of the epoch
                ...
                ckpt.step()                  # saves when due; leaves the loop on preemption

    On as many ranks as before, the training continues with the same bits of parameters and losses, as far as its
    operations are deterministic. On another number of ranks it continues with the same samples, and warns.

    On preemption all ranks save the step that they have just made, and `step()` raises an exception that no `except
    Exception` catches. With an exit code the process then ends with it; without one the program continues after the
    block. Signals take effect at the next `step()`, or at the end of `__enter__`. A second signal of a kind, 2 seconds
    or more after the first, takes its original effect.

    Args:
        directory: Folder of the checkpoints, which all ranks must see. Or a `Store`, which the block then leaves open.
        model: The module, in a DistributedDataParallel of torch or drivetrain or without one. Each rank saves its share
            of a wrapper's parameters, and all of its buffers and of modules without a wrapper.
        optimizer: The optimizer, or several.
        scheduler: The learning-rate scheduler, or several.
        scaler: The GradScaler.
        data: The DataLoader of the loop, or several. One over an IterableDataset must be torchdata's
            StatefulDataLoader. With drivetrain.data.ResumableSampler a position is restored at once; with another
            sampler the indices of consumed batches are drawn again. Do not iterate over it before the block.
        window: The window that `drivetrain.accumulate` returned. Enter it inside of the block. For a new window per
            epoch, set the attribute `window` to each.
        generators: Random generators that the training uses besides the default ones of Python, NumPy and torch:
            torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random.
        extra: Other objects with state_dict() and load_state_dict(), by name. Each rank saves its own.
        config: Settings of the run. A restart with others raises and names the differences, unless `run` is given.
        run: The identity of the run. It continues the run with other settings, or in a new directory of another name.
            Errors name the identity. None draws one for a new run.
        every: Time or steps between saves: "5min", "30s", "100 steps", 100, a timedelta, or "auto". None saves by
            `save()`, on preemption and at the end only. "auto" follows Daly's formula from the measured cost of a save
            and `mtbf`; see `interval.daly_interval`.
        keep: Number of checkpoints to keep; None keeps all.
        mtbf: Mean time between failures, for "auto", as a duration like "4h".
        on_error: "raise" raises a CheckpointError in the next `step()` of every rank after a save has failed. "log"
            writes it to the log and goes on.
        signals: Signals that announce a preemption, such as (SIGTERM, SIGUSR1) under SLURM.
        preemption_file: A path whose existence announces a preemption.
        cloud: "aws", "gcp" or "azure" asks the metadata service every 5 seconds; or an object with a method notice().
        grace: Time between the announcement and the end. A save that takes longer warns.
        exit_code: Exit code of the process after a preemption, 0 to 255; None continues after the block.
        timeout: Limit in seconds on every wait for a disk or another rank.
        encryption: Encrypts checkpoints with AES-256-GCM; see `Encryption`. None writes plain files.
        audit: Appends a line of JSON for each save, load and deletion to `audit.jsonl` in the directory, or to the
            given file. False writes none. A `Store` has settings of its own for both.
        tiers: `Remote(url)` uploads checkpoints. The block begins with the newest checkpoint of all tiers and of the
            directory.

    Raises:
        TypeError: An argument has another type than expected, or the position of `data` cannot be saved.
        ValueError: An argument is out of its range.
        NotImplementedError: A ZeroRedundancyOptimizer steps in the backward pass.
        RuntimeError: A launcher has started several ranks, and no process group is initialized.

    Attributes:
        restored: The checkpoint that the block began with, or None.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Store,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        window: Window | None = None,
        generators: Sequence[Any] = (),
        extra: Mapping[str, Stateful] | None = None,
        config: Mapping[str, Any] | None = None,
        run: str | None = None,
        every: str | int | datetime.timedelta | None = "5min",
        keep: int | None = 3,
        mtbf: str | float | datetime.timedelta = "4h",
        on_error: str = "raise",
        signals: Iterable[int] = (signal.SIGTERM,),
        preemption_file: str | os.PathLike[str] | None = None,
        cloud: str | Source | None = None,
        grace: str | float | datetime.timedelta = "30s",
        exit_code: int | None = EXIT_CODE,
        timeout: float = 1800.0,
        encryption: Encryption | None = None,
        audit: bool | str | os.PathLike[str] = True,
        tiers: Sequence[Remote] | None = (),
    ) -> None:
        if on_error not in ("raise", "log"):
            raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'log'")
        if exit_code is not None and not 0 <= exit_code <= 255:
            raise ValueError(f"exit_code is {exit_code}, expected 0 to 255, or None to continue after the block")
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout is {timeout}, expected a finite number of seconds above 0")
        self.restored: Checkpoint | None = None
        self._grace, self._exit_code, self._timeout, self._run = seconds_of(grace, "grace"), exit_code, timeout, run
        self._notices = Notices(signals, preemption_file, cloud)
        self._ranks = Ranks(timeout)
        self._tiers = Tiers(tiers or (), self._ranks)
        self._position = position_of(data)
        self._state = TrainingState(
            model=model,
            optimizers=_as_list(optimizer),
            schedulers=_as_list(scheduler),
            scaler=scaler,
            position=self._position,
            window=window,
            generators=generators,
            extra=extra or {},
            ranks=(self._ranks.rank, self._ranks.world_size),
        )
        self._description = describe_run(config, self._ranks.world_size)
        self._given_store = directory if isinstance(directory, Store) else None
        # Absolute from here on: a script may change its folder before the block begins.
        self._home = str(Path(directory.directory if isinstance(directory, Store) else directory).absolute())
        if self._home.encode(errors="ignore").decode() != self._home:
            raise ValueError(f"directory is {self._home!a}, expected a name in UTF-8")
        self._new_store = functools.partial(
            Store,
            self._home,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            keep=keep,
            timeout=timeout,
            encryption=encryption,
            audit=Path(self._home) / AUDIT if audit is True else audit or None,
        )
        self._every = Interval.of(every, mtbf)
        self._logs_errors = on_error == "log"
        self._saver: Saver | None = None  # inside of the block
        self._steps = 0
        self._elapsed = 0.0  # seconds inside of earlier blocks
        self._entered_at: float | None = None
        self._has_left = False
        self._notices.open()  # first: a connected rank may count on the others to survive a signal
        self._ranks.connect(on_failure=self._notices.close)

    @property
    def steps(self) -> int:
        """The number of calls of `step()`, over all restarts."""
        return self._steps

    @property
    def epoch(self) -> int:
        """The number of the epoch of `data` in progress, from 0: loop over `range(ckpt.epoch, epochs)`."""
        return self._position.epoch

    @property
    def position(self) -> Position:
        """The position in `data`, for callbacks of frameworks."""
        return self._position

    @property
    def elapsed(self) -> float:
        """Seconds inside of the block, over all restarts, up to the restored checkpoint for each."""
        return self._elapsed + (0.0 if self._entered_at is None else time.monotonic() - self._entered_at)

    @property
    def preempted(self) -> str | None:
        """Returns the source of the preemption notice on this rank, or None."""
        return self._notices.reason

    @property
    def window(self) -> Window | None:
        """The accumulation window; set it to each new one."""
        return self._state.window

    @window.setter
    def window(self, window: Window) -> None:
        self._state.give_window(window)

    # ---- The block.

    def __enter__(self) -> "Checkpointer":
        if self._saver is not None:
            raise RuntimeError("this Checkpointer is in a with block already")
        try:
            store = self._given_store or self._new_store()
            self._saver = Saver(store, self._state, self._timeout, self._every, self._grace, self._logs_errors)
            self._notices.open()
            self._tiers.open(store, self._home, self._run)
            self._state.capture({}, with_data=False)  # A value that has no encoding raises now, not at the first save.
            self._state.open(self._notices.has_come)  # a reference to this object would make a cycle with the loader
            self._restore(self._saver)
            self._entered_at = time.monotonic()
            leaving = self._ranks.exchange(self._flags()).leave
            _members[self] = False
            if leaving and self._exit_code is not None:
                self._leave()
            self._ranks.start(self._flags())
        except BaseException:
            self._close(is_orderly=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Without an exit code, another Checkpointer inside of this block keeps the exception from it.
        is_preempted = isinstance(error, Preempted) or (kind is None and self._has_left)
        saver = self._open_saver()
        try:
            if kind is None and not is_preempted:
                self._finish()
            elif not is_preempted:
                if survivors.are_expected():
                    saver.store.abandon()  # a save in progress would wait for a rank that may have died
                saver.wait()
        finally:
            self._close(is_orderly=kind is None or is_preempted)
        return is_preempted and self._exit_code is None

    def step(self) -> None:
        """Counts a step, and saves if a save is due. Call it at the end of each pass of the loop, on every rank.

        It costs one all-reduce of 56 bytes over gloo, which runs under the next step and which no rank waits for.
        Time-based saves and preemption therefore take effect one step after rank 0's clock or the first notice.

        Raises:
            CheckpointError: A save has failed on some rank, and `on_error` is "raise". The last good checkpoint stays.
            TypeError: A value of the state has no encoding; the message names it.
            RuntimeError: The call is outside of the block, or another rank has ended or does not call step().
        """
        with phases.span("checkpoint"):
            self._step()

    def _step(self) -> None:
        saver = self._open_saver()
        agreed = self._ranks.result() if self._ranks.world_size > 1 else None
        self._position.stepped()
        self._has_left = False
        self._steps += 1
        saver.poll()
        agreed = agreed or self._flags()
        if agreed.ended:
            raise RuntimeError(_UNEQUAL)
        if agreed.failed:
            error, saver.error = saver.error, None
            self._ranks.start(self._flags())  # A script that catches the error may go on.
            raise error or CheckpointError(
                f"the save of step {saver.begun_step} failed on another rank, whose error says why"
            )
        if agreed.leave or any(_members.values()):
            if self._may_leave():
                self._leave()
        elif not agreed.busy and (agreed.due or (self._every.steps is not None and self._is_due(saver))):
            saver.wait()  # no rank was busy; this returns at once
            saver.begin(self._steps, self._header())
        elif not agreed.busy and self._every.is_near(*self._since(saver)):
            saver.prepare(self._header())
        self._ranks.start(self._flags())

    def status(self) -> list[TierStatus]:
        """Returns what each tier has, uploads now, and failed to upload. Rank 0 knows the remote tiers."""
        return self._tiers.status()

    def save(self) -> Checkpoint:
        """Saves the state of this moment under the number of the last step, and waits until it is durable.

        Every rank must call it. Call it where `step()` could stand.

        Raises:
            CheckpointError: The save has failed. The last good checkpoint stays.
            TypeError: A value of the state has no encoding; the message names it.
            RuntimeError: The call is outside of the block.
        """
        saver = self._open_saver()
        with phases.span("checkpoint"):
            saver.wait()
            saver.begin(self._steps, self._header())
            with named_wait(saver.store.announce("save()"), _logger.warning, self._timeout):
                saver.wait()
        if saver.error is not None:
            error, saver.error = saver.error, None  # a script that catches it may go on
            raise error
        assert saver.checkpoint is not None
        return saver.checkpoint

    # ---- Parts of a step.

    def _flags(self) -> Flags:
        saver = self._open_saver()
        return Flags(
            leave=int(self._notices.check() is not None),
            due=int(self._ranks.rank == 0 and self._every.steps is None and self._is_due(saver)),
            busy=int(saver.is_busy),
            running=1,
            failed=int(saver.has_failed),
        )

    def _is_due(self, saver: Saver) -> bool:
        return self._every.is_due(*self._since(saver))

    def _since(self, saver: Saver) -> tuple[int, float]:
        """Returns the steps and the seconds since the last save began."""
        return self._steps - max(0, saver.begun_step), time.monotonic() - saver.began_at

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "rank": self._ranks.rank,
            "steps": self._steps,
            "elapsed": self.elapsed,
            "saved_at": time.time(),
            **{f"run_{name}": value for name, value in self._description.items()},
        }

    def _may_leave(self) -> bool:
        """Saves the last steps of all Checkpointers. Returns False if another one has yet to make this pass's step.

        A Checkpointer waits once: others may step more rarely.
        """
        self._save_last()
        has_waited, _members[self] = _members[self], True
        if not has_waited and any(one.steps < self.steps and not is_leaving for one, is_leaving in _members.items()):
            return False
        for other in [one for one in _members if one is not self]:
            other._save_last()
        return True

    def _save_last(self) -> None:
        """Saves the last step before a preemption."""
        self._has_left = True
        self._complete(self._grace, raises=False)

    def _complete(self, limit: float, raises: bool) -> None:
        """Saves the last step, unless it is saved, and waits up to `limit` for the tiers."""
        saver = self._open_saver()
        saver.wait()
        if not self._ranks.all_true(saver.saved_step == saver.begun_step == self._steps):
            saver.begin(self._steps, self._header())
            saver.wait()
        if saver.has_failed:
            assert saver.error is not None
            raise saver.error
        if (failure := self._tiers.finish(limit)) is not None:
            failure = f"not every tier has the last step: {failure}"
            if raises and not self._logs_errors:
                raise CheckpointError(failure)
            _logger.error("%s", failure)

    def _leave(self) -> NoReturn:
        if self._exit_code is not None and self._ranks.rank == 0:
            say_how_to_continue(self._notices.reason, self._steps, self._open_saver().store.directory)
        raise Preempted(self._exit_code)

    def _finish(self) -> None:
        """Saves the end of the training."""
        if self._ranks.world_size > 1 and (self._ranks.result().ended or self._ranks.exchange(Flags(ended=1)).running):
            raise RuntimeError(_UNEQUAL)
        self._complete(self._timeout, raises=True)

    def _restore(self, saver: Saver) -> None:
        loaded = load_newest(self._tiers, self._ranks, self._state)
        if loaded is None:
            return
        checkpoint, state, tensors = loaded
        is_same_world = checkpoint.world_size == self._ranks.world_size
        differing = differing_config(checkpoint, state, self._description, self._run)
        try:
            self._state.restore(state, tensors, is_same_world)
        except ValueError as error:
            raise of_another_run(error, checkpoint) from error
        self._steps = state["steps"]
        self._elapsed = state["elapsed"]
        self.restored = checkpoint
        saver.begun_step = saver.saved_step = checkpoint.step
        if self._ranks.rank == 0:
            warn_of_differences(
                checkpoint,
                self._ranks.world_size,
                self._position.resumes_on(self._ranks.world_size),
                any(state["gradients"]),
                differing,
                self._state.keeps_bits,
            )

    def _open_saver(self) -> Saver:
        if self._saver is None:
            raise RuntimeError("the Checkpointer is used outside of its block: use 'with ckpt:' around the loop")
        return self._saver

    def _close(self, is_orderly: bool) -> None:
        saver, self._saver = self._saver, None
        _members.pop(self, None)
        self._tiers.close()
        self._elapsed, self._entered_at = self.elapsed, None
        self._state.close()
        self._notices.close()
        self._ranks.drop()
        if saver is None:
            return
        try:
            if self._given_store is None:
                saver.store.close(self._timeout)
        except CheckpointError as error:
            if is_orderly:
                raise
            _logger.error("%s", error)
        finally:
            saver.close()


def _as_list(given: Any) -> list[Any]:
    """Returns an argument that may be None, one object or several as a list."""
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
