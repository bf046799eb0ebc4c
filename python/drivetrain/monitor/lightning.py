"""`MonitorCallback`: monitors a training of Lightning's Trainer."""

from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from ..phases import number_of
from .trainers import TrainerMonitor, TrainerMonitorCallback

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("drivetrain.monitor.lightning needs Lightning: pip install lightning") from error

_DATA, _FORWARD = number_of("data"), number_of("forward")
_FETCH = ".train_dataloader_next"  # ends the name that Lightning's profilers get for the wait for a batch


class MonitorCallback(TrainerMonitorCallback, Callback):  # type: ignore[misc]
    """Accounts for the time of every optimizer step of a Trainer.

    ::

        trainer = Trainer(max_epochs=3, callbacks=[MonitorCallback(to=["jsonl:run.jsonl"])])
        trainer.fit(module, loader)

    Validations between two steps belong to no step. The forward phase is the module's `training_step`.

    Args:
        options: Arguments of `drivetrain.Monitor`, such as `to` and `flops`.

    Raises:
        TypeError: `options` contains an object that the Trainer has itself, such as `model`.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins, once the Trainer has made all objects."""
        loaders = trainer.fit_loop._combined_loader.flattened
        # Lightning calls training_step without the module's __call__, so that no hook of the module sees it.
        self.monitor = TrainerMonitor(None, trainer.optimizers, loaders[0] if loaders else None, **self._options)
        self.monitor.start()
        self.monitor._hooks.callback(_watch(trainer.profiler, self.monitor))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts the batch."""
        if self.monitor is not None:
            self.monitor._take_batch(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the loss that `training_step` has returned."""
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else outputs
        if self.monitor is not None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.monitor.log(loss=loss)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves out the validation."""
        if self.monitor is not None and not trainer.sanity_checking and self.monitor._is_step_over():
            self.monitor._end_batches()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the last step of the epoch."""
        if self.monitor is not None:
            self.monitor._end_batches()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends, and shows the table on rank 0."""
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends; the last event says that the training failed."""
        if self.monitor is not None:
            self.monitor.fail(exception)
        self.close()


def _watch(profiler: Any, monitor: TrainerMonitor) -> Callable[[], None]:
    """Marks the waits for batches and the forward passes where Lightning tells its profiler of them.

    Returns:
        A function that undoes it.
    """
    start, stop = profiler.start, profiler.stop

    def marked_start(action: str) -> None:
        if action.endswith(_FETCH):
            monitor._before_batch()
            _C.trace_begin(_DATA)
        elif _is_forward(action):
            _C.trace_begin(_FORWARD)
        start(action)

    def marked_stop(action: str) -> None:
        stop(action)
        if action.endswith(_FETCH):
            _C.trace_end(_DATA)
        elif _is_forward(action):
            _C.trace_end(_FORWARD)

    def undo() -> None:
        del profiler.start, profiler.stop

    profiler.start, profiler.stop = marked_start, marked_stop
    return undo


def _is_forward(action: str) -> bool:
    return action.startswith("[Strategy]") and action.endswith(".training_step")
