"""`CheckpointCallback`: saves and resumes a training of Lightning's Trainer."""

import os
import signal
import warnings
from contextlib import ExitStack
from typing import Any, cast

from torch.nn.utils import prune

from ..checkpointer import EXIT_CODE
from ..restore import of_another_run
from ..state.encoding import decode
from ..state.saved_optimizer import plain_name
from ..state.training_state import names_of
from ..store.errors import CheckpointError, EncryptionError
from ..store.reading import Checkpoint
from .trainers import TrainerSteps, check_position

try:
    from lightning.pytorch import Callback, LightningModule, Trainer, __version__
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        GradientAccumulationScheduler,
        ModelPruning,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError("drivetrain.checkpointing.frameworks.lightning needs Lightning: pip install lightning") from error

_EXTRA = "lightning.Trainer"  # under which the Trainer's own values are saved
# They change the Trainer when an epoch begins, also for the rest of an epoch that is continued.
_BY_EPOCH = (GradientAccumulationScheduler, StochasticWeightAveraging)
# Entries of Lightning's checkpoints that are saved elsewhere.
_RESTORED = {"pytorch-lightning_version", "loops", "callbacks", "optimizer_states", "lr_schedulers"}


class CheckpointCallback(TrainerSteps, Callback):  # type: ignore[misc]
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
        super().__init__(directory, options)
        if options.get("exit_code", EXIT_CODE) is None:
            raise ValueError("exit_code is None, expected 0 to 255: Lightning ends the process after a preemption")
        self._found: _Found | None = None  # the checkpoint, until on_train_start()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes the Trainer restore modules and callbacks at the moment at which it restores its own checkpoints."""
        if stage != "fit":
            return
        if any(isinstance(one, ModelPruning) and one._use_lottery_ticket_hypothesis for one in trainer.callbacks):
            raise ValueError(
                "ModelPruning has use_lottery_ticket_hypothesis, expected False: it keeps the first weights outside of "
                "checkpoints, so that no training continues with the same bits"
            )
        # Others find the restored state in on_train_start, and change weights in on_train_end after the last save.
        others = [one for one in trainer.callbacks if one is not self]
        trainer.callbacks = [self, *others]
        # This one requires in on_train_start that nothing is accumulated, and the position depends on it.
        trainer.callbacks.sort(key=lambda one: not isinstance(one, GradientAccumulationScheduler))
        connector = trainer._checkpoint_connector

        def restore(ckpt_path: Any = None, *_: Any, **__: Any) -> None:
            del connector._restore_modules_and_callbacks
            if ckpt_path is not None:
                raise ValueError(f"ckpt_path is {ckpt_path!r}, expected None: the callback restores the state")
            self._found = _newest(trainer, self._complete())
            if self._found is not None:
                self._found.restore(trainer)

        connector._restore_modules_and_callbacks = restore

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores all other values, once the Trainer has made their objects."""
        shape = _shape_of(trainer)
        if complete := self._complete():
            check_position(complete[-1], trainer.global_rank, _EXTRA, shape, "batches")
        batches = trainer.fit_loop.max_batches  # StochasticWeightAveraging adds one in its last epoch
        found, self._found = self._found, None
        num_schedulers = len(trainer.lr_scheduler_configs)
        if found is not None:
            if any(one._scheduler_state is not None for one in _averaging(trainer)):
                num_schedulers = len(found.state["scheduler"])  # It has removed the module's.
            found.begin_epoch(trainer)
        ckpt = self._make(
            _EXTRA,
            _LoopValues(trainer, shape),
            model=trainer.model,
            optimizer=trainer.optimizers,
            scheduler=[_Scheduler(trainer, index) for index in range(num_schedulers)],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            data=trainer.fit_loop._combined_loader.flattened,
        )
        if trainer.received_sigterm:  # Lightning handled it before this callback could.
            signal.raise_signal(signal.SIGTERM)
        ckpt.__enter__()
        early = None if found is None else found.checkpoint
        if (early and early.serial) != (ckpt.restored and ckpt.restored.serial):
            raise CheckpointError(
                f"callbacks were restored from {early}, and all else from {ckpt.restored}: start again"
            )
        # The Trainer has begun an epoch already. It begins again, where the checkpoint was.
        fetcher = trainer.fit_loop._data_fetcher
        assert fetcher is not None
        iter(fetcher)
        if fetcher.length is not None:  # The Trainer adds the batches before the restored position.
            fetcher.length = int(batches)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Notes the step, which counts when the Trainer fetches the next batch: after its logging and validation."""
        self._is_pending = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the end of the training."""
        ckpt, self._checkpointer = self._checkpointer, None
        if ckpt is not None:
            with ExitStack() as stack:
                stack.push(ckpt)  # whose block was entered in on_train_start
                if self._is_pending:
                    ckpt.step()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the save that is in progress."""
        ckpt, self._checkpointer = self._checkpointer, None
        if ckpt is not None:
            ckpt.__exit__(type(exception), exception, exception.__traceback__)


