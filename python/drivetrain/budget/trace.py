"""What profiled steps say of a model: the operations of a forward pass, the values they make, and backward's use of
them."""

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .. import _C
from . import compiled, progress
from .retry import Undo, first_line, is_out_of_memory

_DOES_NOT_TRAIN = (
    "step_fn did not call the model with gradients on, or ran no backward: it must run forward, loss and backward of "
    "one training step on the model that was given, or on a wrapper of it. If it skips a batch that does not fit into "
    "memory, have it raise that error instead"
)

_INSIDE_COMPILED = (
    ". If step_fn calls the model inside of a function that torch.compile made, its operations cannot be recorded: "
    "compile the model (`model.compile()`, `torch.compile(model)`) or its blocks (`block.compile()`) instead of the "
    "function around it, and call activation_budget on that model"
)


def _does_not_train(has_no_pass: bool) -> str:
    """Says why a profile has nothing to go by. Dynamo leaves our hooks out of what it compiles, and does not tell which
    of the process's compiled functions step_fn called, so compiling is named as a possible cause only."""
    return _DOES_NOT_TRAIN + (_INSIDE_COMPILED if has_no_pass and compiled.anything_is_compiled() else "")


# How values can be kept besides as they are, for the recorder, by the name of each for people.
FORMS = {"bits": 1, "bfloat16": 2, "int8": 3, "host": 4}
_Purpose = Literal["profile", "frugal profile", "timings"]  # of a recorder
_INPUT = -1  # in place of a value: was there before the pass
# Bytes, whether it can be kept, whether it can be forgotten, what it is written over, and further forms that it can be
# kept in: which, bytes, and seconds there and back.
Value = tuple[int, bool, bool, int, list[tuple[int, int, float]]]
# Name, module, seconds (None: is not called again), values read, values written.
Op = tuple[str, int, float | None, list[int], list[int]]


@dataclasses.dataclass
class Pass:
    """One forward pass."""

    ops: list[Op]
    values: list[Value]
    saves: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # by autograd: in which operation, a value
    arguments: list[int] = dataclasses.field(default_factory=list)  # per operation, a hash of what it was called with

    @property
    def made(self) -> set[int]:
        """The values that an operation of this pass made."""
        return {value for op in self.ops for value in op[4]}


@dataclasses.dataclass
class Trace:
    """A step's passes that wait for backward together, as one: the values of all in a row."""

    passes: list[Pass]
    uses: list[tuple[int, bool]]  # in the order of backward: a value is taken, or (True) given back
    modules: list[str]
    has_one_path: bool = True  # every profiled step did the same
    is_estimated: bool = False  # the uses: in the reverse of the order in which forward saved

    def passes_at(self) -> Iterator[tuple[int, Pass]]:
        """Each pass, with its first value's place in the row."""
        begins = itertools.accumulate((len(one.values) for one in self.passes), initial=0)
        return zip(begins, self.passes, strict=False)

    def has_path_of(self, other: "Trace") -> bool:
        """Whether the same operations made as many values, pass by pass."""

        def path(trace: Trace) -> list[Any]:
            return [([(op[0], op[4]) for op in one.ops], len(one.values)) for one in trace.passes]

        return path(self) == path(other)

    def saves_without_hooks(self, begin: int, one: Pass, as_they_are: set[int]) -> dict[int, set[int]]:
        """The operations of a pass, whose first value is at `begin`, in which autograd saves nothing but values that
        are kept as they are and what was there before, with what they save. Not among them: those that save the value
        which backward gives back last, for its hooks have the tape and say that the pass still waits; and operations
        that are not torch's own, inside which there may be hooks of others."""
        given_back = (value - begin for value, is_release in reversed(self.uses) if is_release)
        last = next((value for value in given_back if 0 <= value < len(one.values)), None)
        if last is None:
            return {}
        saved: dict[int, set[int]] = {}
        for op, value in one.saves:
            saved.setdefault(op, set()).add(value)
        unhooked = as_they_are - {last} | {_INPUT}
        return {
            op: values - {_INPUT}
            for op, values in saved.items()
            if values <= unhooked and op < len(one.ops) and one.ops[op][0].startswith("aten::")
        }

    def for_solver(
        self, seconds_of: Callable[[int, int, float], float] | None = None
    ) -> tuple[list[Any], list[Any], list[tuple[int, bool]]]:
        """The values, operations and uses that `_C.activation_solve` takes. What nobody was seen to make but autograd
        keeps is made by an operation before all.

        seconds_of: of a value's place, a form of it and that form's measured seconds, makes the seconds to go by.
        """
        values: list[Any] = []
        ops: list[tuple[float, list[int], list[int]]] = [(0.0, [], [])]
        for begin, one in self.passes_at():
            made = one.made
            for index, (num_bytes, can_keep, can_forget, replaces, forms) in enumerate(one.values):
                if index not in made:
                    ops[0][2].append(begin + index)
                base = replaces + begin if replaces >= 0 and index in made else -1
                ways = [
                    (form_bytes, seconds_of(begin + index, form, seconds) if seconds_of else seconds)
                    for form, form_bytes, seconds in forms
                ]
                values.append((num_bytes, can_keep, can_forget and index in made, base, ways))
            for _, _, seconds, reads, writes in one.ops:
                ops.append((seconds or 0.0, [begin + read for read in reads], [begin + write for write in writes]))
        return values, ops, self.uses

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Trace":
        passes = [
            Pass(
                [(op[0], op[1], op[2], op[3], op[4]) for op in one["ops"]],
                [
                    (value[0], value[1], value[2], value[3], [(form[0], form[1], form[2]) for form in value[4]])
                    for value in one["values"]
                ],
                [(op, value) for op, value in one["saves"]],
                one["arguments"],
            )
            for one in plain["passes"]
        ]
        return cls(
            passes,
            [(value, is_release) for value, is_release in plain["uses"]],
            plain["modules"],
            plain["has_one_path"],
            plain.get("is_estimated", False),
        )


