"""Finds the iteration that a training loop repeats, from its optimizers' steps and the batches between them."""

import math
import threading
import weakref
from collections import Counter
from collections.abc import Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from .trace import STEP, Event, StepTrace

_MOST_UNSETTLED = 100  # steps that a plan traces for an optimizer whose first steps take other memory
_MOST_OF_ONE, _MOST = 8, 64  # optimizer steps after which a loop that repeats nothing is cut, with one and with several


class Enough(BaseException):
    """Ends the script after the last step that is needed. Handlers for Exception do not catch it."""


class _Mark(NamedTuple):
    """A place in a trace: the number of its events, operations and blocks so far."""

    events: int
    ops: int
    blocks: int


class _Step(NamedTuple):
    """A call of an optimizer's `step`: the optimizer's number, and the batches since the call before, by loader."""

    optimizer: int
    batches: tuple[tuple[int, int], ...]


class Period:
    """Watches a script, and ends it once its loop has repeated an iteration.

    An iteration is the shortest sequence of steps, with the batches before each, that comes twice in a row. It has a
    step of every optimizer. With batches, it begins when the loop asks for its first one and ends when it asks for the
    next. Without, it ends with the last optimizer step. A loop that repeats nothing within 8 steps, or 64 with several
    optimizers, is cut into iterations with a step of each optimizer that steps. Optimizers whose first steps take other
    memory get more steps before.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._thread = threading.get_ident()
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._optimizers: dict[int, tuple[int, torch.optim.Optimizer]] = {}  # by id: its number, and itself
        self._loaders: list[DataLoader[Any]] = []
        self._steps: list[_Step] = []
        self._begins: list[_Mark] = []  # of each step
        self._ends: list[_Mark] = []
        self._taken: Counter[int] = Counter()  # batches since the last step, by loader
        self._asked: _Mark | None = None  # where the loop asked for the first of them
        self._is_closed = True  # the last step's end is known
        self._length = 0  # steps of an iteration; 0: not known

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return len(self._steps)

    # ---- What the script does.

    def make(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes an optimizer of the script, which an iteration should step."""
        self._made.add(optimizer)

    def ask(self, loader: DataLoader[Any]) -> None:
        """Notes that the loop asks for a batch, which ends an iteration that has stepped."""
        if threading.get_ident() != self._thread:
            return
        self.pause()
        if not self._taken:
            self._asked = self._here()

    def take(self, loader: DataLoader[Any]) -> None:
        """Notes that the loop has got a batch."""
        if threading.get_ident() != self._thread:
            return
        number = next((i for i, known in enumerate(self._loaders) if known is loader), len(self._loaders))
        if number == len(self._loaders):
            self._loaders.append(loader)
        self._taken[number] += 1

    def pause(self) -> None:
        """Notes that the current iteration has ended, if it has stepped."""
        if not self._is_closed:
            self._is_closed = True
            self._ends[-1] = self._here()
        if self._length:
            raise Enough

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes a step of an optimizer."""
        if self._length:
            raise Enough
        number, _ = self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))
        self._begins.append(
            (self._asked if self._taken else None) or (self._ends[-1] if self._ends else _Mark(0, 0, 0))
        )
        self._steps.append(_Step(number, tuple(sorted(self._taken.items()))))
        self._ends.append(self._here())
        self._taken, self._asked, self._is_closed = Counter(), None, False
        self._length = self._found()
        if self._length and not any(step.batches for step in self._steps[-self._length :]):
            raise Enough

    def _here(self) -> _Mark:
        trace = self._trace
        return _Mark(len(trace.events), len(trace.ops), len(trace.blocks))

    # ---- The iteration.

    def _found(self) -> int:
        """Returns the steps of the iteration that has come twice; 0 if none has."""
        steps = self._steps
        made = Counter(step.optimizer for step in steps)
        if any(made[number] < steps_until_settled(each) for number, each in self._optimizers.values()):
            return 0
        count = len(steps) - max((steps_until_settled(each) - 1 for _, each in self._optimizers.values()), default=0)
        is_late = count >= (_MOST_OF_ONE if len(self._made) <= 1 else _MOST)
        if not is_late and any(id(made) not in self._optimizers for made in self._made):
            return 0
        for length in range(1, count // 2 + 1):
            if self._is_whole(length) and steps[-length:] == steps[-2 * length : -length]:
                return length
        return self._shortest() if is_late else 0

    def _is_whole(self, length: int) -> bool:
        return {step.optimizer for step in self._steps[-length:]} == {step.optimizer for step in self._steps}

    def _shortest(self) -> int:
        """Returns the least steps at the end with one of each optimizer, if each has stepped before; otherwise 0."""
        before = len(self._steps)
        for length in range(1, before):
            if self._is_whole(length):
                earlier = {step.optimizer for step in self._steps[:-length]}
                return length if len(earlier) == len({step.optimizer for step in self._steps}) else 0
        return 0

    def cut(self) -> bool:
        """Cuts the trace behind the last whole iteration, and marks where it begins.

        Returns:
            False if the script has not made two.
        """
        length = self._length or self._shortest()
        if not length:
            return False
        trace = self._trace
        window = self._steps[-length:]
        begin, end = self._begins[-length], self._ends[-1]
        trace.events[:] = [*trace.events[: begin.events], Event(STEP, 1), *trace.events[begin.events : end.events]]
        del trace.ops[end.ops :]
        del trace.blocks[end.blocks :]
        trace.num_steps = 2
        batches = sum((Counter(dict(step.batches)) for step in window), Counter[int]())
        trace.period = self._described(window, batches)
        trace.optimizer_steps = length
        trace.recorded_steps = max(1, sum(1 for step in window if step.batches) if batches else length)
        if batches:
            number, count = batches.most_common(1)[0]
            loader = self._loaders[number]
            sampler = loader.batch_sampler
            trace.samples = count * int(getattr(sampler, "batch_size", None) or 0)
            trace.epoch_samples = len(loader.dataset) if isinstance(loader.dataset, Sized) else 0
        return True

    def _described(self, window: list[_Step], batches: Counter[int]) -> str:
        """Returns what an iteration holds, such as "5 batches, 5 steps of Adam, 1 step of SGD"."""
        steps = Counter(step.optimizer for step in window)
        parts = [_counted(count, "batch", "batches") for _, count in sorted(batches.items())]
        for number, optimizer in self._optimizers.values():
            if steps[number]:
                parts.append(f"{_counted(steps[number], 'step', 'steps')} of {type(optimizer).__name__}")
        is_repeated = self._steps[-len(window) :] == self._steps[-2 * len(window) : -len(window)]
        text = ", ".join(parts) + ("" if is_repeated else ", which no other iteration repeats")
        idle = sum(1 for made in self._made if id(made) not in self._optimizers)
        return text + (f"; {_counted(idle, 'optimizer has', 'optimizers have')} not stepped" if idle else "")


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def steps_until_settled(optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of steps after which all steps of an optimizer allocate the same."""
    if isinstance(optimizer, torch.optim.LBFGS):  # its history grows with each evaluation but the first
        group = optimizer.param_groups[0]
        each: int = max(1, min(group["max_iter"], group["max_eval"]))
        return int(min(_MOST_UNSETTLED, 1 + math.ceil((group["history_size"] + 1) / each)))
    if isinstance(optimizer, torch.optim.RAdam):
        return min(
            _MOST_UNSETTLED, max((_until_rectified(group["betas"][1]) for group in optimizer.param_groups), default=1)
        )
    return 1


def _until_rectified(beta: float) -> int:
    """Returns the first step of RAdam at which it divides by the second moment."""
    longest = 2 / (1 - beta) - 1
    for step in range(1, _MOST_UNSETTLED):
        if longest - 2 * step * beta**step / (1 - beta**step) > 5:
            return step
    return 1
