"""Plans which saved tensors a model keeps for backward and which it recomputes, within a budget of bytes."""

import contextlib
import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _C
from ..memory import bytes_of
from . import progress, table
from .compiled_regions import CompiledRegions
from .copies import HostLink, link_of
from .plan import ChosenPolicy, choose
from .retry import ModelSnapshot, Undo, drop_gradients, first_line, is_out_of_memory, refuse_resharding
from .trace import STORAGE_FORMATS, Recording, Trace, profile

_CORRECTIONS = 2
_TOLERANCE = 1.05  # times the budget: a step that keeps more warns
_NO_LIMIT = 2**63 - 1
_FORMAT = 2
_logger = logging.getLogger("drivetrain")


def activation_budget(
    model: nn.Module,
    step_fn: Callable[[], object] | None = None,
    budget: int | str | None = None,
    *,
    plan: "str | os.PathLike[str] | dict[str, Any] | None" = None,
    offload: int | str | None = None,
    lossy: str | None = None,
) -> "ActivationPlan":
    """Limits the bytes that a model keeps for backward, and recomputes the rest in the least time.

    Profiles one run of `step_fn`, which calls each operation of forward twice to check that it is deterministic.
    Backward recomputes there what it needs, which times the operations. A solver then decides for every saved tensor
    whether to save or to recompute it. A second run uses the plan and compares its peak with the budget. From then on
    the model follows the plan in any training loop. If the second run takes another path, both are repeated. So is the
    profile if the budget is too small for it, because the first step of a model may keep more than later ones.

    Gradients have the same bits as without a budget. Recomputation calls the same kernels on the same values, with the
    same random numbers, and does not call your code again. So side effects of your code happen once, and BatchNorm
    updates its running statistics once. A step on another path than the profiled ones is also correct: operations that
    the plan has follow it. Results of the others are recomputed, unless the budget is larger than the plan needs. A
    pass with many such results is recomputed part by part, as under checkpointing of blocks.

    Results of an operation are always saved if it is not deterministic or writes to tensors from before the pass, such
    as KV caches. Results of code outside torch's dispatcher, such as kernels called with pointers, are also saved.

    Planning needs about as much memory as the model with each of its blocks under `torch.utils.checkpoint`. If an
    operation returns other values in backward than in forward, an exception that handlers for `Exception` do not catch
    ends that step. It then runs again, and keeps the results of such operations. Where ranks wait for each other in
    `step_fn`, profile under `no_sync()`, because one rank may run it again.

    Planning runs real steps, each of which begins without gradients. Afterwards gradients, buffers, torch's random
    states and attributes of modules that are numbers or texts are as they were. Optimizer steps and other effects of
    your code are not undone. If planning fails or is interrupted, nothing stays installed on the model. Planning that
    takes over 2 seconds reports its progress on rank 0. The report goes to the terminal if standard error is one,
    otherwise to the logger "drivetrain" at level INFO.

    Parameters, buffers, inputs and results must not change between a forward and its backward. Writes that torch counts
    raise an error. Other writes go through `.numpy()`, DLPack, torch's fused optimizers, or an operator of yours
    without a version bump. They are detected in the first 8 forward passes under a plan and in every 31st. There,
    backward compares every byte that a recomputation reads with what forward read, and the error names the tensor. Such
    writes are not detected in other passes or on a GPU. Nor are they in tensors that autograd saved itself, where
    torch's own gradients are wrong as well. Tensors that are packed or offloaded are not compared, because such writes
    cannot harm them.

    One thread at a time uses the budget. A tensor shared by several passes that wait for the same backward counts once
    per pass. Memory that an RNN cell on the CPU writes in parts counts per part. Differentiating transforms of
    torch.func cannot be used inside a pass; torch raises an error.

    Modules compiled with `torch.compile` (or `compile()`, or with a compiled `forward`) follow torch's own memory
    budget, a ratio. It is found by bisection with at most 6 recompilations, of which the last may use two ratios. It
    applies while this model's regions are compiled, also in later recompilations, and leaves the global setting
    unchanged. Some of several regions may have a higher ratio than the others; the table and `ActivationPlan.compiled`
    show which. The code compiled before is restored by `remove()`. In a partly compiled model, regions get their share
    of the bytes without a budget. If they cannot meet it, they get what the rest does not need. Their gradients have
    the same bits if the compiler's kernels do. Other compiled functions are not found: a compiled loss function has no
    budget, and a compiled function that calls the model raises an error. A plan remade from an old profile, or
    tightened by `step`, keeps the ratio.

    Args:
        model: Any module, or a wrapper of it (DDP). The budget covers what `model(...)` computes. With the plan as a
            context manager around forward and loss (`with plan: loss = loss_fn(model(x), y)`, backward after it), the
            budget covers the loss as well. It does not cover passes under torch.func's transforms.
        step_fn: Takes no arguments, and runs forward, loss and backward of a real training step on your largest batch;
            it may step the optimizer.
        budget: The most bytes kept for backward at any time, excluding parameters, gradients and optimizer states. It
            is a number, "9GiB", "900MB", or "40%" of the bytes kept without a budget.
        plan: A file that `ActivationPlan.save` wrote, or its `to_dict()`: nothing is profiled. With `budget`, a plan
            for that budget is made from the old profile.
        offload: Also allows offloading, with at most this many bytes of host memory, which is pinned for copies from a
            GPU. The bandwidth of the link is measured once per device (`ActivationPlan.host_link`). Tensors are
            offloaded where their copies can overlap forward and backward, and are fetched as early as needed and as the
            budget permits. On the CPU, offloading works but saves nothing.
        lossy: "bfloat16" or "int8": also allows this storage format, with rounding errors, so gradients are close but
            not equal. Masks of two values may be stored as bits in any case, without loss.

    Returns:
        The plan, which is in force. Printing it shows a table of blocks.

    Raises:
        ValueError: The budget is no number of bytes or is below the smallest possible one, which the message names. The
            plan belongs to another model, or `lossy` is not a storage format.
        NotImplementedError: fully_shard() frees parameters of the model after forward (reshard_after_forward).
        RuntimeError: `step_fn` does not train the model.
        torch.OutOfMemoryError: The profile does not fit into memory, or neither the planned step nor one that is a
            tenth tighter fits. Profile a part of the batch with that part of the budget: a plan holds for any batch
            size.
        torch.utils.checkpoint.CheckpointError: Raised in backward if a tensor that must be read again was modified
            after forward. Also raised if an earlier backward through the same graph was interrupted while it recomputed
            in place.
    """
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module  # the wrapper's own operations differ from step to step
    refuse_resharding(model)
    before = ModelSnapshot(model)

    def run() -> None:
        assert step_fn is not None
        drop_gradients(model)  # so that no run adds to another's
        step_fn()

    try:
        with progress.showing():
            made = _planned(model, run if step_fn is not None else None, budget, plan, offload, lossy)
        before.restore_values()
        return made
    except BaseException:
        before.restore()
        raise