class _Scheduler:
    """The learning-rate scheduler at an index. StochasticWeightAveraging puts its own one there."""

    def __init__(self, trainer: Trainer, index: int) -> None:
        self._trainer, self._index = trainer, index

    def _found(self) -> list[Any]:
        return [one.scheduler for one in self._trainer.lr_scheduler_configs[self._index : self._index + 1]]

    def state_dict(self) -> dict[str, Any]:
        return next((one.state_dict() for one in self._found()), {})

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for one in self._found():
            one.load_state_dict(saved)


class _Found:
    """A checkpoint with the values that Lightning restores before on_fit_start."""

    def __init__(self, checkpoint: Checkpoint, rank: int) -> None:
        self.checkpoint = checkpoint
        self.state = cast(dict[str, Any], checkpoint.state(rank % checkpoint.world_size))
        # All of them, so that damage anywhere leads to the same older checkpoint as in the Checkpointer.
        self._tensors = checkpoint.load(names_of(self.state))
        self._values = decode(self.state["extra"][_EXTRA], self._tensors)

    def restore(self, trainer: Trainer) -> None:
        """Restores the module, the data module and the callbacks, in Lightning's order and with its hooks."""
        module, data, connector = trainer.lightning_module, trainer.datamodule, trainer._checkpoint_connector
        checkpoint = {
            "pytorch-lightning_version": __version__,
            "loops": {"fit_loop": self._values["loops"]},
            "callbacks": self._values["callbacks"],
            **self._values.get("hooks", {}),
        }
        if data is not None:
            checkpoint[type(data).__qualname__] = self._values["datamodule"]
        is_whole = not self.state.get("meshes")
        if is_whole and not self.state.get("split_optimizers"):
            checkpoint["optimizer_states"] = decode(self.state["optimizer"], self._tensors)
        checkpoint["lr_schedulers"] = decode(self.state["scheduler"], self._tensors)
        saved = decode(self.state["model"], self._tensors) if is_whole else {}
        if is_whole and "state_dict" not in checkpoint:
            _prune(module, saved)
            ours = {plain_name(name): name for name in module.state_dict()}
            checkpoint["state_dict"] = {ours.get(name, name): value for name, value in saved.items()}
        connector._loaded_checkpoint = checkpoint
        try:
            connector.restore_model()
        except RuntimeError as error:
            raise of_another_run(error, self.checkpoint) from error
        connector.restore_datamodule()
        connector.restore_callbacks()
        _prune(module, saved)  # ModelPruning saves weights without masks
        connector._loaded_checkpoint, self._tensors = {}, {}
        trainer.fit_loop.epoch_loop.val_loop.restarting = True  # no sanity check, which would change callbacks

    def begin_epoch(self, trainer: Trainer) -> None:
        """Repeats what callbacks did to the Trainer when the current epoch began."""
        progress = trainer.fit_loop.epoch_progress
        progress.load_state_dict(self._values["loops"]["epoch_progress"])
        if progress.total.completed != progress.total.ready:
            for one in trainer.callbacks:
                if isinstance(one, _BY_EPOCH):
                    one.on_train_epoch_start(trainer, trainer.lightning_module)
            return
        for one in _averaging(trainer):
            if one._model_contains_batch_norm and progress.current.completed - 1 == one.swa_end + 1:
                # The training has ended. Its on_train_end takes back what the last epoch began with.
                one._accumulate_grad_batches = trainer.accumulate_grad_batches
                trainer.fit_loop.max_batches += 1


