"""`Checkpointer`: saves the whole training state while the training goes on, and resumes it exactly."""

import datetime
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
from .preemption.agreement import Flags, Ranks
from .preemption.cloud import Source
from .preemption.interval import Interval, seconds_of
from .preemption.leaving import Company, named_wait, say_how_to_continue
from .preemption.notices import Notices, Preempted
from .restore import differing_config, load_newest, warn_of_differences
from .saver import Saver
from .state import environment
from .state.data_position import position_of
from .state.position import Position, Stateful
from .state.training_state import FORMAT, TrainingState, as_list
from .store.audit import AUDIT
from .store.encryption import Encryption
from .store.errors import CheckpointError
from .store.reading import Checkpoint
from .store.store import Store
from .store.uploader import Remote, TierStatus
from .tiers import Tiers

_logger = logging.getLogger("drivetrain")
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
_company = Company()
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
        tiers: Sequence[Remote] = (),
    ) -> None:
        if on_error not in ("raise", "log"):
            raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'log'")
        if exit_code is not None and not 0 <= exit_code <= 255:
            raise ValueError(f"exit_code is {exit_code}, expected 0 to 255, or None to continue after the block")
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout is {timeout}, expected a finite number of seconds above 0")
        self.restored: Checkpoint | None = None
        self._every = Interval.of(every, mtbf)
        self._grace = seconds_of(grace, "grace")
        self._exit_code, self._on_error, self._timeout = exit_code, on_error, timeout
        self._notices = Notices(signals, preemption_file, cloud)
        self._ranks = Ranks(timeout)
        self._tiers = Tiers(tiers, self._ranks)
        self._position = position_of(data)
        self._state = TrainingState(
            model=model,
            optimizers=as_list(optimizer),
            schedulers=as_list(scheduler),
            scaler=scaler,
            position=self._position,
            window=window,
            generators=generators,
            extra=extra or {},
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )
        self._description = environment.describe(config, self._ranks.world_size)
        self._owns_store = not isinstance(directory, Store)
        self._directory, self._keep = directory, keep
        self._encryption, self._audit, self._run = encryption, audit, run
        self._saver: Saver | None = None  # inside of the block
        self._store: Store | None = None
        self._steps = self._saved_steps = 0  # now, and at the last save that began
        self._elapsed = 0.0  # seconds inside of earlier blocks
        self._entered_at: float | None = None
        self._has_warned_of_grace = self._has_left = False
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
            self._store = self._directory if isinstance(self._directory, Store) else self._new_store()
            self._saver = Saver(self._store, self._state, self._timeout)
            self._notices.open()
            home = os.fspath(self._store.directory if isinstance(self._directory, Store) else self._directory)
            self._tiers.open(self._store, home, self._run)
            self._state.capture({}, with_data=False)  # A value that has no encoding raises now, not at the first save.
            self._state.open(lambda: self._notices.reason is not None)
            self._restore()
            self._entered_at = time.monotonic()
            leaving = self._ranks.exchange(self._flags()).leave
            _company.join(self, self._save_last)
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
                self._finish(saver)
            elif not is_preempted:
                if survivors.are_expected() and self._store is not None:
                    self._store.abandon()  # a save in progress would wait for a rank that may have died
                saver.wait()
                self._report(saver)
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
        is_alone = self._ranks.world_size == 1
        agreed = None if is_alone else self._ranks.result()
        self._position.stepped()
        self._has_left = False
        self._steps += 1
        self._poll(saver)
        agreed = agreed or self._flags()
        if agreed.ended:
            raise RuntimeError(_UNEQUAL)
        if agreed.failed:
            self._raise_failure(saver)
        if agreed.leave or _company.is_leaving():
            if _company.may_leave(self):
                self._leave()
            if not is_alone:
                self._ranks.start(self._flags())
            return
        since = self._steps - self._saved_steps
        if not agreed.busy and (agreed.due or (self._every.steps is not None and self._every.is_due(since, 0.0))):
            saver.wait()  # no rank was busy; this returns at once
            self._begin_save(saver)
        if not is_alone:
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
            self._begin_save(saver)
            assert self._store is not None
            with named_wait(self._store.announce("save()"), _logger.warning, self._timeout):
                saver.wait()
        if saver.error is not None:
            raise saver.error
        self._adapt(saver)
        assert saver.checkpoint is not None
        return saver.checkpoint

    # ---- Parts of a step.

    def _flags(self) -> Flags:
        saver = self._open_saver()
        since, seconds = self._steps - self._saved_steps, time.monotonic() - saver.began_at
        is_due = self._ranks.rank == 0 and self._every.steps is None and self._every.is_due(since, seconds)
        return Flags(
            leave=int(self._notices.check() is not None),
            due=int(is_due),
            busy=int(saver.is_busy),
            running=1,
            failed=int(saver.error is not None and self._on_error == "raise"),
        )

    def _begin_save(self, saver: Saver) -> None:
        self._saved_steps = self._steps
        saver.begin(self._steps, self._header())
        self._report(saver)

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "rank": self._ranks.rank,
            "steps": self._steps,
            "elapsed": self.elapsed,
            "saved_at": time.time(),
            **{f"run_{name}": value for name, value in self._description.items()},
        }

    def _poll(self, saver: Saver) -> None:
        if saver.poll():
            self._report(saver)
            self._adapt(saver)

    def _report(self, saver: Saver) -> None:
        """Logs why a save has failed, where no exception will tell."""
        if saver.error is not None and self._on_error == "log":
            _logger.error("the training goes on without this checkpoint: %s", saver.error)
            saver.error = None

    def _adapt(self, saver: Saver) -> None:
        """Learns from the costs of a save that has ended."""
        if saver.duration is None or saver.error is not None:
            return
        self._every.measured(saver.stall, saver.duration)
        if saver.duration > self._grace and not self._has_warned_of_grace:
            self._has_warned_of_grace = True
            _logger.warning(
                "a save of %.1f MiB took %.1f s (%.1f MiB/s), and the grace period is %.0f s: the save on a preemption "
                "would not complete. Choose a faster disk, or an earlier notice.",
                saver.nbytes / 2**20,
                saver.duration,
                saver.nbytes / 2**20 / saver.duration,
                self._grace,
            )

    def _raise_failure(self, saver: Saver) -> None:
        error, saver.error = saver.error, None
        if error is None:
            error = CheckpointError(f"the save of step {saver.begun_step} failed on another rank, whose error says why")
        self._ranks.start(self._flags())  # A script that catches the error may go on.
        raise error

    def _save_last(self) -> None:
        """Saves the last step before a preemption."""
        self._has_left = True
        if (failure := self._complete(self._grace)) is not None:
            _logger.error("not every tier has the last step: %s", failure)

    def _complete(self, limit: float) -> str | None:
        """Saves the last step, unless it is saved. Returns what failed in a tier, or is not done within `limit`."""
        saver = self._open_saver()
        saver.wait()
        if not self._ranks.all_true(saver.saved_step == saver.begun_step == self._steps):
            self._begin_save(saver)
            saver.wait()
        if saver.error is not None and self._on_error == "raise":
            raise saver.error
        self._report(saver)
        return self._tiers.finish(limit)

    def _leave(self) -> NoReturn:
        if self._exit_code is not None and self._ranks.rank == 0 and self._store is not None:
            say_how_to_continue(self._notices.reason, self._steps, self._store.directory)
        raise Preempted(self._exit_code)

    def _finish(self, saver: Saver) -> None:
        """Saves the end of the training."""
        if self._ranks.world_size > 1 and (self._ranks.result().ended or self._ranks.exchange(Flags(ended=1)).running):
            raise RuntimeError(_UNEQUAL)
        saver.wait()
        self._report(saver)
        if (failure := self._complete(self._timeout)) is not None:
            if self._on_error == "raise":
                raise CheckpointError(f"not every tier has the last step: {failure}")
            _logger.error("not every tier has the last step: %s", failure)

    def _restore(self) -> None:
        loaded = load_newest(self._tiers, self._ranks, self._state)
        if loaded is None:
            return
        checkpoint, state, tensors = loaded
        is_same_world = checkpoint.world_size == self._ranks.world_size
        differing = differing_config(checkpoint, state, self._description, self._run)
        try:
            self._state.restore(state, tensors, is_same_world)
        except ValueError as error:
            cure = f"To start a run other than the one in {checkpoint.path}, choose another directory"
            raise ValueError(f"{str(error).rstrip('.')}. {cure}") from error
        self._steps = self._saved_steps = state["steps"]
        self._elapsed = state["elapsed"]
        self.restored = checkpoint
        if self._saver is not None:
            self._saver.begun_step = self._saver.saved_step = checkpoint.step
        if self._ranks.rank == 0:
            warn_of_differences(
                checkpoint,
                self._ranks.world_size,
                self._position.resumes_on(self._ranks.world_size),
                any(state["gradients"]),
                differing,
            )

    def _new_store(self) -> Store:
        directory = self._directory
        assert not isinstance(directory, Store)
        return Store(
            directory,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            keep=self._keep,
            timeout=self._timeout,
            encryption=self._encryption,
            audit=Path(directory) / AUDIT if self._audit is True else self._audit or None,
        )

    def _open_saver(self) -> Saver:
        if self._saver is None:
            raise RuntimeError("the Checkpointer is used outside of its block: use 'with ckpt:' around the loop")
        return self._saver

    def _close(self, is_orderly: bool) -> None:
        self._saver = None
        _company.part(self)
        self._tiers.close()
        self._elapsed, self._entered_at = self.elapsed, None
        self._state.close()
        self._notices.close()
        self._ranks.drop()
        store, self._store = self._store, None
        if store is not None and self._owns_store:
            try:
                store.close(self._timeout)
            except CheckpointError as error:
                if is_orderly:
                    raise
                _logger.error("%s", error)
