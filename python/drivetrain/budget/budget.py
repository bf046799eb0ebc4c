"""`activation_budget`: what forward saves for backward, within so many bytes, for the least time."""

import contextlib
import json
import logging
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import nn

from .. import _C
from . import progress, table
from .compiled import CompiledRegions
from .copies import Copies
from .host_link import HostLink, link_of
from .plan import Choice, choose
from .retry import ModelSnapshot, Undo, first_line, is_out_of_memory
from .sharded import refuse_resharding
from .trace import STORAGE_FORMATS, Recording, Trace, profile

__all__ = ["ActivationPlan", "activation_budget"]

_CORRECTIONS = 2
_FORMAT = 2
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
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
    """Makes the model keep at most so many bytes for backward, and recompute the rest in the least time.

    Runs `step_fn` twice with everything kept: the first time each forward pass is computed once more, operation by
    operation, and the second time what backward asks for, when it does, which says what that takes (where the two took
    different paths, there is another first time). Chooses for every tensor that autograd saves whether it is kept or
    recomputed; runs `step_fn` a third time that way and compares the peak with the budget. From then on the model works
    like that, in any training loop. Gradients have the bits they have without: what was forgotten is computed by the
    same kernels from the same values, dropout's random numbers included, without calling your code again. So whatever
    your code does besides (counters, prints, other paths through it) happens once, BatchNorm updates its running
    statistics once, and a step that takes another path than the profiled ones is right, too: from where it parts, it
    keeps what it saves.

    An operation that does not give the same bits twice, one that writes to tensors that were there before (KV caches),
    and whatever is computed outside of torch's dispatcher (kernels of your own called with pointers) is kept.

    Where a step with everything kept does not fit into memory, `step_fn` runs up to its backward with nothing kept, and
    is then left by an exception of which handlers for `Exception` do not know; the model's gradients and torch's random
    states are put back (gradients that there are already are copied, so best call it with none). The passes before that
    backward are taken for the step's largest. Ranks that wait for each other in `step_fn` must all fit or none: profile
    under `no_sync()`.

    What planning runs is your step: after it, BatchNorm has counted three batches more, and random numbers have been
    drawn. Planning that ends early (an error, Ctrl-C) leaves the model as it was: buffers, gradients and random states
    are put back (gradients that there are already are copied for that), and nothing of ours stays on it. Steps that an
    optimizer took stay. Planning that takes longer than 2 seconds says on rank 0 what it is at: on its terminal, or
    where standard error is none, at level INFO of the logger "drivetrain".

    Parameters, buffers, inputs and results must not change between a forward and its backward. Writes that torch counts
    raise. Writes that it does not count (through `.numpy()` or DLPack, by its own fused optimizers, by an operator of
    your own without a version bump) are seen in the first 8 forward passes under a plan and in every 31st: backward
    compares every byte that a recomputation reads with what forward read, and names what differs. Not seen are such
    writes in the passes between, any on a GPU, those to what autograd saved itself (there torch's own gradients are
    wrong, too), and those to what is kept in another form (packed, or on the host), which they cannot harm.

    One thread at a time has the budget. What passes that wait for the same backward share (a cache) counts for each;
    what an RNN's cell on the CPU writes piece by piece counts for each piece. torch.func's transforms that
    differentiate cannot be used inside a pass (torch says so).

    Modules compiled with `torch.compile` (or `compile()`, or their `forward` with it) have torch's own memory budget,
    a ratio: it is found by bisection, with at most 6 recompilations, of which the last may be at
    two ratios. It is in force while this model's regions are compiled, in later recompilations too, and for nothing
    else (the global setting stays). Of several regions, some may
    have a higher ratio than the others. The table and `ActivationPlan.compiled` say which. What was compiled before is
    back after `remove()`. Of a model that is compiled in part, its regions get the share of the budget that they have
    of the bytes without one; where they cannot do with it, what the rest can do without. What they recompute has the
    bits it had where the compiler's kernels do. Functions other than these that are compiled are not found: a compiled
    loss function goes without a budget, and a compiled function that calls the model is an error. A plan that is made
    anew from the old profile, or tightened by `step`, keeps the ratio.

    Args:
        model: any module, or a wrapper of it (DDP). What `model(...)` computes has the budget; with the plan as a
            context manager around forward and loss (`with plan: loss = loss_fn(model(x), y)`, backward after it) what
            is inside has it, the loss too. Passes under torch.func's transforms go without.
        step_fn: without arguments, runs forward, loss and backward of a real training step on your largest batch; it
            may step the optimizer.
        budget: the most bytes that are kept for backward at any time, parameters, gradients and states apart: a number,
            "9GiB", "900MB", or "40%" of what is kept without a budget.
        plan: what `ActivationPlan.save` wrote, or its `to_dict()`: nothing is profiled. With `budget`, the plan is made
            anew for that budget from the old profile.
        offload: also choose tensors that wait in the host's memory, in so many bytes of it at most, pinned for copies
            from a GPU. The bandwidth of these copies is measured once per device (`ActivationPlan.host_link`); tensors
            are offloaded where their copies can hide behind forward and backward, and fetched as early as that takes
            and the budget has room. On the CPU, where that saves nothing, it only works.
        lossy: "bfloat16" or "int8": also choose tensors that are kept in that form, with some loss: gradients are then
            close, not the same. What has two values only (a mask) may be kept as bits in any case, without loss.

    Returns:
        the plan, which is in force. Print it for a table of blocks.

    Raises:
        ValueError: the budget is below what is possible (says the smallest that is), or not a number of bytes; the plan
            is another model's; lossy is no form.
        NotImplementedError: fully_shard() frees parameters of the model after forward (reshard_after_forward).
        RuntimeError: step_fn does not train the model.
        torch.OutOfMemoryError: forward does not fit with nothing kept, or the step under the plan and one a tenth
            tighter: profile a part of the batch with that part of the budget. The plan holds for any batch size.
        torch.utils.checkpoint.CheckpointError: in backward, if a parameter, buffer or input that has to be read again
            was modified in between, or a result of the model was, or what a backward of your own was given; or if an
            earlier backward through the same graph was interrupted while it recomputed in place.
    """
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module  # what the wrapper does besides differs from step to step
    refuse_resharding(model)
    before = ModelSnapshot(model)
    try:
        with progress.showing():
            return _planned(model, step_fn, budget, plan, offload, lossy)
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
    pool = None if offload is None else _C.OffloadPool(_bytes_of(offload, 0, "offload"))
    if lossy not in (None, "bfloat16", "int8"):
        raise ValueError(f'lossy is {lossy!r}, expected "bfloat16", "int8" or None')
    if plan is not None:
        made = ActivationPlan._from(model, plan, pool)
        if budget is not None:
            made._choose(_bytes_of(budget, made.unplanned_bytes))
        made._install()
        if step_fn is not None:
            made._measure(step_fn)
        return made
    if step_fn is None:
        raise ValueError("step_fn is None, expected a function that runs one training step, or plan=")
    if budget is None:
        raise ValueError('budget is None, expected a number of bytes, such as "9GiB", or a share, such as "50%"')
    _bytes_of(budget, 1)  # a mistake is told before anything runs
    forms = [
        STORAGE_FORMATS[form] for form in ("bits", *([lossy] if lossy else []), *(["host"] if pool is not None else []))
    ]
    for is_last in (False, True):
        with CompiledRegions(model) as regions:
            trace, peak = profile(model, step_fn, forms, pool)
            num_bytes = _bytes_of(budget, peak)
            fitted = regions.fit(trace, peak, num_bytes, lambda: profile(model, step_fn, forms, pool, is_short=True))
            fitted.is_estimated |= trace.is_estimated  # the peak is
            trace = fitted
            made = ActivationPlan(model, trace, peak, regions, pool)
            progress.tell("chooses what to keep")
            made._choose(num_bytes)
        made._install()
        try:
            made._measure(step_fn)
        except BaseException:
            made.remove()  # nobody has it
            raise
        if is_last or not made.has_diverged:
            break
        made.remove()  # the first steps of a model may be unlike the later ones
    return made


