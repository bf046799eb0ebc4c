"""`CheckpointCallback`: saves and resumes a training of Hugging Face's Trainer."""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ...data import ResumableSampler
from ..preemption.agreement import Ranks
from .trainers import TrainerSteps, check_position

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import TrainOutput
except ImportError as error:
    raise ImportError(
        "drivetrain.checkpointing.frameworks.huggingface needs Hugging Face's Trainer: "
        "pip install 'transformers[torch]'"
    ) from error

_EXTRA = "transformers.Trainer"  # under which the Trainer's own values are saved


class CheckpointCallback(TrainerSteps, TrainerCallback):
    """Saves a Trainer's whole state in the background, and continues it with the same bits.

    ::

        trainer = Trainer(model, arguments, train_dataset=dataset)
        CheckpointCallback("runs/gpt", every="5min").train(trainer)   # in place of trainer.train()

    A `RandomSampler` or `SequentialSampler` of the Trainer is replaced by a `drivetrain.data.ResumableSampler`, seeded
    by `data_seed` or `seed`. The order differs from `trainer.train()`, and every epoch has another one. The
    Trainer's own `save_strategy` is independent of this; set it to "no" unless you want its files as well.

    Args:
        directory: Folder of the checkpoints, which all ranks must see.
        options: Other arguments of `Checkpointer`, such as `every`, `keep` and `signals`. A step is an optimizer step.

    Raises:
        TypeError: `options` contains an object that the Trainer has itself, such as `model`.
        ValueError: `options` contains tiers.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(directory, options)
        self._trainer: Trainer | None = None  # inside of train()
        self._batches: _ResumedBatches | None = None
        self._stack: ExitStack | None = None
        self._expected = 0  # serial of the checkpoint whose position the Trainer has; 0: it begins again

    def train(self, trainer: Trainer, **arguments: Any) -> TrainOutput | None:
        """Trains as `trainer.train(**arguments)` does, from the newest complete checkpoint if there is one.

        Returns:
            The result of the Trainer; None after a preemption with `exit_code=None`.

        Raises:
            CheckpointError: A save has failed, or no checkpoint can be read.
            TypeError: The dataset is an IterableDataset, or several ranks use a sampler that cannot be resumed.
            ValueError: The checkpoint is of another model, number of ranks, batch size or dataset length.
        """
        if "resume_from_checkpoint" in arguments:
            raise TypeError(f"resume_from_checkpoint is given, expected none: the newest in {self._directory} is taken")
        if trainer.args.ignore_data_skip:
            raise ValueError("ignore_data_skip is True, expected False: the training continues within its epoch")
        serial = self._newest()
        while True:
            try:
                return self._train(trainer, serial, arguments)
            except _OtherCheckpoint as other:  # A newer one was damaged, and the Trainer had its position already.
                serial = other.serial

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Restores the state, once the Trainer has made all objects."""
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError("trainer.train() was called: call CheckpointCallback.train(trainer) in its place")
        assert self._batches is not None
        assert self._stack is not None
        ckpt = self._make(
            _EXTRA,
            _TrainerStateValues(trainer, self._batches.total),
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            data=self._batches.loader,
        )
        self._stack.enter_context(ckpt)
        serial = 0 if ckpt.restored is None else ckpt.restored.serial
        if serial != self._expected:
            raise _OtherCheckpoint(serial)
        if ckpt.restored is not None:
            self._batches.resume(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Notes the step, which counts when the Trainer fetches the next batch: after its logging and evaluation."""
        self._is_pending = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Counts the last step of the training before the Trainer may load its best model."""
        if control.should_training_stop or state.global_step >= state.max_steps:
            assert self._batches is not None
            assert self._checkpointer is not None
            is_pending, self._is_pending = self._is_pending, False  # the end of the batches counts no step
            self._batches.end()
            if is_pending:
                self._checkpointer.step()
                self._checkpointer.save()

    def _newest(self) -> int:
        """Returns the serial of the newest checkpoint that all ranks see; 0: there is none."""
        found = self._complete()
        ranks = Ranks(self._options.get("timeout", 1800.0))
        ranks.connect()
        try:
            return ranks.agree(found[-1].serial if found else 0)[0]
        finally:
            ranks.close()

    def _train(self, trainer: Trainer, serial: int, arguments: Mapping[str, Any]) -> TrainOutput | None:
        self._trainer, self._expected = trainer, serial
        self._batches = _ResumedBatches(_loader_of(trainer), trainer.args.gradient_accumulation_steps)
        trainer.add_callback(self)
        try:
            with (
                ExitStack() as self._stack,
                self._position(trainer, serial) as folder,
                _replaced(trainer, self._batches),
            ):
                return trainer.train(resume_from_checkpoint=folder, **arguments)
        finally:
            trainer.remove_callback(self)
            self._trainer = self._checkpointer = self._batches = self._stack = None
        return None  # the Checkpointer ended a preemption without an exit code

    @contextmanager
    def _position(self, trainer: Trainer, serial: int) -> Iterator[str | None]:
        """Writes the Trainer's position where it looks for one; None: it begins again."""
        if not serial:
            yield None
            return
        checkpoint = next(one for one in self._complete() if one.serial == serial)
        assert self._batches is not None
        shape = _shape_of(trainer, self._batches.total)
        saved = check_position(checkpoint, trainer.args.process_index, _EXTRA, shape, "steps")
        with tempfile.TemporaryDirectory(prefix="drivetrain-trainer-") as folder:
            (Path(folder) / "trainer_state.json").write_text(saved["state"])
            yield folder


class _OtherCheckpoint(BaseException):
    """A checkpoint was restored whose position the Trainer does not have. No handler in the Trainer catches it."""

    def __init__(self, serial: int) -> None:
        super().__init__(serial)
        self.serial = serial


class _TrainerStateValues:
    """The Trainer's own values: its TrainerState, and the loss since it last logged."""

    def __init__(self, trainer: Trainer, total: int) -> None:
        self._trainer, self._total = trainer, total

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        for one in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(one, ExportableState):
                trainer.state.stateful_callbacks[type(one).__name__] = one.state()
        saved = {"state": json.dumps(dataclasses.asdict(trainer.state)), **_shape_of(trainer, self._total)}
        if hasattr(trainer, "_tr_loss"):
            saved |= {"loss": float(trainer._tr_loss), "last_logged": trainer._globalstep_last_logged}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        if "loss" in saved and hasattr(trainer, "_tr_loss"):
            trainer._tr_loss = torch.tensor(saved["loss"], device=trainer.args.device)
            trainer._total_loss_scalar = -saved["loss"]  # The mean of this call has no earlier steps.
            trainer._globalstep_last_logged = saved["last_logged"]


class _ResumedBatches(IterableDataset):  # type: ignore[type-arg]
    """Yields the batches of a loader. A resumed epoch begins with a placeholder per batch that the Trainer skips.

    The Trainer skips batches by a loader of its own that it builds from a dataset. This dataset lets it skip without
    loading anything, while the wrapped loader continues at its restored position.
    """

    def __init__(self, loader: "DataLoader[Any]", accumulation: int) -> None:
        self.loader = loader
        self.total = len(loader)
        self._accumulation = accumulation
        self._to_skip = self._taken = 0
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        skipped, self._to_skip = self._to_skip, 0
        for self._taken in range(1, skipped + 1):
            yield None
        self._taken = skipped
        self._iterator = iter(self.loader)
        for batch in self._iterator:
            self._taken += 1
            yield batch

    def resume(self, steps: int) -> None:
        """Prepares the next iteration for a Trainer that has made `steps` optimizer steps over all epochs."""
        steps_per_epoch = math.ceil(self.total / self._accumulation)
        self._to_skip = steps % steps_per_epoch * self._accumulation

    def end(self) -> None:
        """Ends an epoch whose batches are all taken, so that its end is saved."""
        if self._iterator is not None and self._taken == self.total:
            next(self._iterator, None)


class _CompleteBatchLoader(DataLoader):  # type: ignore[type-arg]
    """Passes on batches that are complete already."""

    def __init__(self, batches: _ResumedBatches) -> None:
        # A generator of its own: DataLoader draws a seed per iteration, and a resumed run makes one more.
        super().__init__(batches, batch_size=None, generator=torch.Generator())
        self._batches = batches

    def __len__(self) -> int:
        return self._batches.total

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next epoch."""
        sampler = self._batches.loader.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def _loader_of(trainer: Trainer) -> "DataLoader[Any]":
    """Returns the Trainer's DataLoader as it is before Accelerate wraps it, with a sampler that can be resumed."""
    trainer.accelerator.prepare = lambda loader: loader  # Accelerate's loaders fetch ahead.
    try:
        loader: DataLoader[Any] = trainer.get_train_dataloader()
    finally:
        del trainer.accelerator.prepare
    args, dataset = trainer.args, loader.dataset
    if isinstance(dataset, IterableDataset):
        raise TypeError(f"train_dataset is the IterableDataset {type(dataset).__name__}, expected a map-style dataset")
    sampler: Any = loader.sampler
    if type(sampler) in (RandomSampler, SequentialSampler):
        sampler = ResumableSampler(
            dataset,  # type: ignore[arg-type]
            num_replicas=args.world_size,
            rank=args.process_index,
            shuffle=isinstance(sampler, RandomSampler),
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=loader.drop_last,
        )
        object.__setattr__(loader, "sampler", sampler)  # DataLoader refuses it, because iterators would not see it.
        loader.batch_sampler.sampler = sampler  # type: ignore[union-attr]
    elif args.world_size > 1 and not isinstance(sampler, ResumableSampler):
        raise TypeError(
            f"the Trainer's sampler is a {type(sampler).__name__} on {args.world_size} ranks, expected "
            "train_sampling_strategy 'random' or 'sequential', or a drivetrain.data.ResumableSampler"
        )
    return loader


@contextmanager
def _replaced(trainer: Trainer, batches: _ResumedBatches) -> Iterator[None]:
    """Lets the Trainer use `batches`, and leave the model to the Checkpointer, inside of the block."""
    loader = _CompleteBatchLoader(batches)
    trainer.get_train_dataloader = lambda: loader
    trainer._load_from_checkpoint = lambda *_, **__: None
    try:
        yield
    finally:
        del trainer.get_train_dataloader, trainer._load_from_checkpoint


def _shape_of(trainer: Trainer, total: int) -> dict[str, int]:
    """Returns what the Trainer's count of steps depends on."""
    return {
        "number of ranks": trainer.args.world_size,
        "batches per epoch": total,
        "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
    }