def _planned(
    model: nn.Module,
    step_fn: Callable[[], object] | None,
    budget: int | str | None,
    plan: "str | os.PathLike[str] | dict[str, Any] | None",
    offload: int | str | None,
    lossy: str | None,
) -> "ActivationPlan":
    pool = None if offload is None else _C.OffloadPool(bytes_of(offload, 0, "offload"))
    if lossy not in (None, "bfloat16", "int8"):
        raise ValueError(f'lossy is {lossy!r}, expected "bfloat16", "int8" or None')
    if plan is not None:
        made = ActivationPlan._from(model, plan, pool)
        if budget is not None:
            made._choose(bytes_of(budget, made.unplanned_bytes))
        made._install()
        if step_fn is not None:
            made._measure(step_fn)
        return made
    if step_fn is None:
        raise ValueError("step_fn is None, expected a function that runs one training step, or plan=")
    if budget is None:
        raise ValueError('budget is None, expected a number of bytes, such as "9GiB", or a share, such as "50%"')
    bytes_of(budget, 1)  # raises before anything runs
    storage_formats = [
        STORAGE_FORMATS[name] for name in ("bits", *([lossy] if lossy else []), *(["host"] if pool is not None else []))
    ]
    for is_last in (False, True):
        regions = CompiledRegions(model)
        new: ActivationPlan | None = None
        try:
            trace, peak = profile(model, step_fn, storage_formats, pool)
            num_bytes = bytes_of(budget, peak)
            trace = regions.fit(trace, peak, num_bytes, lambda: profile(model, step_fn, storage_formats, pool))
            new = ActivationPlan(model, trace, peak, regions, pool)
            progress.tell("chooses which tensors to save")
            try:
                new._choose(num_bytes)
            except ValueError:
                if is_last:
                    raise
                new.remove()
                continue  # the first step of a model may keep more than later ones
            new._install()
            new._measure(step_fn)
        except BaseException:
            (regions if new is None else new).remove()  # the caller never receives it
            raise
        if is_last or not new._recorder.divergence:
            break
        new.remove()  # the first steps of a model may differ from later ones
    assert new is not None
    return new


