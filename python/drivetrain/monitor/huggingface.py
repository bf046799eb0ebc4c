"""`MonitorCallback`: monitors a training of Hugging Face's Trainer."""

from numbers import Real
from typing import Any

from .trainers import TrainerMonitor, TrainerMonitorCallback

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "drivetrain.monitor.huggingface needs Hugging Face's Trainer: pip install 'transformers[torch]'"
    ) from error


class MonitorCallback(TrainerMonitorCallback, TrainerCallback):
    """Accounts for the time of every optimizer step of a Trainer.

    ::

        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[MonitorCallback(to=["jsonl:run.jsonl"])])
        trainer.train()

    Evaluations belong to no step. The first epoch of a training that the Trainer itself resumes has no waits for data,
    because the Trainer then iterates over another loader. If `trainer.train()` raises, call `close()`; the next
    training with this callback, and the end of the process, do it as well.

    Args:
        options: Arguments of `drivetrain.Monitor`, such as `to` and `flops`.

    Raises:
        TypeError: `options` contains an object that the Trainer has itself, such as `model`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Begins, once the Trainer has made all objects."""
        self.close()
        loader = objects["train_dataloader"]
        self.monitor = TrainerMonitor(objects["model"], [objects["optimizer"]], loader, **self._options)
        self.monitor.start()
        self.monitor.mark(loader)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leaves out an evaluation that follows."""
        if control.should_evaluate and self.monitor is not None:
            self.monitor._end_batches()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Logs the numbers that the Trainer logs, such as loss, grad_norm and learning_rate."""
        if self.monitor is not None and self.monitor.is_active:
            self.monitor.log(**{name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)})

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends the last step of the epoch."""
        if self.monitor is not None:
            self.monitor._end_batches()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends, and shows the table on rank 0."""
        self.close()
