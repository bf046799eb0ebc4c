"""`CheckpointCallback`: saves and resumes a training of Lightning's Trainer."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

from .checkpointer import EXIT_CODE, Checkpointer
from .load import complete_checkpoints

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("drivetrain.checkpointing.lightning needs Lightning: pip install lightning") from error

_EXTRA = "lightning.Trainer"  # under which the Trainer's own values are saved
_OWN = ("model", "optimizer", "scheduler", "scaler", "data", "window")


class CheckpointCallback(Callback):  # type: ignore[misc]
    """Saves a Trainer's whole state in the background, and continues it with the same bits.

    ::

        trainer = Trainer(max_epochs=3, callbacks=[CheckpointCallback("runs/gpt", every="5min")])
        trainer.fit(module, loader)          # continues from the newest complete checkpoint, if there is one

    The loader should have a `drivetrain.data.ResumableSampler`. On several ranks pass `use_distributed_sampler=False`
    to the Trainer then, because this sampler splits the samples over ranks by itself. Metrics that Lightning averages
    over an epoch begin again after a restart, and so do torchmetrics whose states are not persistent.

    Args:
        directory: Folder of the checkpoints, which all ranks must see.
        options: Other arguments of `Checkpointer`, such as `every`, `keep` and `signals`. A step is a batch.

    Raises:
        TypeError: `options` contains an object that the Trainer has itself, such as `model`.
        ValueError: `exit_code` is None, with which the Trainer could not go on, or `tiers` are given.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        for name in _OWN:
            if name in options:
                raise TypeError(
                    f"{name} is an argument of CheckpointCallback, which takes it from the Trainer: omit it"
                )
        if options.get("exit_code", EXIT_CODE) is None:
            raise ValueError("exit_code is None, expected 0 to 255: Lightning ends the process after a preemption")
        if options.get("tiers"):
            raise ValueError("tiers are given, expected none: the position of the Trainer is read from the directory")
        self._directory, self._options = Path(directory), options
        self._checkpointer: Checkpointer | None = None  # inside of fit()
        self._is_pending = False  # a batch has ended and is not counted yet

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the state, once the Trainer has made all objects."""
        if trainer.ckpt_path is not None:
            raise ValueError(f"ckpt_path is {trainer.ckpt_path!r}, expected None: the callback restores the state")
        self._check(trainer)
        loaders = trainer.fit_loop._combined_loader.flattened
        options = {**self._options, "extra": {**self._options.get("extra", {}), _EXTRA: _LoopValues(trainer, self)}}
        self._is_pending = False
        self._checkpointer = ckpt = Checkpointer(
            self._directory,
            model=trainer.model,
            optimizer=trainer.optimizers,
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            data=loaders,
            **options,
        )
        ckpt.position.call_before_fetch(self._count)
        if trainer.received_sigterm:  # Lightning handled it before this callback could.
            signal.raise_signal(signal.SIGTERM)
        ckpt.__enter__()
        # The Trainer has begun an epoch already. It begins again, where the checkpoint was.
        fetcher = trainer.fit_loop._data_fetcher
        assert fetcher is not None
        iter(fetcher)
        if fetcher.length is not None:  # The Trainer adds the batches before the restored position.
            fetcher.length = int(trainer.fit_loop.max_batches)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Notes the step, which counts when the Trainer fetches the next batch: after its logging and validation."""
        self._is_pending = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the end of the training."""
        ckpt, self._checkpointer = self._checkpointer, None
        if ckpt is None:
            return
        with _Entered(ckpt):
            if self._is_pending:
                ckpt.step()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the save that is under way."""
        ckpt, self._checkpointer = self._checkpointer, None
        if ckpt is not None:
            ckpt.__exit__(type(exception), exception, exception.__traceback__)

    def _check(self, trainer: Trainer) -> None:
        """Raises ValueError if the newest checkpoint's count of batches stands for other samples here."""
        found = (
            complete_checkpoints(self._directory, self._options.get("encryption")) if self._directory.is_dir() else []
        )
        if not found:
            return
        state: Any = found[-1].state(trainer.global_rank % found[-1].world_size)
        saved = state.get("extra", {}).get(_EXTRA) if isinstance(state, dict) else None
        if saved is None:
            raise ValueError(f"{found[-1].path} is of no Lightning Trainer: choose another directory")
        for name, value in _shape_of(trainer).items():
            if saved[name] != value:
                raise ValueError(
                    f"{name} is {value}, expected {saved[name]} as in the checkpoint: the Trainer counts its position "
                    "in batches, which would stand for other samples"
                )

    def _count(self) -> None:
        if self._is_pending:
            self._is_pending = False
            assert self._checkpointer is not None
            self._checkpointer.step()


class _Entered:
    """Leaves a block that was entered elsewhere."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None:
        self._checkpointer.__exit__(*exception)


class _LoopValues:
    """The Trainer's own values: the progress of its loops, and the states of its other callbacks and data module."""

    def __init__(self, trainer: Trainer, own: CheckpointCallback) -> None:
        self._trainer, self._own = trainer, own

    def state_dict(self) -> dict[str, Any]:
        loops = self._trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # The Checkpointer has the positions.
        module = self._trainer.datamodule
        return {
            **_shape_of(self._trainer),
            "loops": loops,
            "callbacks": {one.state_key: one.state_dict() for one in self._callbacks()},
            "datamodule": {} if module is None else module.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for one in self._callbacks():
            if state := saved["callbacks"].get(one.state_key):
                one.load_state_dict(state)
        if self._trainer.datamodule is not None:
            self._trainer.datamodule.load_state_dict(saved["datamodule"])
        loop = self._trainer.fit_loop
        loop.load_state_dict(saved["loops"])
        progress = loop.epoch_progress.total
        if progress.completed == progress.ready:  # The training had ended: a longer one begins the next epoch.
            loop.restarting = False
            loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            return
        loop.reset()  # The Trainer has called it before; it tells the loops that they are inside of an epoch.
        inner = loop.epoch_loop
        assert loop._data_fetcher is not None
        # The first pass of the loop sees that a validation was due and has run, and counts a batch too many then.
        if inner._should_check_val_fx(loop._data_fetcher) and not inner._should_accumulate():
            inner._batches_that_stepped -= 1
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")

    def _callbacks(self) -> list[Callback]:
        return [one for one in self._trainer.callbacks if one is not self._own]


def _shape_of(trainer: Trainer) -> dict[str, int]:
    """Returns what the Trainer's count of batches depends on."""
    batches = trainer.num_training_batches
    return {"number of ranks": trainer.world_size, "batches per epoch": -1 if batches == float("inf") else batches}
