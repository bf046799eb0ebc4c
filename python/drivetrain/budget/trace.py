"""Profiles training steps of a model, and describes them as a trace.

A trace has the operations of a forward pass, the values that they make, and the use of these values by backward.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _C
from . import compiled, progress
from .retry import first_line, is_out_of_memory

_DOES_NOT_TRAIN = (
    "step_fn did not call the model with gradients on, or ran no backward. It must run forward, loss and backward of "
    "one training step on the model that was given, or on a wrapper of it. If it skips a batch that does not fit into "
    "memory, have it raise that error instead"
)
# A possible cause only, as Dynamo does not tell whether step_fn called a compiled function.
_INSIDE_COMPILED = (
    ". If step_fn calls the model inside of a function that torch.compile made, its operations cannot be recorded. "
    "Compile the model (`model.compile()`, `torch.compile(model)`) or its blocks (`block.compile()`) instead of the "
    "function around it, and call activation_budget on that model"
)
# A policy has one of these per value, or 1 + the index of a storage format.
RECOMPUTE, SAVE = -1, 0
# The storage formats of values besides the unchanged one: their names for users, and their numbers in the recorder.
STORAGE_FORMATS = {"bits": 1, "bfloat16": 2, "int8": 3, "host": 4}
_MOST_RUNS = 16  # of a profiled step


class FormatCost(NamedTuple):
    """The size of a value in one storage format (a number of STORAGE_FORMATS), and the seconds to convert it there and
    back."""

    storage_format: int
    num_bytes: int
    seconds: float


class TracedValue(NamedTuple):
    """A value of a pass. `replaces` is the value whose memory the operation wrote over, or -1."""

    num_bytes: int
    can_keep: bool
    can_recompute: bool
    replaces: int
    formats: list[FormatCost]


class TracedOp(NamedTuple):
    """An operation of a pass, with the values that it reads and writes. `seconds` is None if it was not re-executed;
    `module` is an index into Trace.modules, or -1."""

    name: str
    module: int
    seconds: float | None
    reads: list[int]
    writes: list[int]


class AutogradSave(NamedTuple):
    """Autograd saves a value during an operation of the pass; value -1 is a tensor that existed before."""

    op: int
    value: int


class BackwardUse(NamedTuple):
    """Backward takes a value, or autograd frees it (is_release)."""

    value: int
    is_release: bool


# As `_C.activation_solve` takes them: bytes, can_keep, can_recompute, replaces, and the bytes and the seconds of each
# storage format; seconds, reads and writes. Values are counted over all passes.
_SolverValue = tuple[int, bool, bool, int, list[tuple[int, float]]]
_SolverOp = tuple[float, list[int], list[int]]


@dataclasses.dataclass
class Pass:
    """One forward pass. Its values and operations are numbered in the order of the pass."""

    ops: list[TracedOp]
    values: list[TracedValue]
    saves: list[AutogradSave] = dataclasses.field(default_factory=list)
    arguments: list[int] = dataclasses.field(default_factory=list)  # per operation, a hash of the tensors it was given

    @property
    def made(self) -> set[int]:
        """The values that operations of this pass made."""
        return {value for op in self.ops for value in op.writes}


@dataclasses.dataclass
class Trace:
    """The passes of a step that wait for backward together. Values are numbered over all passes in a row.

    Attributes:
        passes: in the order of forward.
        uses: in the order of backward.
        modules: the names of the model's modules.
    """

    passes: list[Pass]
    uses: list[BackwardUse]
    modules: list[str]

    def passes_at(self) -> Iterator[tuple[int, Pass]]:
        """Yields each pass after the number of its first value."""
        begins = itertools.accumulate((len(one.values) for one in self.passes), initial=0)
        return zip(begins, self.passes, strict=False)

    @property
    def keeping_everything(self) -> list[int]:
        """The policy that keeps all values that can be kept."""
        return [SAVE if value.can_keep else RECOMPUTE for one in self.passes for value in one.values]

    def has_storage_format(self, storage_format: int) -> bool:
        """Returns whether any value was measured in that format."""
        costs = (cost for one in self.passes for value in one.values for cost in value.formats)
        return any(cost.storage_format == storage_format for cost in costs)

    def for_solver(
        self, seconds_of: Callable[[int, int, float], float] | None = None
    ) -> tuple[list[_SolverValue], list[_SolverOp], list[BackwardUse]]:
        """Returns the values, operations and uses that `_C.activation_solve` takes. An operation before all others
        makes the values that autograd saves without a recorded operation having made them.

        Args:
            seconds_of: Maps a value, a storage format and its measured seconds to the seconds that the solver uses.
        """
        values: list[_SolverValue] = []
        unmade: list[int] = []
        ops: list[_SolverOp] = [(0.0, [], unmade)]
        for begin, one in self.passes_at():
            made = one.made
            for index, value in enumerate(one.values):
                if index not in made:
                    unmade.append(begin + index)
                base = value.replaces + begin if value.replaces >= 0 and index in made else -1
                formats = [
                    (
                        cost.num_bytes,
                        seconds_of(begin + index, cost.storage_format, cost.seconds) if seconds_of else cost.seconds,
                    )
                    for cost in value.formats
                ]
                can_recompute = value.can_recompute and index in made
                values.append((value.num_bytes, value.can_keep, can_recompute, base, formats))
            for op in one.ops:
                reads, writes = ([begin + value for value in numbers] for numbers in (op.reads, op.writes))
                ops.append((op.seconds or 0.0, reads, writes))
        return values, ops, self.uses

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Trace":
        return cls(
            [_pass_of(one) for one in plain["passes"]],
            [BackwardUse(*use) for use in plain["uses"]],
            plain["modules"],
        )


def profile(
    model: nn.Module,
    step_fn: Callable[[], object],
    storage_formats: Sequence[int] = (),
    pool: _C.OffloadPool | None = None,
) -> tuple[Trace, int]:
    """Profiles a training step in one run, which needs about the memory that checkpointing of blocks would need.

    Forward calls each operation twice, to check that it is deterministic. Backward recomputes what it needs, which
    times the operations. If an operation returns other values there than in forward, an exception that handlers for
    `Exception` do not catch ends the step. It runs again without recomputing operations of that kind.

    Args:
        model: The model that step_fn trains.
        step_fn: Runs forward, loss and backward of one training step.
        storage_formats: The numbers of the storage formats to measure; see STORAGE_FORMATS.
        pool: The host memory for offloaded values, or None.

    Returns:
        The trace, and the peak in bytes of the tensors that a step keeps for backward if it keeps everything.

    Raises:
        RuntimeError: step_fn ran no forward pass of the model with gradients enabled, or no backward. Or too many kinds
            of operations returned other values in backward.
        torch.OutOfMemoryError: The step did not fit into memory.
    """
    try:
        tapes = _profiled(model, step_fn, storage_formats, pool)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            "activation_budget: the step does not fit into memory, although the profile keeps few tensors for "
            "backward. Profile a part of the batch with the same part of the budget. Bytes grow with the batch, and "
            f"the plan holds for any batch size. ({first_line(error)})"
        ) from error
    uses = [use for tape in tapes for use in tape["uses"]]
    if not tapes or (uses and all(is_release for _, is_release, _ in uses)):
        is_compiled = not tapes and compiled.anything_is_compiled()
        raise RuntimeError(_DOES_NOT_TRAIN + (_INSIDE_COMPILED if is_compiled else ""))
    tapes = _largest(tapes)
    trace = Trace([_pass_of(tape) for tape in tapes], [], [name for name, _ in model.named_modules()])
    begins = [begin for begin, _ in trace.passes_at()]
    in_order = sorted(
        (order, begin + value, is_release)
        for begin, tape in zip(begins, tapes, strict=True)
        for value, is_release, order in tape["uses"]
    )
    trace.uses = [BackwardUse(value, is_release) for _, value, is_release in in_order]
    peak: int = _C.activation_simulate(*trace.for_solver(), trace.keeping_everything)["peak_bytes"]
    return trace, peak


def _profiled(
    model: nn.Module, step_fn: Callable[[], object], storage_formats: Sequence[int], pool: _C.OffloadPool | None
) -> list[dict[str, Any]]:
    """Runs the step until backward recomputes the same values as forward, and returns its tapes.

    A tape has a pass, its "uses", and in "begin" the order of the first use that could belong to it.
    """
    progress.tell("runs a step, and its forward once more, operation by operation")
    recorder = _C.ActivationRecorder(is_profile=True)
    recorder.set_formats(storage_formats, pool, 0)
    with Recording(model, recorder, names=True):
        for _ in range(_MOST_RUNS):
            try:
                step_fn()
                tapes = recorder.take_tapes()
            except _C.ActivationProfileEnded:
                tapes = None
            except BaseException:
                recorder.abandon()  # the caller may still hold the graph
                raise
            if tapes is not None and not any(tape["has_failed"] for tape in tapes):  # step_fn may have caught it
                return tapes
            recorder.abandon()
            progress.tell("runs the step again: an operation returned other values in backward than in forward")
    raise RuntimeError(
        f"activation_budget: in each of {_MOST_RUNS} runs of the step, another kind of operation returned other values "
        "when backward recomputed it. Parameters, buffers and inputs must not change between forward and backward"
    )


def _pass_on_higher_order_operators() -> None:
    """Makes torch.cond, scan and other higher-order operators bypass the recorder, which records what they call.

    torch's dispatcher has no fallback for them.
    """
    from torch import _ops

    key = torch._C._parse_dispatch_key(_C.activation_recorder_key())
    later: list[Any] = getattr(_ops, "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", [])
    if key in later:
        return
    later.append(key)
    for operator_of_torch in _ops._higher_order_ops.values():
        operator_of_torch.fallthrough(key)


class Recording:
    """Records every outermost forward pass of the model, as a context manager.

    With `names`, it also tells the recorder which module calls each operation.
    """

    def __init__(self, model: nn.Module, recorder: _C.ActivationRecorder, *, names: bool = False) -> None:
        _pass_on_higher_order_operators()
        self._recorder = recorder
        recorder.set_model(model)
        inside = compiled.regions_inside(model) if names else set()
        named = [(index, module) for index, module in enumerate(model.modules()) if names and module not in inside]
        self._calls = [_C.ActivationCall(recorder, module, index) for index, module in named]
        self._calls.append(_C.ActivationCall(recorder, model))

    def __enter__(self) -> "Recording":
        for call in self._calls:
            call.install()
        return self

    def __exit__(self, *_: object) -> None:
        for call in reversed(self._calls):
            call.remove()
        self._recorder.stop()


def _pass_of(plain: dict[str, Any]) -> Pass:
    """Builds a pass from the tuples or lists of the recorder or of a saved plan."""
    values = [TracedValue(*value) for value in plain["values"]]
    return Pass(
        [TracedOp(*op) for op in plain["ops"]],
        [value._replace(formats=[FormatCost(*cost) for cost in value.formats]) for value in values],
        [AutogradSave(*save) for save in plain["saves"]],
        list(plain["arguments"]),
    )


def _largest(tapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups passes that waited for backward together (micro-batches), and returns the group with the most bytes."""
    groups: list[list[dict[str, Any]]] = []
    end = -1
    for tape in sorted(tapes, key=operator.itemgetter("begin")):
        if tape["begin"] > end:
            groups.append([])
        groups[-1].append(tape)
        end = max([end, *(order for _, _, order in tape["uses"])])
    return max(groups, key=lambda group: sum(num_bytes for tape in group for num_bytes, *_ in tape["values"]))
