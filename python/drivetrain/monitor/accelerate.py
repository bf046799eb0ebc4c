"""`AccelerateMonitor`: monitors a loop with Hugging Face Accelerate."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from .trainers import TrainerMonitor, refuse_own


class AccelerateMonitor(TrainerMonitor):
    """Accounts for the time of every optimizer step of a loop whose objects Accelerate has prepared.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with AccelerateMonitor(accelerator, loader, to=["jsonl:run.jsonl"]):
            for batch in loader:
                ...

    All optimizers that the accelerator has prepared end steps, and the first of its models marks the forward passes.
    Steps under `accelerator.accumulate()` last until the optimizer really steps.

    Args:
        accelerator: The Accelerator, after `prepare`.
        loader: The prepared loader of the training.
        options: Other arguments of `drivetrain.Monitor`.

    Raises:
        TypeError: `options` contains an object that the accelerator has itself, such as `model`.
        ValueError: The accelerator has prepared no model, or no optimizer.
    """

    def __init__(self, accelerator: Any, loader: Iterable[Any], **options: Any) -> None:
        refuse_own(options, "AccelerateMonitor")
        models, optimizers = accelerator._models, accelerator._optimizers
        for what, found in (("model", models), ("optimizer", optimizers)):
            if not found:
                raise ValueError(
                    f"accelerator has prepared no {what}, expected at least one: call accelerator.prepare() before"
                )
        super().__init__(models[0], optimizers, loader, **options)
        self._prepared = loader

    def __enter__(self) -> "AccelerateMonitor":
        super().__enter__()
        self.mark(self._prepared)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        self.pause()
        super().__exit__(kind, error, trace)