class ActivationPlan(_C.ActivationScope):
    """What a model keeps for backward, in force until `remove()`.

    Attributes:
        budget_bytes: what was asked for.
        unplanned_bytes: the peak without a budget, measured.
        planned_bytes, planned_seconds: the peak and the time a step takes longer, as predicted.
        bound_seconds: what no choice of tensors gets below, with these operations' times.
        smallest_bytes: the smallest budget that is possible.
        measured_bytes: the peak of the step that was run under the plan; None before.
        host_link: what copies to the host and back were measured to take, by which tensors are offloaded; None without
            `offload`, and on the CPU.
        notes: what was found on the way, in words.
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
        self._regions = regions
        self._pool = pool
        self.host_link: HostLink | None = None if pool is None else link_of(model)
        self._trace = trace
        self._choice: Choice | None = None
        self._recording: Recording | None = None
        self.unplanned_bytes = unplanned_bytes
        self.budget_bytes = 0
        self.measured_bytes: int | None = None
        self.measured_seconds: float | None = None
        self.notes: list[str] = []
        if trace.is_estimated:
            whole = table.size(unplanned_bytes)
            self._note(f"a step with everything kept did not fit: that it would keep {whole} is estimated")
        if not trace.has_one_path:
            self._note("profiled steps took different paths: where a step parts from the last one, it keeps everything")

    @property
    def has_diverged(self) -> bool:
        """Whether the last forward pass took another path than the profiled ones: from there it kept everything."""
        return bool(self._recorder.divergence)

    @property
    def planned_bytes(self) -> int:
        return self._chosen.peak_bytes

    @property
    def planned_seconds(self) -> float:
        return self._chosen.seconds

    @property
    def bound_seconds(self) -> float:
        return self._chosen.bound_seconds

    @property
    def smallest_bytes(self) -> int:
        return self._chosen.smallest_bytes

    @property
    def compiled(self) -> CompiledRegions:
        """The model's compiled regions, with the ratio of torch's memory budget that they have; empty without any."""
        return self._regions

    @property
    def copies(self) -> Copies | None:
        """What is copied to the host and back, and what the step waits for it, as predicted; None without a link."""
        return self._chosen.copies

    @property
    def peak_bytes(self) -> int:
        """The most that was kept for backward at a time since `reset_peak()`, in bytes."""
        return self._recorder.peak_bytes

    @property
    def live_bytes(self) -> int:
        """What is kept for backward now, in bytes."""
        return self._recorder.live_bytes

    @property
    def replay_seconds(self) -> float:
        """What replays took since `reset_peak()`, in seconds of the host."""
        return self._recorder.replay_seconds

    def reset_peak(self) -> None:
        """`peak_bytes` and `replay_seconds` begin anew."""
        self._recorder.reset()

    def remove(self) -> None:
        """The model keeps what it kept before; passes that wait for their backward still get it. Safe to call twice.

        A pass that is being recorded ends here, in whichever thread it is.
        """
        if self._recording is not None:
            self._recording.__exit__()
            self._recording = None
        self._regions.remove()

    def step(self, step_fn: Callable[[], Any]) -> Any:
        """Runs a training step; if it runs out of memory, makes the plan a tenth tighter and runs it once more.

        Gradients are put back as they were (those that there were are copied, so best call it with none); what the step
        did besides is not undone.

        Raises:
            torch.OutOfMemoryError: the second try ran out, too, or no tighter plan is possible.
        """
        undo = Undo(self._model)
        try:
            return step_fn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = first_line(error)
        undo()
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
            raise torch.OutOfMemoryError(
                f"the step ran out of memory with a budget of {table.size(tighter)}, too: set a smaller one "
                f"({table.size(self.smallest_bytes)} is the smallest that is possible). ({first_line(error)})"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """The profile and the choice, in what JSON knows."""
        return {
            "drivetrain_activation_plan": _FORMAT,
            "torch": str(torch.__version__),
            "budget_bytes": self.budget_bytes,
            "unplanned_bytes": self.unplanned_bytes,
            "measured_bytes": self.measured_bytes,
            "trace": self._trace.to_dict(),
            "choice": self._chosen.to_dict(),
            "host_link": None if self.host_link is None else self.host_link.to_dict(),
            "compiled": self._regions.to_dict(),
        }

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Writes `to_dict()` as JSON, for `activation_budget(model, plan=path)`."""
        Path(path).write_text(json.dumps(self.to_dict()), encoding="utf-8")

    def blocks(self) -> list[dict[str, Any]]:
        """The rows of the table: block, kept_bytes, packed_bytes, offloaded_bytes, recomputed_bytes, planned_seconds,
        and measured_seconds (of a step, on average; None before one was measured)."""
        measured = self._recorder.seconds_by_op() if self.measured_seconds is not None else None
        return table.rows(self._trace, self._chosen, measured)

    def __str__(self) -> str:
        return table.render(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return table.html(self)

    @property
    def _chosen(self) -> Choice:
        assert self._choice is not None, "a plan has chosen before anybody sees it"
        return self._choice

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
        made.budget_bytes = plan["budget_bytes"]
        made._choice = Choice.from_dict(plan["choice"])
        return made

    def _choose(self, budget_bytes: int) -> None:
        host_bytes = self._pool.max_bytes if self._pool is not None else 0
        choice = choose(self._trace, budget_bytes, self.host_link, host_bytes)
        if not choice.is_feasible:
            raise ValueError(
                f"budget is {table.size(budget_bytes)}: the smallest that is possible with this step is "
                f"{table.size(choice.smallest_bytes)} ({table.size(self.unplanned_bytes)} without a budget)"
            )
        self._choice, self.budget_bytes = choice, budget_bytes

    def _install(self) -> None:
        self._recorder.set_formats([], self._pool, self.budget_bytes)
        self._recorder.set_plans(self._chosen.tape_plans(self._trace))
        if self._recording is None:
            self._recording = Recording(self._model, self._recorder).__enter__()

    def _measure(self, step_fn: Callable[[], object]) -> None:
        """Runs the step under the plan; as long as its peak is above the budget, plans for that much less."""
        budget = self.budget_bytes
        for correction in range(_CORRECTIONS + 1):
            self._recorder.reset()
            planned_for = self.budget_bytes
            progress.tell("runs a step under the plan")
            self.step(step_fn)
            if self.budget_bytes < planned_for:  # it ran out of memory, and fits now
                budget = self.budget_bytes
            self.measured_bytes, self.measured_seconds = self._recorder.peak_bytes, self._recorder.replay_seconds
            if self._recorder.divergence:
                self._note(f"the step took another path than the profiled ones: {self._recorder.divergence}")
            if self.measured_bytes <= budget or self.has_diverged:
                break
            if correction == _CORRECTIONS:
                warnings.warn(
                    f"activation_budget: the step keeps {table.size(self.measured_bytes)}, above the budget of "
                    f"{table.size(budget)}: it keeps what the plan does not know of, or does not do the same each time",
                    stacklevel=3,
                )
                break
            tighter = int(self.budget_bytes * budget / self.measured_bytes)
            self._note(
                f"the measured peak was {table.size(self.measured_bytes)}, above the budget of {table.size(budget)}: "
                f"planned anew for {table.size(tighter)}"
            )
            with contextlib.suppress(ValueError):  # the smallest plan it is, then
                self._choose(tighter)
            self._install()
        self.budget_bytes = budget

    def _note(self, note: str) -> None:
        self.notes.append(note)
        _logger.info("activation_budget: %s", note)


def _bytes_of(budget: int | str, whole: int, name: str = "budget") -> int:
    expected = 'expected a number of bytes above 0, such as 900_000_000, "900MB" or "9GiB", or a share, such as "50%"'
    if isinstance(budget, bool) or not isinstance(budget, SupportsIndex | str):
        raise TypeError(f"{name} is {budget!r}, {expected}")
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", budget)
        unit = match[2] if match else None
        if match is None or (unit != "%" and unit not in _UNITS):
            raise ValueError(f"{name} is {budget!r}, {expected}")
        num_bytes = float(match[1]) * (whole / 100 if unit == "%" else _UNITS[str(unit)])
        if num_bytes <= 0:
            raise ValueError(f"{name} is {budget!r}, {expected}")
        return min(max(int(num_bytes), 1), sys.maxsize)
    num_bytes = operator.index(budget)
    if num_bytes <= 0:
        raise ValueError(f"{name} is {budget}, {expected}")
    return min(num_bytes, sys.maxsize)