def profile(
    model: nn.Module,
    step_fn: Callable[[], object],
    forms: Sequence[int] = (),
    pool: _C.OffloadPool | None = None,
    *,
    is_short: bool = False,
) -> tuple[Trace, int]:
    """Runs the step with everything kept, each forward pass once more for the bits and the time of each operation, and
    of keeping what is saved in each of the forms; then once more, with what backward asks for computed again when it
    does, for the time that takes there. Where that does not fit into memory: up to its backward, with nothing kept.

    is_short: one step does, with times of forward.

    Returns:
        the trace, and the peak in bytes of what was kept, or would have been.

    Raises:
        RuntimeError: no step went through the model with gradients on and back.
        torch.OutOfMemoryError: that did not fit either; says what to do.
    """
    undo = Undo(model)
    try:
        return _profile_whole(model, step_fn, forms, pool, is_short)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    undo()  # not in the handler: there, the error has all that the step had
    try:
        return _profile_frugally(model, step_fn, forms, pool)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            "activation_budget: a step with everything kept did not fit, and forward with nothing kept did not either. "
            "Profile a part of the batch with the same part of the budget: bytes grow with the batch, and the plan "
            f"holds for any batch size. ({first_line(error)})"
        ) from error
    finally:
        undo()


def _profile_whole(
    model: nn.Module, step_fn: Callable[[], object], forms: Sequence[int], pool: _C.OffloadPool | None, is_short: bool
) -> tuple[Trace, int]:
    if not is_short:
        progress.tell("runs a step with everything kept, and its forward once more, operation by operation")
    trace, peak = _profile_step(model, step_fn, forms, pool, "profile")
    if is_short:
        return trace, peak
    progress.tell("runs a step to time what backward would recompute")
    timed, peak_of_timed = _profile_step(model, step_fn, forms, pool, "timings")
    peak = max(peak, peak_of_timed)
    if trace.has_path_of(timed):
        return _with_times_of(timed, trace), peak
    progress.tell("runs a step with everything kept again: the two took different paths")
    trace, peak_of_last = _profile_step(model, step_fn, forms, pool, "profile")
    trace.has_one_path = False
    return trace, max(peak, peak_of_last)


def _profile_step(
    model: nn.Module,
    step_fn: Callable[[], object],
    forms: Sequence[int],
    pool: _C.OffloadPool | None,
    purpose: _Purpose,
) -> tuple[Trace, int]:
    with _recorded(model, forms, pool, purpose) as recorder:
        step_fn()
        peak, tapes = recorder.peak_bytes, recorder.take_tapes()
    saves_anything = any(tape["uses"] for tape in tapes)
    takes_anything = any(not is_release for tape in tapes for _, is_release, _ in tape["uses"])
    if not tapes or (saves_anything and not takes_anything):
        raise RuntimeError(_does_not_train(not tapes))
    return _joined(_largest(tapes), [name for name, _ in model.named_modules()]), peak