def _averaging(trainer: Trainer) -> list[StochasticWeightAveraging]:
    return [one for one in trainer.callbacks if isinstance(one, StochasticWeightAveraging)]


def _newest(trainer: Trainer, complete: list[Checkpoint]) -> _Found | None:
    """Returns the newest checkpoint that all ranks can read; None if there is none."""
    mine = {one.serial: one for one in complete}
    for serial in trainer.strategy.broadcast(sorted(mine, reverse=True)):
        found = None
        try:
            if serial in mine and _EXTRA in cast(dict[str, Any], mine[serial].state(0) or {}).get("extra", {}):
                found = _Found(mine[serial], trainer.global_rank)
        except EncryptionError:
            raise
        except CheckpointError:
            pass  # The Checkpointer logs it.
        if trainer.strategy.reduce_boolean_decision(found is not None):
            return found
    return None


def _prune(module: LightningModule, saved: dict[str, Any]) -> None:
    """Makes the masks of a saved model that was pruned."""
    ours = module.state_dict()
    for name, mask in saved.items():
        parameter = name.removesuffix("_mask")
        if parameter in ours and f"{parameter}_orig" in saved:
            owner, _, last = parameter.rpartition(".")
            prune.custom_from_mask(module.get_submodule(owner), last, mask)


class _LoopValues:
    """The Trainer's own values: the progress of its loops, and the states of its other callbacks and data module."""

    def __init__(self, trainer: Trainer, shape: dict[str, int]) -> None:
        self._trainer, self._shape = trainer, shape

    def state_dict(self) -> dict[str, Any]:
        loops = self._trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # The Checkpointer has the positions.
        module = self._trainer.datamodule
        callbacks = call._call_callbacks_state_dict(self._trainer)
        return {
            **self._shape,
            "loops": loops,
            "callbacks": callbacks,
            "hooks": self._hooks(callbacks),
            "frozen": self._frozen(),
            "datamodule": {} if module is None else module.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if (frozen := saved.get("frozen")) is not None and self._frozen() is not None:
            for name, param in self._trainer.lightning_module.named_parameters():
                param.requires_grad_(name not in frozen)
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

    def _frozen(self) -> list[str] | None:
        """Returns the names of parameters without gradients, if a callback freezes some and trains them later."""
        if not any(isinstance(one, BaseFinetuning) for one in self._trainer.callbacks):
            return None
        return [name for name, one in self._trainer.lightning_module.named_parameters() if not one.requires_grad]

    def _hooks(self, callbacks: dict[str, Any]) -> dict[str, Any]:
        """Returns what on_save_checkpoint of callbacks and of the module adds to a checkpoint or changes in it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        parents = [(module, LightningModule), *((one, Callback) for one in trainer.callbacks)]
        if not any(is_overridden("on_save_checkpoint", one, parent) for one, parent in parents):
            return {}
        weights = module.state_dict()
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": __version__,
            "state_dict": dict(weights),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": callbacks,
            "optimizer_states": [one.state_dict() for one in trainer.optimizers],
            "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        }
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        found = {name: value for name, value in checkpoint.items() if name not in _RESTORED}
        kept = checkpoint.get("state_dict", {})
        if kept.keys() == weights.keys() and all(kept[name] is weights[name] for name in weights):
            del found["state_dict"]
        return found


def _shape_of(trainer: Trainer) -> dict[str, int]:
    """Returns what the Trainer's count of batches depends on."""
    batches = trainer.num_training_batches
    return {"number of ranks": trainer.world_size, "batches per epoch": -1 if batches == float("inf") else batches}