class ActivationPlan(_C.ActivationScope):
    """Holds the save/recompute policy of a model, in force until `remove()`.

    Attributes:
        budget_bytes: The requested budget.
        unplanned_bytes: The peak without a budget, by the sizes of what backward uses.
        planned_bytes: The predicted peak.
        planned_seconds: The predicted time that the plan adds to a step.
        copies: The predicted copies to the host and back, and the time that a step waits for them; None without a link.
        compiled: The model's compiled regions and their ratios of torch's memory budget.
        bound_seconds: A lower bound on the added time of every plan, from minimum cuts that ignore the memory of
            replays.
        smallest_bytes: The smallest budget for which a plan was found.
        measured_bytes: The peak of the step that was run under the plan; None before that step.
        host_link: The measured speed of copies to the host and back; None without `offload`, and on the CPU.
        notes: Remarks made while planning.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        unplanned_bytes: int,
        regions: CompiledRegions,
        pool: _C.OffloadPool | None = None,
    ) -> None:
        self._recorder = _C.ActivationRecorder()
        super().__init__(self._recorder)
        self._model = model
        self.compiled = regions
        self._pool = pool
        self.host_link: HostLink | None = None if pool is None else link_of(model)
        self._trace = trace
        self._recording: Recording | None = None
        self.unplanned_bytes = unplanned_bytes
        self.budget_bytes = 0
        self.measured_bytes: int | None = None
        self.measured_seconds: float | None = None
        self.notes: list[str] = []

    @property
    def has_diverged(self) -> bool:
        """True if the last step has kept more than 1.05 times the budget. The first such step also warns."""
        return self._recorder.exceeding_bytes > 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes kept for backward at a time since `reset_peak()`."""
        return self._recorder.peak_bytes

    @property
    def live_bytes(self) -> int:
        """The bytes kept for backward now."""
        return self._recorder.live_bytes

    @property
    def replay_seconds(self) -> float:
        """Seconds of the host's time in replays since `reset_peak()`."""
        return self._recorder.replay_seconds

    def reset_peak(self) -> None:
        """Resets `peak_bytes` and `replay_seconds`."""
        self._recorder.reset()

    def remove(self) -> None:
        """Restores the model. Passes that wait for their backward still complete. May be called twice.

        Ends a pass that is being recorded, in any thread.
        """
        if self._recording is not None:
            self._recording.__exit__()
            self._recording = None
        self.compiled.remove()

    def step(self, step_fn: Callable[[], Any]) -> Any:
        """Runs a training step. If it runs out of memory, makes the plan a tenth tighter and runs the step once more.

        Restores gradients before the second run (existing ones are copied, so preferably call it with none). Other side
        effects of the first run are not undone. If the second run fails as well, the former plan is in force again.

        Raises:
            torch.OutOfMemoryError: The second run ran out of memory as well, or no tighter plan is possible.
        """
        undo = Undo(self._model)
        try:
            return step_fn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = first_line(error)
        undo()
        former = (self._chosen, self.budget_bytes)
        tighter = int(0.9 * min(self.budget_bytes, self.planned_bytes))
        try:
            self._choose(tighter)
        except ValueError as error:
            raise torch.OutOfMemoryError(f"{said}; and no tighter plan is possible: {error}") from error
        self._install()
        self._recorder.reset()
        self._note(f"a step ran out of memory ({said}): the budget is {table.size(tighter)} now")
        try:
            return step_fn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            divergence, smallest = self._recorder.divergence, table.size(self.smallest_bytes)
            self._use(*former)
            self._install()
            self.notes.pop()
            advice = (
                f"it takes another path than the planned step ({divergence}). Plan on a batch that takes this path"
                if divergence
                else f"set a smaller one ({smallest} is the smallest that is possible)"
            )
            raise torch.OutOfMemoryError(
                f"the step ran out of memory with a budget of {table.size(tighter)} as well: {advice}. "
                f"({first_line(error)})"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Returns the profile and the policy as plain data for JSON."""
        return {
            "drivetrain_activation_plan": _FORMAT,
            "torch": str(torch.__version__),
            "budget_bytes": self.budget_bytes,
            "unplanned_bytes": self.unplanned_bytes,
            "measured_bytes": self.measured_bytes,
            "trace": dataclasses.asdict(self._trace),
            "choice": dataclasses.asdict(self._chosen),
            "host_link": None if self.host_link is None else dataclasses.asdict(self.host_link),
            "compiled": self.compiled.to_dict(),
        }

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Writes `to_dict()` as JSON, for `activation_budget(model, plan=path)`."""
        Path(path).write_text(json.dumps(self.to_dict()), encoding="utf-8")

    def blocks(self) -> list[dict[str, Any]]:
        """Returns the rows of the table: block, kept_bytes, packed_bytes, offloaded_bytes, recomputed_bytes,
        planned_seconds, and measured_seconds (the mean per step; None before a step was measured)."""
        measured = self._recorder.seconds_by_op() if self.measured_seconds is not None else None
        return table.rows(self._trace, self._chosen, measured)

    def summary(self) -> str:
        """Returns the lines below the table: bytes that are kept, the expected peak of torch's allocator, and notes."""
        return "\n".join(table.lines(self))

    __str__ = __repr__ = table.render
    _repr_html_ = table.html

    def _use(self, choice: ChosenPolicy, budget_bytes: int) -> None:
        self._chosen, self.budget_bytes = choice, budget_bytes
        self.planned_bytes, self.planned_seconds = choice.peak_bytes, choice.seconds
        self.bound_seconds, self.smallest_bytes = choice.bound_seconds, choice.smallest_bytes
        self.copies = choice.copies

    @classmethod
    def _from(
        cls, model: nn.Module, plan: "str | os.PathLike[str] | dict[str, Any]", pool: _C.OffloadPool | None
    ) -> "ActivationPlan":
        if not isinstance(plan, dict):
            plan = json.loads(Path(plan).read_text(encoding="utf-8"))
        if not isinstance(plan, dict) or plan.get("drivetrain_activation_plan") != _FORMAT:
            raise ValueError("plan is not an activation plan of this version, expected what ActivationPlan.save wrote")
        trace = Trace.from_dict(plan["trace"])
        names = [name for name, _ in model.named_modules()]
        if names != trace.modules:
            at = next((i for i, (a, b) in enumerate(zip(names, trace.modules, strict=False)) if a != b), None)
            what = (
                f"module {at} is {names[at]!r} here and {trace.modules[at]!r} in the plan"
                if at is not None
                else f"the model has {len(names)} modules and the plan {len(trace.modules)}"
            )
            raise ValueError(f"plan is another model's: {what}")
        if pool is None and trace.has_storage_format(STORAGE_FORMATS["host"]):
            raise ValueError("plan offloads to the host: pass offload= with the bytes that it may use there")
        regions = CompiledRegions.restored(model, plan.get("compiled"))
        made = cls(model, trace, plan["unplanned_bytes"], regions, pool)
        made._use(ChosenPolicy.from_dict(plan["choice"]), plan["budget_bytes"])
        return made

    def _choose(self, budget_bytes: int) -> None:
        host_bytes = self._pool.max_bytes if self._pool is not None else 0
        choice = choose(self._trace, budget_bytes, self.host_link, host_bytes)
        if not choice.is_feasible:
            raise ValueError(
                f"budget is {table.size(budget_bytes)}: the smallest that is possible with this step is "
                f"{table.size(choice.smallest_bytes)} ({table.size(self.unplanned_bytes)} without a budget)"
            )
        self._use(choice, budget_bytes)

    def _install(self) -> None:
        self._recorder.set_formats([], self._pool, self.budget_bytes)
        self._recorder.set_plans(self._chosen.tape_plans(self._trace, self.budget_bytes))
        if self._recording is None:
            self._recording = Recording(self._model, self._recorder).__enter__()
        self._recorder.set_limit(min(_NO_LIMIT, int(_TOLERANCE * self.budget_bytes)))

    def _measure(self, step_fn: Callable[[], object]) -> None:
        """Runs the step under the plan. While its peak exceeds the budget, plans for a budget smaller by that
        factor."""
        budget = self.budget_bytes
        for correction in range(_CORRECTIONS + 1):
            self._recorder.reset()
            self._recorder.set_limit(_NO_LIMIT)
            planned_for = self.budget_bytes
            progress.tell("runs a step under the plan")
            self.step(step_fn)
            if self.budget_bytes < planned_for:  # it ran out of memory, and step() tightened the plan
                budget = self.budget_bytes
            self.measured_bytes, self.measured_seconds = self._recorder.peak_bytes, self._recorder.replay_seconds
            if self._recorder.divergence:
                self._note(f"the step took another path than the profiled ones: {self._recorder.divergence}")
            if self.measured_bytes <= budget or self._recorder.divergence:
                break
            if correction == _CORRECTIONS:
                warnings.warn(
                    f"activation_budget: the step keeps {table.size(self.measured_bytes)}, above the budget of "
                    f"{table.size(budget)}: its passes differ from the profiled ones or keep tensors "
                    "that were not profiled",
                    stacklevel=3,
                )
                break
            tighter = int(self.budget_bytes * budget / self.measured_bytes)
            self._note(
                f"the measured peak was {table.size(self.measured_bytes)}, above the budget of {table.size(budget)}: "
                f"planned again for {table.size(tighter)}"
            )
            with contextlib.suppress(ValueError):  # keeps the plan where no tighter one is possible
                self._choose(tighter)
            self._install()
        self.budget_bytes = budget
        self._recorder.set_limit(min(_NO_LIMIT, int(_TOLERANCE * budget)))

    def _note(self, note: str) -> None:
        self.notes.append(note)
        _logger.info("activation_budget: %s", note)
