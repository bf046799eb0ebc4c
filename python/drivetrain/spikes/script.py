"""Runs a script from a checkpoint on and records its steps; `drivetrain explain` starts it for every rank."""

import json
import math
import operator
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..data.sampler import in_place_of
from ..planner.period import Enough
from ..planner.shadow import Shadow
from ..trial.script import follow_losses, leave, run_script
from .record import Batch, RecordedSteps, SeenStep
from .search import FEWEST

_SEEN = "_drivetrain_seen"  # an attribute of iterators
_LISTS_OF_FILES = ("samples", "imgs", "files", "filenames", "image_paths", "paths")


class _Iteration:
    """The batches of one iteration over a DataLoader."""

    def __init__(self, loader: int) -> None:
        self.loader, self.count = loader, 0
        self.ahead: deque[Batch] = deque()  # asked for, and not yet taken by the script


class TakenBatches:
    """Notes the batches that this process takes.

    Args:
        replaced: Indices to load in the place of others: by "loader:number" of the batch, by position in it.
    """

    def __init__(self, replaced: Mapping[str, Mapping[str, int]]) -> None:
        self._replaced = replaced
        self._num_iterations = 0
        self._datasets: list[Any] = []
        self._taken: list[Batch] = []
        self.names: dict[str, str] = {}  # of replaced samples, by index

    def begin(self) -> None:
        """Follows all DataLoaders from now on."""
        kind: Any = _BaseDataLoaderIter
        next_index, next_batch, reset = kind._next_index, kind.__next__, kind._reset

        def take_index(iterator: Any) -> Any:
            return self._asked(iterator, next_index(iterator))

        def take_batch(iterator: Any) -> Any:
            batch = next_batch(iterator)
            if ahead := self._of(iterator).ahead:
                taken = ahead.popleft()
                self._taken += [taken] if torch.is_grad_enabled() else []  # no sample of a validation
            return batch

        def begin_again(iterator: Any, *args: Any, **kwargs: Any) -> None:
            vars(iterator).pop(_SEEN, None)
            reset(iterator, *args, **kwargs)

        kind._next_index, kind.__next__, kind._reset = take_index, take_batch, begin_again

    def take(self) -> list[Batch]:
        """Returns the batches taken since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def _of(self, iterator: Any) -> _Iteration:
        if _SEEN not in vars(iterator):
            setattr(iterator, _SEEN, _Iteration(self._num_iterations))
            self._num_iterations += 1
        found: _Iteration = getattr(iterator, _SEEN)
        return found

    def _number_of(self, dataset: Any) -> int:
        for number, known in enumerate(self._datasets):
            if known is dataset:
                return number
        self._datasets.append(dataset)
        return len(self._datasets) - 1

    def _asked(self, iterator: Any, asked: Any) -> Any:
        """Notes the indices that the DataLoader is about to load, and returns those that it shall load."""
        iteration = self._of(iterator)
        is_several = isinstance(asked, list | tuple)
        try:
            indices = [operator.index(one) for one in (asked if is_several else [asked])]
        except TypeError:  # an IterableDataset has none
            indices = []
        iteration.ahead.append(Batch(iteration.loader, iteration.count, self._number_of(iterator._dataset), indices))
        swaps = self._replaced.get(f"{iteration.loader}:{iteration.count}", {})
        iteration.count += 1
        if not swaps:
            return asked
        for position in swaps:
            index = indices[int(position)]
            if (name := name_of(iterator._dataset, index)) is not None:
                self.names[str(index)] = name
        loaded = list(asked) if is_several else [asked]
        for position, donor in swaps.items():
            loaded[int(position)] = in_place_of(loaded[int(position)], donor)
        return loaded if is_several else loaded[0]


def name_of(dataset: Any, index: int) -> str | None:
    """Returns the file of a sample, where the dataset has a list of files, as torchvision's have."""
    if isinstance(dataset, Subset):
        index = operator.index(dataset.indices[index])
        return name_of(dataset.dataset, index) or f"index {index} of the {type(dataset.dataset).__name__}"
    for name in _LISTS_OF_FILES:
        files = getattr(dataset, name, None)
        if isinstance(files, list | tuple) and len(files) == len(dataset):
            file = files[index][0] if isinstance(files[index], list | tuple) and files[index] else files[index]
            return str(file)
    return None


