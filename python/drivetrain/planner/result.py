"""`Plan`: the predicted memory, time and cost of a run, as tables, figures and answers."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import _C, optim
from ..monitor.sinks.requirement import require
from ..notebook import html_table, text_table
from ..optim import precision
from ..optim.base import FusedOptimizer
from ..optim.engine import Engine
from ..optim.report import lines_about_kept, states_of_step
from . import questions
from .calibrate import Calibration, cache_path, calibrate, corrected, fingerprint
from .cost import Price, Run, price_run
from .devices import Device
from .memory import MemoryPlan, Recomputation, plan_memory, recompute_within
from .options import Options, duration, formatted
from .replay import cpu_workspaces
from .timing import TimePlan, plan_time
from .trace import ALLOC, OP, STEP, Block, Event, OpCall, ParameterInfo, StepTrace

_GIB = 2**30
_COLORS = {"forward": "#4c78a8", "backward": "#72b7b2", "optimizer": "#54a24b"}
_TIMES = ("step_s", "forward_s", "backward_s", "optimizer_s", "communication_s", "exposed_s")
_Retrace = Callable[[str, "int | None", "int | None"], StepTrace]


@dataclass(repr=False)
class Plan:
    """A plan of a training run. Printing it shows what it predicts.

    Attributes:
        trace: The traced steps, with the planned optimizer's states.
        device: The device.
        options: The settings of the run besides its step.
        memory: The memory of a rank.
        time: The time of a step.
        batch: Samples of a micro-batch; None: not given.
        length: Length of a sequence; None: not given.
        recomputation: The recomputation of the budget; None without a budget.
        calibration: The measurements on this machine; None without a calibration.
    """

    trace: StepTrace
    device: Device
    options: Options
    memory: MemoryPlan
    time: TimePlan
    batch: int | None
    length: int | None
    recomputation: Recomputation | None
    calibration: Calibration | None
    _asked: dict[str, Any]  # the arguments of `of`

    @classmethod
    def of(
        cls,
        trace: StepTrace,
        device: Device,
        options: Options,
        *,
        batch: int | None = None,
        length: int | None = None,
        optimizer: str | None = None,
        calibration: Calibration | None = None,
        retrace: _Retrace | None = None,
        devices: str | os.PathLike[str] | None = None,
    ) -> Plan:
        """Plans a traced step; see `drivetrain.plan` for the arguments.

        Raises:
            ValueError: The budget is too small, or the optimizer is unknown.
        """
        asked = {name: value for name, value in locals().items() if name != "cls"}
        name = optimizer or next(iter(trace.optimizers), None)
        if optimizer is not None or options.state_bits is not None or options.master_bits is not None:
            if name is None:
                raise ValueError(
                    "state_bits and master_bits need an optimizer: pass optimizer=, or step one in step_fn"
                )
            sizes = state_bytes(trace.parameters, name, options.state_bits, options.master_bits)
            trace = with_states(trace, sizes, name)
        measured: dict[int, float] = {}
        if calibration is not None:
            device, measured = replace(device, **calibration.figures), calibration.seconds
        recomputation = None
        plain = plan_time(trace, device, options, batch or 0, measured)
        if options.budget is not None:
            recomputation = recompute_within(trace, plain.op_seconds, options.budget)
            plain = plan_time(trace, device, options, batch or 0, measured, recomputation.seconds)
        if calibration is not None:
            plain.correction = calibration.correction
        workspaces = cpu_workspaces(trace) if device.kind == "cpu" else {}
        memory = plan_memory(trace, device, options, workspaces, recomputation)
        return cls(trace, device, options, memory, plain, batch, length, recomputation, calibration, asked)

    def _again(self, **changes: Any) -> Plan:
        """Returns the plan for other arguments of `of`."""
        return Plan.of(**{**self._asked, **changes})

    def but(self, device: Device | None = None, **changes: Any) -> Plan:
        """Returns the plan with other options, without another trace.

        Args:
            device: Another device of the same kind; None keeps it.
            **changes: Fields of Options.
        """
        return self._again(device=device or self._asked["device"], options=replace(self.options, **changes))

    def calibrated(self, seconds: float = 30.0, cache: Path | None = None) -> Plan:
        """Returns the plan with operations measured on this machine, and with the correction of earlier `refine` calls.

        Args:
            seconds: The most time that this takes; see `calibrate`.
            cache: The file of measurements; None: this machine's.

        Raises:
            ValueError: The plan is not for a CPU.
        """
        cache = cache or cache_path()
        calibration = calibrate(self.trace, self.device, seconds, cache)
        calibration.correction = corrected(cache, fingerprint(self.trace))
        return self._again(calibration=calibration)

    def sized(self, batch: int | None = None, length: int | None = None) -> Plan:
        """Returns the plan of another batch or length, from another trace.

        Raises:
            ValueError: The plan cannot trace the step again.
        """
        retrace: _Retrace | None = self._asked["retrace"]
        if retrace is None:
            raise ValueError("this plan cannot trace its step again, because it was made from a trace")
        batch, length = batch or self.batch, length or self.length
        trace = retrace(self.device.kind, batch, length)
        return self._again(trace=trace, batch=batch, length=length, calibration=None)

    # ---- Questions.

    def largest_batch(self, limit: int = 65536) -> int:
        """Returns the largest micro-batch that fits; 0 if one sample does not. step_fn must take `batch`."""
        capacity = self.memory.capacity
        return questions.largest(lambda size: self.sized(batch=size).memory.total, capacity, self.batch or 1, limit)

    def largest_length(self, limit: int = 1 << 20, multiple: int = 1) -> int:
        """Returns the longest sequence that fits, in steps of `multiple`; 0 if none does. step_fn takes `length`."""

        def needs(count: int) -> int:
            return self.sized(length=count * multiple).memory.total

        start = max(1, (self.length or 1) // multiple)
        return multiple * questions.largest(needs, self.memory.capacity, start, limit // multiple)

    def smallest_device(self) -> list[questions.Fit]:
        """Returns for every GPU of the table if the step fits, and its time, smallest memory first."""
        return questions.devices_that_fit(self, self._asked["devices"])

    def smallest_count(self, limit: int = 4096) -> int | None:
        """Returns the smallest number of devices on which the step fits with this sharding; None if none does."""
        if self.options.shard is None:  # only sharding makes more devices need less
            return 1 if self.but(world_size=1).memory.fits else None
        count = 1 + bisect_left(range(1, limit + 1), True, key=lambda number: self.but(world_size=number).memory.fits)
        return count if count <= limit else None

    def what_helps(self) -> list[questions.Gain]:
        """Returns what each of drivetrain's options saves at the peak, and what it costs in time, largest first."""
        return questions.gains(self)

    def price(self, prices: str | os.PathLike[str] | dict[str, Any], run: Run) -> list[Price]:
        """Returns the price of a run under each of the user's tariffs; see `price_run`."""
        return price_run(prices, self.device.key, self.options.world_size, self.time.step_s, self.checkpoint_bytes, run)

    def refine(self, step_s: float) -> Plan:
        """Returns the plan corrected by measured steps, and keeps the correction for later calibrated plans.

        Args:
            step_s: Median seconds of measured steps of this plan's batch.

        Raises:
            ValueError: step_s is not above 0, or the plan is not calibrated.
        """
        if not step_s > 0:
            raise ValueError(f"step_s is {step_s!r}, expected a number above 0")
        if self.calibration is None:
            raise ValueError("this plan is not calibrated: call refine() on plan.calibrated()")
        ratio = self.time.correction * step_s / self.time.step_s
        self.calibration.correction = corrected(cache_path(), fingerprint(self.trace), ratio)
        return self.but()

    # ---- Figures.

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: parameters, buffers and optimizer states of all ranks."""
        states = self.trace.bytes_of("optimizer states")
        return self.trace.parameter_bytes + self.trace.bytes_of("buffers") + states

    def epoch_s(self, num_samples: int) -> float:
        """Returns the seconds of an epoch.

        Raises:
            ValueError: The plan has no batch size.
        """
        if not self.time.samples:
            raise ValueError("batch is None: pass batch= to the plan for samples per second")
        return num_samples / self.time.samples_per_s

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the memory over the last step.

        Args:
            path: An .svg or .png file; None: nothing is written.

        Returns:
            A `Picture`, which notebooks show; its `figure` is matplotlib's.

        Raises:
            ImportError: The package matplotlib is missing.
            ValueError: The name ends in neither.
        """
        return draw(self, None if path is None else Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as plain data for JSON."""
        memory, time = self.memory, self.time
        return {
            "device": self.device.key,
            "world_size": self.options.world_size,
            "parameters": self.trace.num_parameters,
            "fits": memory.fits,
            "peak_bytes": memory.total,
            "allocated_bytes": memory.peak_allocated,
            "reserved_bytes": memory.peak_reserved,
            "capacity_bytes": memory.capacity,
            "at_peak": memory.at_peak,
            **{name: getattr(time, name) for name in _TIMES},
            "mfu": time.mfu,
            "samples_per_s": time.samples_per_s if time.samples else None,
            "epoch_s": self.epoch_s(self.trace.epoch_samples) if time.samples and self.trace.epoch_samples else None,
            "checkpoint_bytes": self.checkpoint_bytes,
            "period": self.trace.period or None,
            "kept_from": self.trace.changes,
        }

    # ---- Tables.

    def _heading(self) -> list[str]:
        memory, options = self.memory, self.options
        ranks = "1 rank" if options.world_size == 1 else f"{options.world_size} ranks"
        verdict = "fits" if memory.fits else "does not fit"
        op = self.trace.ops[memory.peak_op] if memory.peak_op >= 0 else None
        peak = "before the step"
        if op is not None:
            where = "the optimizer step" if op.phase == "optimizer" else f"{op.phase} of {op.module or 'the loss'}"
            peak = f"{where}, {op.name}"
        number = self.trace.num_parameters
        count = f"{number / 1e6:,.1f} M" if number >= 1_000_000 else f"{number:,}"
        lines = [
            f"{count} parameters on {ranks} of {self.device.name}: {verdict}, "
            f"{formatted(memory.total)} of {formatted(memory.capacity)} per rank",
            f"peak: {peak}",
        ]
        if self.recomputation is not None:
            lines.append(
                f"budget: {formatted(self.recomputation.peak_bytes)} of activations kept, "
                f"{1e3 * self.recomputation.seconds:.2f} ms of recomputation"
            )
        if self.trace.period:
            lines.append(f"a step: {self.trace.period}")
        if options.state_bits in (8, 4):
            lines += lines_about_kept(kept_32_bits(self.trace.parameters))
        return [*lines, *self.trace.notes]

    def _memory_rows(self) -> list[tuple[str, str, str]]:
        memory = self.memory
        rows = [
            (name, formatted(size), f"{size / memory.total:.1%}")
            for name, size in sorted(memory.at_peak.items(), key=lambda item: -item[1])
        ]
        cached = memory.peak_reserved - memory.peak_allocated
        if cached:
            rows.append(("cached by the allocator", formatted(cached), f"{cached / memory.total:.1%}"))
        if memory.fixed_bytes:
            rows.append(("context and NCCL", formatted(memory.fixed_bytes), f"{memory.fixed_bytes / memory.total:.1%}"))
        return rows

    def _time_rows(self) -> list[tuple[str, str]]:
        time = self.time
        rows = [
            ("forward", f"{1e3 * time.forward_s:.2f} ms"),
            ("backward", f"{1e3 * time.backward_s:.2f} ms"),
            ("optimizer", f"{1e3 * time.optimizer_s:.2f} ms"),
            ("communication", f"{1e3 * time.communication_s:.2f} ms, {1e3 * time.exposed_s:.2f} ms exposed"),
            *([("rest, as measured", f"{1e3 * time.rest_s:.2f} ms")] if time.rest_s else []),
            ("step", f"{1e3 * time.step_s:.2f} ms"),
            ("model FLOPs utilization", f"{time.mfu:.1%}"),
        ]
        if time.samples:
            rows.append(("samples per second, all ranks", f"{time.samples_per_s:,.1f}"))
            if self.trace.epoch_samples:
                name = f"epoch of {self.trace.epoch_samples:,} samples"
                rows.append((name, duration(self.epoch_s(self.trace.epoch_samples))))
        return rows

    def _tables(self) -> list[tuple[tuple[str, ...], Sequence[Sequence[str]]]]:
        largest = self.memory.largest
        held = [(f"{one.module or '-'}: {one.name}", one.category, formatted(one.num_bytes)) for one in largest]
        return [
            (("memory at the peak", "size", "share"), self._memory_rows()),
            (("largest at the peak", "kind", "size"), held),
            (("time of a step", ""), self._time_rows()),
        ]

    def __str__(self) -> str:
        parts = ["\n".join(self._heading())]
        parts += [text_table(header, rows) for header, rows in self._tables()]
        if self.trace.changes:
            parts.append("\n".join(["the plan has kept the script from these:", *self.trace.changes]))
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = [html_table([], header, rows) for header, rows in self._tables()]
        return html_table(self._heading(), ("",), []) + "".join(tables)


# ---- States of drivetrain's optimizers in place of a trace's.


def state_bytes(
    parameters: list[ParameterInfo], optimizer: str, state_bits: int | None = None, master_bits: int | None = None
) -> list[list[int]]:
    """Returns the bytes of each state of each parameter, in order; none for parameters that are not trained.

    The formats are as a class of drivetrain.optim takes them. `master_bits` applies to parameters of 16 bits.

    Raises:
        ValueError: drivetrain.optim has no such class, or a format does not exist.
    """
    kind = getattr(optim, optimizer, None)
    if optimizer not in optim.__all__ or not (isinstance(kind, type) and issubclass(kind, FusedOptimizer)):
        names = ", ".join(name for name in optim.__all__ if name[0].isupper())
        raise ValueError(f"optimizer is {optimizer!r}, expected one of {names}")

    @functools.cache
    def of(shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        example = torch.zeros((1,) * max(1, len(shape)), dtype=dtype).requires_grad_()
        is_half = dtype in (torch.bfloat16, torch.float16)
        formats = {"state_bits": state_bits, "master_bits": master_bits if is_half else None}
        asked: dict[str, Any] = {name: bits for name, bits in formats.items() if bits is not None}
        made = kind([example], **{"lr": 1e-3, **asked})
        layout = torch.empty(shape, dtype=dtype, device="meta")
        return list(states_of_step(Engine(made), layout, made.param_groups[0]).values())

    return [of(one.shape, one.dtype) if one.requires_grad else [] for one in parameters]


def kept_32_bits(parameters: list[ParameterInfo]) -> dict[str, int]:
    """Returns the elements of each trainable parameter that is too small for states in blocks, by its name."""
    asked = precision.of({"state_bits": 8})
    return {
        parameter.name: math.prod(parameter.shape)
        for parameter in parameters
        if parameter.requires_grad
        and _C.optim_keeps_32_bits(asked, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    }


def with_states(trace: StepTrace, sizes: list[list[int]], name: str) -> StepTrace:
    """Returns the trace with optimizer states of other sizes, given by parameter, as a class of that name has them.

    In a trace without optimizer states, they come at the end of the first step.
    """
    trace = copy.copy(trace)
    trace.blocks = [copy.copy(block) for block in trace.blocks]
    states = [block for block in trace.blocks if block.category == "optimizer states"]
    if states:
        left = [list(entries) for entries in sizes]
        last: dict[int, Block] = {}
        for block in states:
            block.num_bytes = left[block.parameter].pop(0) if block.parameter >= 0 and left[block.parameter] else 0
            last[block.parameter] = block
        for parameter, entries in enumerate(left):  # states that the traced optimizer does not have
            if entries and parameter in last:
                last[parameter].num_bytes += sum(entries)
        return trace
    trace.ops = list(trace.ops)
    first_end = [i for i, event in enumerate(trace.events) if event.kind == STEP][1:2] or [len(trace.events)]
    made = []
    for parameter, entries in enumerate(sizes):
        for size in entries:
            made.append(Event(ALLOC, len(trace.blocks)))
            trace.blocks.append(
                Block(size, "optimizer states", len(trace.ops), parameter, trace.parameters[parameter].name)
            )
    moved = 2 * sum(map(sum, sizes)) + 3 * trace.parameter_bytes
    trace.ops.append(OpCall(f"drivetrain::{name}", "optimizer", "optimizer", False, 0.0, moved, "float32", (), (), -1))
    call = Event(OP, len(trace.ops) - 1)
    trace.events = [*trace.events[: first_end[0]], call, *made, *trace.events[first_end[0] :], call]
    trace.optimizers = [*trace.optimizers, name]
    return trace


# ---- The memory over a step as a picture.


class Picture:
    """A figure of matplotlib that notebooks show without pyplot."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        memory = io.BytesIO()
        self.figure.savefig(memory, format="png", dpi=110)
        return memory.getvalue()


def draw(plan: Plan, path: Path | None) -> Picture:
    """Draws allocated and reserved memory over the time of the plan's last step; see `Plan.plot`."""
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ValueError(f"path is {path}, expected a name that ends in .svg or .png")
    require("matplotlib", "drawing")
    figure_module: Any = importlib.import_module("matplotlib.figure")  # without pyplot's global state
    figure = figure_module.Figure(figsize=(9, 3.6), layout="constrained")
    panel = figure.subplots()
    times, allocated, reserved, spans = _series(plan)
    for phase, (begin, end) in spans.items():
        panel.axvspan(begin, end, color=_COLORS[phase], alpha=0.12, label=phase, linewidth=0)
    panel.step(times, allocated, where="post", color="#333333", label="allocated")
    if plan.device.kind == "cuda":
        panel.step(times, reserved, where="post", color="#e45756", linewidth=1, label="reserved")
    fixed = plan.memory.fixed_bytes / _GIB
    capacity = plan.memory.capacity / _GIB - fixed
    if capacity < 1.5 * max(reserved, default=0.0):
        panel.axhline(capacity, color="#e45756", linestyle="--", linewidth=1, label="capacity")
    panel.set_xlabel("ms of the step")
    panel.set_ylabel("GiB")
    panel.set_ylim(bottom=0)
    panel.margins(x=0)
    panel.legend(fontsize=8, loc="upper right")
    if path is not None:
        figure.savefig(path)
    return Picture(figure)


def _series(plan: Plan) -> tuple[list[float], list[float], list[float], dict[str, tuple[float, float]]]:
    """Returns the times in ms, both memories in GiB, and the span of each phase."""
    clock = 0.0
    times, allocated, reserved = [], [], []
    spans: dict[str, tuple[float, float]] = {}
    for moment in plan.memory.timeline:
        begin = clock
        if moment.op >= 0:
            clock += 1e3 * plan.time.op_seconds[moment.op]
            phase = plan.trace.ops[moment.op].phase
            spans[phase] = (spans.get(phase, (begin, 0.0))[0], clock)
        times.append(begin)
        allocated.append(moment.allocated / _GIB)
        reserved.append(moment.reserved / _GIB)
    return times, allocated, reserved, spans
