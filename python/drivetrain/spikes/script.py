"""Runs a script from a checkpoint on and records its steps; `drivetrain explain` starts it for every rank."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..planner.period import Enough
from ..planner.shadow import Shadow
from ..trial.script import follow_losses, leave, run_script
from .batches import TakenBatches
from .record import RecordedSteps, SeenStep
from .search import FEWEST


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
        Path(task["record"]).write_text(json.dumps(asdict(recorder.record)))
        leave(task, waits=not recorder.record.error)


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