class SpikeRecorder:
    """Records each optimizer step of this process and ends the script after the last that is asked for."""

    def __init__(self, num_steps: int, batches: TakenBatches) -> None:
        self.record = RecordedSteps()
        self.num_steps, self._batches = num_steps, batches
        self._step = SeenStep()

    def begin(self) -> None:
        """Follows backward passes, optimizers and DataLoaders from now on."""
        self._batches.begin()
        follow_losses(lambda losses: self._step.losses.extend(losses))
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def finish(self, error: str) -> None:
        """Ends the record. A script may end by an error of its own before the step that a spike would spoil."""
        self.record.error, self.record.names = error, self._batches.names
        if error and self._step.losses:
            self._end_step()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step.rate = float(optimizer.param_groups[0].get("lr", 0.0))
        self._step.norm = 0.0 if _closure_of(args, kwargs) else _norm_of(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _closure_of(args, kwargs):  # the gradients have come inside of the step
            self._step.norm = _norm_of(optimizer)
        self._end_step()
        if len(self.record.steps) == self.num_steps:
            raise Enough

    def _end_step(self) -> None:
        self._step.batches = self._batches.take()
        self.record.steps.append(self._step)
        self._step = SeenStep()


def _closure_of(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer


@torch.no_grad()
def _norm_of(optimizer: torch.optim.Optimizer) -> float:
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    values = [(one.coalesce().values() if one.is_sparse else one).float() for one in local]
    return math.hypot(*(float(torch.linalg.vector_norm(one)) for one in values))


def _reading(recorder: SpikeRecorder, spike: int | None, is_survey: bool) -> Callable[[ModuleType], None]:
    """Returns what lets a Checkpointer restore and save nothing. It is called with its module.

    spike: It restores the newest checkpoint that has enough steps before this one; None: the newest. A survey goes on
    to this step.
    """

    def stand_in(module: ModuleType) -> None:
        begin_block, survey, tiers = module.Checkpointer.__enter__, module.Store.survey, module.Tiers.__init__

        def enter(checkpointer: Any) -> Any:
            begin_block(checkpointer)
            recorder.record.restored = max(recorder.record.restored, checkpointer.steps)
            if spike is not None and is_survey:
                recorder.num_steps = max(recorder.num_steps, spike - checkpointer.steps)
            return checkpointer

        def earlier(store: Any) -> Any:
            found = survey(store)
            if spike is None:
                return found
            early = [one for one in found.complete if one.step + FEWEST < spike]
            return found._replace(complete=early or [one for one in found.complete if one.step < spike])

        def begin_save(saver: Any, step: int, _: Any) -> None:
            saver.begun_step, saver.saved_step, saver.began_at = step, step, time.monotonic()
            saver.checkpoint = SimpleNamespace(path=saver.store.directory / f"step-{step:010}", step=step)

        module.Checkpointer.__enter__, module.Store.survey = enter, earlier
        module.Saver.begin = begin_save
        module.Tiers.__init__ = lambda self, _, ranks: tiers(self, (), ranks)
        module.Tiers.check_new = lambda _: None  # without an earlier checkpoint the script begins from scratch

    return stand_in


def main(task: dict[str, Any]) -> NoReturn:
    """Runs a script as `task` says, writes the record and ends the process.

    Args:
        task: As for `run_script` and `leave`, and "steps", "replaced" as `TakenBatches` takes it, and the file
            "record". If "spike" is not None, it is the step that spikes, which a run with "is_survey" reaches.
    """
    batches = TakenBatches(task["replaced"])
    recorder = SpikeRecorder(task["steps"], batches)
    shadow = Shadow(task["folder"], "a script whose spike is explained")
    stand_in = _reading(recorder, task["spike"], task["is_survey"])
    checkpointer = {"drivetrain.checkpointing.checkpointer": stand_in}
    recorder.finish(run_script(task, shadow, recorder.begin, checkpointer)[0])
    with shadow.lifted():
        Path(task["record"]).write_bytes(pickle.dumps(asdict(recorder.record)))
        leave(task, waits=not recorder.record.error)


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
