"""`MonitorCallback`: monitors a training of Hugging Face's Trainer."""

from typing import Any

from .summary import Summary
from .trainers import TrainerMonitor, refuse_own

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "drivetrain.monitor.huggingface needs Hugging Face's Trainer: pip install 'transformers[torch]'"
    ) from error


class MonitorCallback(TrainerCallback):
    """Accounts for the time of every optimizer step of a Trainer.

    ::

        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[MonitorCallback(to=["jsonl:run.jsonl"])])
        trainer.train()

    Evaluations belong to no step. The first epoch of a training that the Trainer itself resumes has no waits for data,
    because the Trainer then iterates over another loader. If `trainer.train()` raises, call `close()`; the next
    training with this callback, and the end of the process, do it, too.

    Args:
        options: Arguments of `drivetrain.Monitor`, such as `to` and `flops`.

    Raises:
        TypeError: `options` contains an object that the Trainer has itself, such as `model`.
    """

    def __init__(self, **options: Any) -> None:
        refuse_own(options, "MonitorCallback")
        self._options = options
        self.monitor: TrainerMonitor | None = None  # of the last training

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
            self.monitor.pause()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends the last step of the epoch."""
        if self.monitor is not None:
            self.monitor.pause()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends, and shows the table on rank 0."""
        self.close()

    def close(self) -> None:
        """Ends a monitor that an error of the training has left active."""
        if self.monitor is not None:
            self.monitor.finish()

    def summary(self) -> Summary:
        """Returns where the time of the last training went.

        Raises:
            RuntimeError: Nothing has been trained.
        """
        if self.monitor is None:
            raise RuntimeError("this MonitorCallback has seen no training: pass it to a Trainer and train")
        return self.monitor.summary()
