"""`Monitor`: accounts for the time of every training step, and sends it to files, dashboards and the terminal."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from numbers import Real
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from .. import _C
from ..optim.statistics import StepStatistics, arrived_statistics
from ..phases import span
from .collector import OUTSIDE, Collector
from .flops import FlopCount, obstacle_to_counting, peak_flops
from .hangs import Hang, HangWatch, print_stacks_on_request
from .hooks import Batches, attach, first_dimension, log_losses_of_accelerate
from .progress import Progress
from .sinks import make_sinks
from .stragglers import Straggler
from .stream import Sink, Stream, event
from .summary import Summary

_COUNTED_STEP = 2  # the first step also builds buckets and optimizer states


class Monitor:
    """Accounts for the time of every training step, without changing its results.

    ::

        with drivetrain.Monitor(model, optimizer, loader, to=["jsonl:run.jsonl"]) as monitor:
            for batch in monitor(loader):
                ...
        print(monitor.summary())

    A step lasts from the wait for its first batch to the wait for the next one after `optimizer.step()`. Loops without
    `monitor(loader)` end a step with each `optimizer.step()`. One monitor can be active in a process.

    Args:
        model: The module whose calls are the forward passes, wrapped or not. None counts the time between a batch and
            the backward pass as forward.
        optimizer: The optimizer, or several, whose `step` ends a step. None ends a step with each batch.
        loader: The loader of the loop, for advice on its workers. None takes the one that the first step iterates over.
        flops: "auto" counts the floating-point operations of the second step, which takes longer, for MFU and HFU. A
            number is taken as a sample's, without recomputation. None reports neither.
        peak_flops: Peak FLOP/s of a device, for MFU and HFU. None takes a data sheet's value, where the GPU is known.
        to: Sinks: "jsonl:FILE", "tensorboard:FOLDER", "prometheus:PORT", "prometheus:HOST:PORT", or
            `Sink` objects.
        progress: True shows a progress line on rank 0, and the table at the end; on stderr, or in the notebook.
        report_hang_after: Seconds after which a rank that stands still is reported, or three times what its phase has
            taken before, if that is more. None takes 8, and 20 for a phase that has never ended. 0 reports none.
        count: Takes a batch and returns its samples, or tokens; None counts the first dimension of its first tensor.

    Attributes:
        is_active: True inside of the with statement.

    Raises:
        TypeError: `model` is no module, `optimizer` is no optimizer and no sequence of them, or `count` is no function.
            Or `to` is no list, or holds something else than strings and sinks.
        ValueError: A sink's string, `flops`, `peak_flops` or `report_hang_after` is wrong.
        ImportError: The package of a sink is missing; the message says how to install it.
        NotImplementedError: The model is on a device other than the CPU and CUDA, or drivetrain was built without CUDA.
        OSError: The port of a sink is taken.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loader: Iterable[Any] | None = None,
        *,
        flops: str | float | None = "auto",
        peak_flops: float | None = None,
        to: Sequence[str | Sink] = (),
        progress: bool = True,
        report_hang_after: float | None = None,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        if not (flops is None or flops == "auto" or (_is_number(flops) and flops > 0)):  # type: ignore[operator]
            raise ValueError(f"flops is {flops!r}, expected 'auto', a number above 0, or None")
        if not (peak_flops is None or (_is_number(peak_flops) and peak_flops > 0)):
            raise ValueError(f"peak_flops is {peak_flops!r}, expected a number above 0, or None")
        if not (report_hang_after is None or (_is_number(report_hang_after) and report_hang_after >= 0)):
            raise ValueError(f"report_hang_after is {report_hang_after!r}, expected seconds >= 0, 0: never, or None")
        if not (count is None or callable(count)):
            raise TypeError(f"count is {count!r}, expected a function of a batch, or None")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module or None")
        self._device = _device_of(model)
        if why_not := _why_not_followed(self._device):
            raise NotImplementedError(f"Monitor cannot take times of {self._device}, where the model is: {why_not}")
        self._rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._model = model
        # They belong to the given loader, or else to the one that the loop iterates over. A reference to a loader would
        # keep its workers alive until the garbage collector runs, which waits 5 seconds for each of them.
        self._num_workers: int | None = getattr(loader, "num_workers", None)
        self._num_iterated: int | None = None
        self.is_active = False
        # None: all optimizers of the process, see ScriptMonitor.
        self._optimizers: list[torch.optim.Optimizer] | None = [] if optimizer is None else _as_list(optimizer)
        self._flops, self._peak_flops = flops, peak_flops
        self._why_not_counted = obstacle_to_counting(model) if model is not None and flops == "auto" else None
        self._hang_limit_s = report_hang_after
        self._count = count or first_dimension
        self._sinks = make_sinks(to, self._rank)
        self._shows_progress = progress and self._rank == 0
        self._progress_kind: str | None = None
        self._progress: Progress | None = None
        self._hooks = ExitStack()
        self._reader: _C.TraceReader | None = None
        self._stream: Stream | None = None
        self._collector: Collector | None = None
        self._num_steps = 0
        self._num_batches = 0  # since the last step ended
        self._num_samples = 0
        self._has_stepped = False
        self._has_loader = False
        self._samples: dict[int, int] = {}  # by step, until the collector takes them
        # The last statistics that were sent.
        self._measured: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepStatistics] = weakref.WeakKeyDictionary()
        self._place = (0, 0)
        self._counting: FlopCount | None = None
        self._is_counting = False
        self._flops_per_sample: tuple[float, float] | None = None  # of the model alone, and with recomputation

    # ---- The block.

    def __enter__(self) -> Monitor:
        if self._collector is not None:
            raise RuntimeError("this Monitor has been entered before: build a new one")
        self._reader = _C.TraceReader(sees_forwards=self._model is not None)
        try:
            self._stream = Stream(self._sinks)
            self._progress = Progress(self._progress_kind) if self._shows_progress else None
            self._follow(self._device)
            hangs = HangWatch(self._rank, threading.get_ident(), self._hang_limit_s, lambda: self._num_batches > 0)
            self._collector = Collector(self, self._reader, self._stream, hangs)
            self._stream.send(
                event(
                    "run",
                    self._rank,
                    0,
                    world_size=self._world_size,
                    host=platform.node(),
                    pid=os.getpid(),
                    device=str(self._device),
                    torch=str(torch.__version__),
                    parameters=sum(p.numel() for p in self._model.parameters()) if self._model is not None else None,
                    flops_not_counted=self._why_not_counted,
                )
            )
            self._attach()
            print_stacks_on_request()
            _C.trace_step(OUTSIDE)
            self._collector.start()
            self.is_active = True
        except BaseException:
            self._reader.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reader is not None
        assert self._stream is not None
        assert self._collector is not None
        self.is_active = False
        if self._is_counting:
            self._end_counting()
        for optimizer in list(self._measured) if error is None else ():
            self._send_statistics(optimizer, self._num_steps, waits=True)
        self._hooks.close()
        self._reader.stop()
        self._collector.stop()
        summary = self._collector.summary
        self._stream.send(
            event(
                "end",
                self._rank,
                self._num_steps,
                dropped=self._stream.dropped(),
                refused_records=self._reader.num_refused(),
                failed=kind is not None,
            )
        )
        self._stream.close()
        summary.note_dropped(self._stream.dropped())
        if self._progress is not None:
            self._progress.close()
            if summary.num_steps and self._progress.kind == "notebook":
                importlib.import_module("IPython.display").display(summary)
            elif summary.num_steps:
                print(summary, file=sys.stderr)
        self._model, self._optimizers = None, []  # this object is part of a cycle, which would keep their memory

    def __call__(self, loader: Iterable[Any]) -> Batches:
        """Returns an iterable over the loader that marks the waits for batches.

        Args:
            loader: Any iterable; an iterator, or a DataLoader of several epochs.

        Raises:
            RuntimeError: The call is outside of the block.
        """
        if not self.is_active:
            raise RuntimeError("monitor(loader) was called outside of the block: with Monitor(...) as monitor")
        self._place = (0, _length_of(loader))
        return self._batches(loader)

    def phase(self, name: str) -> Any:
        """Returns a context that attributes its time to a phase, for example "checkpoint".

        Args:
            name: "data", "copy", "forward", "backward", "communication", "recomputation", "optimizer", "checkpoint" or
                "host".

        Raises:
            ValueError: There is no phase of that name.
        """
        return span(name)

    # ---- Results.

    def summary(self) -> Summary:
        """Returns where the time of the steps so far went. It prints as a table, and shows as one in notebooks.

        Raises:
            RuntimeError: The block has not been entered.
        """
        collector = self._entered()
        if self._reader is not None and _C.trace_is_on():
            collector.poll()
        return collector.summary

    def log(self, **values: float | torch.Tensor) -> None:
        """Adds values of the script, such as `loss` and `lr`, to the progress line and all sinks.

        They belong to the step in progress, or to the one that has just ended in a loop without `monitor(loader)`. A
        value on a GPU is read later, in the monitor's thread, so that the training does not wait for it.

        Args:
            **values: Numbers, or tensors with one element.

        Raises:
            RuntimeError: The monitor is not active.
            TypeError: A value is no number and no tensor with one element.
        """
        if not self.is_active:
            raise RuntimeError("this Monitor is not active: call log() inside of its with statement")
        for name, value in values.items():
            if not (isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
                what = (
                    f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
                )
                raise TypeError(f"{name} has {what}, expected a number or a tensor with one element")
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}
        # A copy, because the script may write to the tensor before the monitor's thread reads it.
        later = {name: tensor.clone() for name, tensor in tensors.items() if tensor.is_cuda}
        read = {
            name: later[name] if name in later else float(tensors.get(name, value)) for name, value in values.items()
        }
        self._entered().logged.append((self._num_steps + bool(self._num_batches), read))

    @property
    def advice(self) -> list[str]:
        """Returns one sentence with cause and remedy for each phase that takes more than its share."""
        return list(self._entered().advice.values())

    @property
    def straggler(self) -> Straggler | None:
        """The rank that makes the others wait, as rank 0 sees it; None if there is none, and on other ranks."""
        return self._entered().straggler

    @property
    def hang(self) -> Hang | None:
        """The last report that this rank stood still; None if there was none."""
        return self._entered().hang

    @property
    def attributed_share(self) -> float:
        """Share of the time of all steps whose account is complete, 0 to 1."""
        collector = self._entered()
        return collector.attributed_ns / collector.total_ns if collector.total_ns else 1.0

    def _entered(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("this Monitor has not been entered: use it in a with statement")
        return self._collector

    # ---- Steps.

    def _batches(self, loader: Iterable[Any], make_iterator: Callable[[], Iterator[Any]] | None = None) -> Batches:
        """Returns an iterable over the batches of a loader that marks the waits for them."""
        self._num_iterated = getattr(loader, "num_workers", None)
        return Batches(loader, self, make_iterator)

    def _before_batch(self) -> None:
        """Ends the step, if its optimizer step has been made; time without batches belongs to no step."""
        if self._is_counting:
            self._end_counting()
        if self._num_batches == 0:
            _C.trace_step(OUTSIDE)
        elif self._is_step_over():
            self._end_step()
        self._has_loader = True

    def _end_batches(self) -> None:
        """Ends the last step; batches without an optimizer step, as of an evaluation, belong to none."""
        if not self.is_active:  # an iterator of the past, which Python has kept with an error's traceback
            return
        self._before_batch()
        if self._num_batches:
            _C.trace_step(OUTSIDE)
            self._num_batches = self._num_samples = 0

    def _take_batch(self, batch: Any) -> None:
        self._num_batches += 1
        samples = self._count(batch)
        self._num_samples += samples if type(samples) is int else _as_count(samples)
        self._place = (self._place[0] + 1, self._place[1])
        if self._flops == "auto" and self._why_not_counted is None and self._num_steps + 1 == _COUNTED_STEP:
            self._counting = FlopCount() if self._counting is None else self._counting
            self._counting.__enter__()  # type: ignore[no-untyped-call]
            self._is_counting = True

    def _attach(self) -> None:
        """Marks the model's calls, backward passes and optimizer steps, until `_hooks` is closed."""
        self._hooks = attach(self._model, self._optimizers, self._end_optimizer_step)
        self._hooks.callback(log_losses_of_accelerate(self.log))

    def _follow(self, device: torch.device) -> None:
        """Takes the times of that device from now on."""
        assert self._reader is not None
        self._device = device
        if device.type == "cuda":
            self._reader.follow_device(torch.cuda.current_device() if device.index is None else device.index)

    def _end_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_stepped and self._model is None and self._device.type == "cpu":
            # Without a model, the optimizer tells where the training runs.
            device = _device_of(optimizer)
            if device.type == "cuda" and not _why_not_followed(device):
                self._follow(device)
        self._has_stepped = True
        self._send_statistics(optimizer, self._num_steps + 1)
        if not self._has_loader:
            self._end_step()

    def _send_statistics(self, optimizer: torch.optim.Optimizer, step: int, waits: bool = False) -> None:
        """Sends what has arrived since the last time, with the step that has measured it."""
        if (found := arrived_statistics(optimizer, waits)) is None or found[0] is self._measured.get(optimizer):
            return
        self._measured[optimizer], age = found
        self._entered().logged.append((max(step - age, 1), found[0]))

    def _is_step_over(self) -> bool:
        return self._has_stepped or self._optimizers == []

    def _end_step(self) -> None:
        self._num_steps += 1
        self._num_workers = self._num_iterated if self._num_workers is None else self._num_workers
        self._samples[self._num_steps] = self._num_samples
        _C.trace_step(self._num_steps)
        self._num_batches = self._num_samples = 0
        self._has_stepped = False

    def _end_counting(self) -> None:
        assert self._counting is not None
        self._counting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_counting = False
        if self._is_step_over() and self._num_samples:
            forward, total = self._counting.forward, self._counting.total
            # By convention a backward pass takes twice the forward pass's operations. It takes fewer where the inputs
            # of the first layer need no gradient.
            model = min(3 * forward, total)
            self._flops_per_sample = (model / self._num_samples, total / self._num_samples)

    def _rates(self, step: int, samples: int, seconds: float) -> dict[str, float | None]:
        rates: dict[str, float | None] = {"mfu": None, "hfu": None}
        if self._flops is None:
            return rates
        dtype = self._counting.dtype if self._counting is not None else torch.get_default_dtype()
        peak = self._peak_flops or peak_flops(self._device, dtype)
        per_sample = self._flops_per_sample
        if isinstance(self._flops, int | float):
            per_sample = (float(self._flops), 0.0)
        elif step == _COUNTED_STEP and self._counting is not None:
            rates["counted_flops"] = True
        if peak and per_sample and samples and seconds:
            rates["mfu"] = per_sample[0] * samples / seconds / peak
            if per_sample[1]:
                rates["hfu"] = per_sample[1] * samples / seconds / peak
        return rates


def _as_list(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    # A scheduler or a scaler has no hooks, and its steps would go unseen.
    if not isinstance(found, Iterable) or not all(isinstance(one, torch.optim.Optimizer) for one in found):
        raise TypeError(f"optimizer is {optimizer!r}, expected a torch.optim.Optimizer, a sequence of them, or None")
    # Accelerate's optimizers hold the one whose hooks run, and skip its step inside of an accumulation.
    return [getattr(one, "optimizer", one) for one in found]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_count(samples: Any) -> int:
    """Returns what `count` has returned as a plain number, which sinks can write; it may be a tensor."""
    try:
        number = samples.item() if hasattr(samples, "item") else samples
    except (RuntimeError, ValueError):  # of several elements
        number = None
    if not isinstance(number, int | float):
        raise TypeError(f"count returned {samples!r}, expected a number of samples")
    return cast(int, number)


def _length_of(loader: Iterable[Any]) -> int:
    """Returns the number of batches; 0 if it is not known."""
    try:
        return len(loader) if isinstance(loader, Sized) else 0
    except (TypeError, NotImplementedError):  # a DataLoader of a dataset that has no length
        return 0


def _device_of(owner: nn.Module | torch.optim.Optimizer | None) -> torch.device:
    parameters: Iterator[torch.Tensor] = iter(())
    if isinstance(owner, torch.optim.Optimizer):
        parameters = (parameter for group in owner.param_groups for parameter in group["params"])
    elif owner is not None:
        parameters = owner.parameters()
    parameter = next(parameters, None)
    return parameter.device if parameter is not None else torch.device("cpu")


def _why_not_followed(device: torch.device) -> str:
    """Returns why the times of a device cannot be taken; "" if they can."""
    if device.type == "cpu" or (device.type == "cuda" and _C.has_cuda()):
        return ""
    if device.type == "cuda":
        return "drivetrain was built without CUDA, as `drivetrain doctor` shows. Build it where nvcc is on PATH"
    return "it takes only CPU and CUDA devices. Leave the monitor out there"
