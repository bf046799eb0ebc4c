"""Runs a window of accumulate() as parts, one per logical rank, from equal buffers and with own random streams."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...grad import main_grads
from ...optim.engine import is_capturing
from . import random_streams
from .random_streams import Use

_MOST = 1024  # csrc/ddp/transport/rank_sum.h has as many
_REFUSED = (
    "wire_dtype",
    "expert_groups",
    "mixed_precision",
    "check_gradients",
    "static_graph",
    "skip_all_reduce_unused_params",
    "delay_all_reduce_named_params",
)


class LogicalRanks:
    """The number and the random streams of a wrapper's logical ranks.

    Args:
        count: Their number.
        seed: Chooses their random streams.

    Attributes:
        windows: Steps so far.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.windows = 0
        self._own: Any = None  # this process's random states, while a block of windows uses others

    @property
    def is_open(self) -> bool:
        """Returns True inside of a block of windows."""
        return self._own is not None

    def state_dict(self) -> dict[str, int]:
        """Returns what a checkpoint needs, which is equal on all ranks."""
        return {"count": self.count, "seed": self.seed, "windows": self.windows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues the streams of a checkpoint.

        Raises:
            ValueError: The checkpoint has another number of logical ranks.
        """
        if state["count"] != self.count:
            raise ValueError(f"logical_ranks is {self.count}, expected {state['count']} as in the checkpoint")
        self.seed, self.windows = state["seed"], state["windows"]

    def open(self) -> None:
        """Begins a block of windows."""
        if self.is_open:
            raise RuntimeError("drivetrain.accumulate() is open already for this model: leave its block first.")
        _refuse_capture()
        self._own = random_streams.states()

    def close(self) -> None:
        """Gives this process its own random states back."""
        if self.is_open:
            random_streams.restore(self._own)
        self._own = None

    @contextmanager
    def own_random_states(self) -> Iterator[None]:
        """Brings back this process's own random states for a moment, for a checkpoint."""
        if not self.is_open:
            yield
            return
        of_part = random_streams.states()
        random_streams.restore(self._own)
        try:
            yield
        finally:
            random_streams.restore(of_part)

    def begin_stream(self, use: Use, logical_rank: int) -> None:
        """Begins a stream of the current window."""
        _refuse_capture()
        random_streams.begin(use, self.seed, logical_rank, self.windows)


def _refuse_capture() -> None:
    if is_capturing():
        raise NotImplementedError(
            "windows with logical_ranks cannot be captured into a CUDA graph, which would repeat their weights: "
            "capture the forward pass alone, with torch.cuda.make_graphed_callables."
        )


def check(count: int | None, given: Mapping[str, Any]) -> None:
    """Checks the argument `logical_ranks` of DistributedDataParallel, and the other arguments in `given`.

    Raises:
        ValueError: It is no power of two.
        NotImplementedError: Another argument does not go together with it.
    """
    if count is None:
        return
    if not isinstance(count, int) or not 1 <= count <= _MOST or count & (count - 1):
        raise ValueError(f"logical_ranks is {count!r}, expected a power of two from 1 to {_MOST}, or None.")
    for name in _REFUSED:
        if given.get(name):
            raise NotImplementedError(f"{name} does not go together with logical_ranks: leave one of the two out.")
    if not given.get("init_sync", True):
        raise NotImplementedError("init_sync=False does not go together with logical_ranks: leave one of the two out.")


def of(wrapper: Any) -> LogicalRanks | None:
    """Returns the wrapper's logical ranks."""
    found: LogicalRanks | None = wrapper.__dict__.get("_logical")
    return found


def begin(wrapper: Any, count: int | None) -> LogicalRanks | None:
    """Returns the logical ranks of a new wrapper. Every rank must call it.

    Raises:
        NotImplementedError: The model has something that logical ranks do not support.
    """
    if count is None:
        return None
    why = ""
    if wrapper._use_python_reducer:
        why = "torch._dynamo.config.optimize_ddp = 'python_reducer'"
    elif any(wrapper.reducer.sparse):
        why = "sparse gradients"
    elif any(main_grads.is_kept(param) for _, param in wrapper.reducer.named_parameters()):
        why = "main_grads()"
    elif not wrapper.broadcast_buffers and any(True for _ in wrapper.module.buffers()):
        why = "broadcast_buffers=False for a module with buffers"
    if why:
        raise NotImplementedError(f"logical_ranks does not go together with {why}: leave one of the two out.")
    seed = torch.tensor([torch.initial_seed() % 2**63], device=wrapper.device)
    dist.broadcast(seed, dist.get_global_rank(wrapper.process_group, 0), group=wrapper.process_group)
    return LogicalRanks(count, int(seed))


def refuse(wrapper: Any, what: str) -> None:
    """Raises NotImplementedError if the wrapper has logical ranks, which `what` does not support."""
    if of(wrapper) is not None:
        raise NotImplementedError(f"{what} does not go together with logical_ranks: leave one of the two out.")


def check_in_window(wrapper: Any) -> None:
    """Raises ValueError if the wrapper has logical ranks and no block of windows is open."""
    if (logical := of(wrapper)) is not None and not logical.is_open:
        raise ValueError(
            "DistributedDataParallel with logical_ranks takes weights inside of drivetrain.accumulate() only: write "
            "window.backward(loss, weight=...)."
        )


class Parts:
    """The parts that a rank runs of each window of accumulate(). Without logical ranks there is one.

    Args:
        wrapper: The model's wrapper, or None.
        steps: Micro-batches per part.
    """

    def __init__(self, wrapper: Any, steps: int) -> None:
        self._wrapper, self._steps = wrapper, steps
        self._logical = None if wrapper is None else of(wrapper)
        self._count, self._first = 1, 0  # the number of parts, and the first logical rank
        if self._logical is not None:
            group = wrapper.process_group
            self._count = self._logical.count // dist.get_world_size(group)
            self._first = dist.get_rank(group) * self._count
        self._has_begun = False  # the current part has begun its first forward
        self._at_start: list[Tensor] = []  # the buffers with which each part begins
        self._kept: list[Tensor] = []  # those after the first part

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a window on this rank."""
        return self._count * self._steps

    def open(self, unreduced: list[Tensor]) -> None:
        """Begins a block of windows.

        Args:
            unreduced: Parameters of the optimizers that the wrapper does not reduce.

        Raises:
            NotImplementedError: One of these requires a gradient.
        """
        if self._logical is None:
            return
        if any(param.requires_grad for param in unreduced):
            raise NotImplementedError(
                "an optimizer has parameters that DistributedDataParallel does not reduce, which does not go together "
                "with logical_ranks: give it the wrapped model's parameters only."
            )
        self._wrapper.reducer._reset_state()  # a forward without a backward may have prepared a step
        self._logical.open()

    def close(self) -> None:
        """Ends a block of windows."""
        if self._logical is not None:
            self._logical.close()

    def begin_window(self) -> None:
        """Begins a window, or begins it again."""
        if self._logical is None or not self._logical.is_open:
            return
        self._has_begun, self._at_start, self._kept = False, [], []
        self._logical.begin_stream(Use.DATA, self._first)

    def begin_forward(self, micro_steps: int) -> None:
        """Comes before each forward. micro_steps: finished backwards of the window."""
        if self._logical is None or self._has_begun or micro_steps % self._steps:
            return
        self._has_begun = True
        part = micro_steps // self._steps
        if self._count > 1 and part == 0:
            if self._wrapper.will_sync_module_buffers():
                self._wrapper._sync_buffers()
                self._wrapper.require_forward_param_sync = False
            self._at_start = self._copied_buffers()
        elif part > 0:
            self._put_back(self._at_start)
        self._logical.begin_stream(Use.MODEL, self._first + part)

    def end_backward(self, micro_steps: int) -> None:
        """Comes after each backward, before the step. micro_steps: finished backwards of the window."""
        if self._logical is None or micro_steps % self._steps:
            return
        self._has_begun = False
        ended = micro_steps // self._steps
        if ended < self._count:
            if ended == 1:
                self._kept = self._copied_buffers()
            self._wrapper.reducer.end_part(is_first=ended == 1)
            self._logical.begin_stream(Use.DATA, self._first + ended)
        else:
            self._put_back(self._kept)
            self._logical.begin_stream(Use.STEP, self._logical.count)

    def end_window(self) -> None:
        """Comes after the step."""
        if self._logical is not None:
            self._logical.windows += 1

    def refuse_short_window(self, micro_steps: int) -> None:
        """Raises ValueError at the end of a block whose window on this rank, or on another one, is not full."""
        if self._logical is not None:
            raise ValueError(
                f"the block of drivetrain.accumulate() has ended after {micro_steps} of the {self.micro_batches} "
                "micro-batches of a window that it or another rank had begun. With logical_ranks every rank needs as "
                "many whole windows, as drivetrain.data.ResumableSampler with the same logical_ranks gives them. A "
                "forward pass with gradients begins a window: evaluate under torch.no_grad()."
            )

    def refuse_save(self, micro_steps: int) -> None:
        """Raises ValueError inside of a window, whose partial sums no other number of ranks could use."""
        if self._logical is not None and micro_steps:
            raise ValueError(
                f"a checkpoint is due after {micro_steps} of {self.micro_batches} micro-batches of a window. With "
                "logical_ranks call Checkpointer.step() only where window.backward() has returned True."
            )

    def _copied_buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self._wrapper.module.buffers()]

    def _put_back(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._wrapper.module.buffers(), values, strict=False):
                buffer.copy_(value)