def _profile_frugally(
    model: nn.Module, step_fn: Callable[[], object], forms: Sequence[int], pool: _C.OffloadPool | None
) -> tuple[Trace, int]:
    progress.tell("runs a forward with nothing kept: a step with everything kept did not fit")
    has_ended = False
    with _recorded(model, forms, pool, "frugal profile") as recorder:
        try:
            step_fn()
        except _C.ActivationProfileEnded:
            has_ended = True
    tapes = recorder.take_tapes()
    if has_ended and not tapes:
        raise torch.OutOfMemoryError("forward itself runs a backward, for which everything must be kept")
    if not has_ended:
        raise RuntimeError(_does_not_train(not tapes))
    trace = Trace(
        [_pass_of(tape) for tape in tapes], [], [name for name, _ in model.named_modules()], is_estimated=True
    )
    num_bytes = 0
    for begin, one in reversed(list(trace.passes_at())):
        num_bytes += sum(one.values[value][0] for value in {value for _, value in one.saves if value >= 0})
        for _, saves in itertools.groupby(reversed(one.saves), key=operator.itemgetter(0)):
            values = [begin + value for _, value in saves if value >= 0]
            trace.uses += [(value, is_release) for is_release in (False, True) for value in values]
    return trace, num_bytes


@contextlib.contextmanager
def _recorded(
    model: nn.Module, forms: Sequence[int], pool: _C.OffloadPool | None, purpose: _Purpose
) -> Iterator[_C.ActivationRecorder]:
    recorder = _C.ActivationRecorder(purpose)
    recorder.set_forms(forms, pool, 0)
    with _Naming(model, recorder), Recording(model, recorder):
        try:
            yield recorder
        except BaseException:
            recorder.abandon()  # somebody may still have the graph
            raise


class Recording:
    """Has every outermost forward pass of the model recorded."""

    def __init__(self, model: nn.Module, recorder: _C.ActivationRecorder) -> None:
        self._recorder = recorder
        recorder.set_model(model)
        self._call = _C.ActivationCall(recorder, model)

    def __enter__(self) -> "Recording":
        self._call.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._call.remove()
        self._recorder.stop()


class _Naming:
    """Tells the recorder in which module each operation is."""

    def __init__(self, model: nn.Module, recorder: _C.ActivationRecorder) -> None:
        inside = compiled.regions_inside(model)
        self._calls = [
            _C.ActivationCall(recorder, module, index)
            for index, module in enumerate(model.modules())
            if module not in inside
        ]

    def __enter__(self) -> None:
        for call in self._calls:
            call.install()

    def __exit__(self, *_: object) -> None:
        for call in self._calls:
            call.remove()


def _largest(tapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of passes in a row (micro-batches), those that waited for backward together and keep the most."""
    groups: list[list[dict[str, Any]]] = []
    end = -1
    for tape in sorted(tapes, key=lambda tape: tape["begin"]):
        if tape["begin"] > end:
            groups.append([])
        groups[-1].append(tape)
        end = max([end, *(order for _, _, order in tape["uses"])])
    return max(groups, key=lambda group: sum(value[0] for tape in group for value in tape["values"]))


def _joined(tapes: list[dict[str, Any]], modules: list[str]) -> Trace:
    trace = Trace([_pass_of(tape) for tape in tapes], [], modules)
    uses: list[tuple[int, int, bool]] = []
    for (begin, _), tape in zip(trace.passes_at(), tapes, strict=True):
        uses += [(order, begin + value, is_release) for value, is_release, order in tape["uses"]]
    trace.uses = [(value, is_release) for _, value, is_release in sorted(uses)]
    return trace


def _pass_of(tape: dict[str, Any]) -> Pass:
    return Pass(list(tape["ops"]), list(tape["values"]), list(tape["saves"]), list(tape["arguments"]))


def _with_times_of(timed: Trace, trace: Trace) -> Trace:
    """The timed one, with what the other, of the same path, knows besides."""
    for one, other in zip(timed.passes, trace.passes, strict=True):
        one.ops = [
            (mine[0], mine[1], theirs[2] if mine[2] is None else mine[2], mine[3], mine[4])
            for mine, theirs in zip(one.ops, other.ops, strict=True)
        ]
        one.values = [
            (mine[0], mine[1], mine[2] and theirs[2], mine[3], theirs[4] if mine[0] == theirs[0] else [])
            for mine, theirs in zip(one.values, other.values, strict=True)
        ]
    return timed
