"""Describes what a training step computes, allocates and frees: its operations, its memory blocks, and their order."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Phase = Literal["forward", "backward", "optimizer"]
Category = Literal[
    "parameters", "gradients", "optimizer states", "buffers", "inputs", "activations", "temporary", "host"
]

ALLOC, FREE, OP, STEP = range(4)  # kinds of events


class Event(NamedTuple):
    """An event of a step. `subject` is a block for ALLOC and FREE, an operation for OP, the step's number for STEP."""

    kind: int
    subject: int


@dataclass
class Block:
    """A storage that a step uses.

    Attributes:
        num_bytes: Its size.
        category: Its purpose; "host": it is not on the planned device.
        op: The operation that allocated it; -1: it existed before the step.
        parameter: The index of the parameter that it belongs to, as value, gradient or state; -1: to none.
        name: The name of the parameter, or the shape and dtype of the first tensor in it.
    """

    num_bytes: int
    category: Category
    op: int = -1
    parameter: int = -1
    name: str = ""


class TensorSpec(NamedTuple):
    """The layout of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


class Operand(NamedTuple):
    """The position of a tensor argument: its block, -1 for none, and its first element's index there."""

    block: int
    offset: int


class Signature(NamedTuple):
    """An operation and its flattened arguments: TensorSpecs, numbers and other plain values."""

    op: Any
    arguments: tuple[Any, ...]
    structure: Any


@dataclass
class OpCall:
    """A call of an operation.

    Attributes:
        name: Its name, such as "aten::mm".
        module: The module that called it, or whose forward made its node of the graph.
        phase: The phase of the step.
        is_recomputation: True if backward ran it to recompute a part of forward.
        flops: Floating-point operations of matrix products, convolutions and attention; 0 for others.
        num_bytes: Bytes of tensors that it reads and writes; 0 for views.
        dtype: The dtype of its results, such as "float32".
        reads: Blocks of its arguments.
        writes: Blocks of its results.
        signature: An index into StepTrace.signatures; -1: a view, or an operation that runs natively.
        operands: The positions of its tensor arguments, in the order of the signature's.
        results: The block of each tensor that it returns.
    """

    name: str
    module: str
    phase: Phase
    is_recomputation: bool
    flops: float
    num_bytes: int
    dtype: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    signature: int
    operands: tuple[Operand, ...] = ()
    results: tuple[int, ...] = ()


@dataclass
class ParameterInfo:
    """The facts about a parameter that a plan needs, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool
    num_bytes: int


@dataclass
class StepTrace:
    """Two or more training steps, as they would run on a device.

    Attributes:
        parameters: Parameters of the model, each once.
        blocks: All storages. Those with `op` -1 existed before.
        ops: All calls, in order.
        events: Allocations, frees and calls, in order. STEP begins each step.
        signatures: Distinct operations with their arguments.
        num_steps: Number of traced steps.
        optimizers: Names of the optimizers' classes that stepped.
        notes: Descriptions of the operations that the trace leaves out.
        period: Contents of an iteration of a script's loop, such as "1 batch, 1 step of SGD"; "": no script.
        optimizer_steps: The calls of optimizers' `step` in such an iteration.
        recorded_steps: The steps that `drivetrain.Monitor` counts in such an iteration.
        changes: Files, programs and servers that the script would have changed, started or reached.
        samples: Samples that the last step took from a script's DataLoader; 0: not known.
        epoch_samples: Samples of that DataLoader's data set; 0: not known.
        num_threads: Threads of torch's operations.
    """

    parameters: list[ParameterInfo] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    ops: list[OpCall] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    num_steps: int = 0
    optimizers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    period: str = ""
    optimizer_steps: int = 1
    recorded_steps: int = 1
    changes: list[str] = field(default_factory=list)
    samples: int = 0
    epoch_samples: int = 0
    num_threads: int = 1

    def begin_of_last_step(self) -> int:
        """Returns the index of the event that begins the last step."""
        return max(i for i, event in enumerate(self.events) if event.kind == STEP)

    def last_step(self) -> list[OpCall]:
        """Returns the calls of the last step, in which optimizer states exist already."""
        return [self.ops[event.subject] for event in self.events[self.begin_of_last_step() :] if event.kind == OP]

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    def bytes_of(self, category: Category) -> int:
        """Returns the bytes of all blocks of a category."""
        return sum(block.num_bytes for block in self.blocks if block.category == category)
