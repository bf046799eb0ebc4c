"""The monitor's thread: reads the trace, builds events, and hands them to sinks, the progress line and the advice."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import threading
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import _C
from ..ddp import nccl_ras
from ..ddp.control_block import ControlBlock, connection_to_store, host_name
from ..memory import host_memory
from ..optim.statistics import StepStatistics
from ..phases import LABELS, PHASES
from ..threads import Thread, settle_on_device
from .advice import Setup, advise
from .hangs import Hang, HangWatch, Places
from .stragglers import Exchange, Straggler
from .stream import Event, Stream, event
from .summary import Summary

if TYPE_CHECKING:
    from .monitor import Monitor

OUTSIDE = -1  # number of a step that is none: the time between epochs, and evaluations
# A look at the trace finds cold caches, which costs more than the steps that it takes: as few looks as the ring allows.
# Short steps fill it, and so do micro-batches, evaluations and a device's recomputation. Ranks also show their
# steps at multiples of the longer period by the clock, and rank 0 looks a little later. So it sees steps that are at
# most one such period old, where the hosts' clocks agree. A process without other ranks has nothing to show.
_LONE_POLL_S, _POLL_S, _BUSY_POLL_S = 0.8, 0.4, 0.1
_LATER_S = 0.05
_BUSY_STEPS_PER_S, _BUSY_RECORDS_PER_S = 80, 2000
_SYSTEM_S, _ADVICE_S = 5.0, 5.0
_STOP_S = 5.0
_PREFIX, _PERIOD_S = "drivetrain/monitor/places/", 1.0
_DRAIN_S, _DRAIN_POLL_S = 5.0, 0.002  # a device that stands still must not hold the end
_logger = logging.getLogger("drivetrain")


def is_filling(num_steps: int, num_records: int, seconds: float) -> bool:
    """Returns whether steps end, or records are written also outside of steps, so fast that the ring may fill up."""
    return num_steps > _BUSY_STEPS_PER_S * seconds or num_records > _BUSY_RECORDS_PER_S * seconds


def system_values(device: torch.device) -> dict[str, float]:
    """Returns load and memory of this process's host, and memory, percent and watts of the GPU that trains.

    Without pynvml, the GPU's percent and watts are left out.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    values: dict[str, float] = {
        "load_average": os.getloadavg()[0],
        "process_memory_bytes": pages * resource.getpagesize(),
        "memory_available_bytes": host_memory().available,
    }
    if device.type == "cuda":
        values["gpu_peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
        with contextlib.suppress(Exception):  # pynvml is missing, or a driver's NVML, or the GPU reports no value
            values["gpu_busy_percent"] = torch.cuda.utilization(device)
            values["gpu_power_watts"] = torch.cuda.power_draw(device) / 1e3
    return values


class Collector:
    """Turns accounts of a monitor's steps into events, in a thread that the training does not wait for."""

    def __init__(self, monitor: Monitor, reader: _C.TraceReader, stream: Stream, hangs: HangWatch) -> None:
        self.summary = Summary()
        self.advice: dict[str, str] = {}
        self.straggler: Straggler | None = None
        self.hang: Hang | None = None
        # Values of the script, and what optimizers have measured, by step.
        self.logged: deque[tuple[int, dict[str, float | torch.Tensor] | StepStatistics]] = deque()
        self.num_steps = 0
        self.attributed_ns = 0  # of all steps with complete accounts
        self.total_ns = 0  # of all steps
        self._monitor, self._reader, self._stream, self._hangs = monitor, reader, stream, hangs
        self._rank, self._progress = monitor._rank, monitor._progress
        # From the time at which several ranks are connected.
        self._exchange: Exchange | None = None
        self._places: Places | None = None
        self._has_warned = False
        self._due = dict.fromkeys(("system", "advice"), time.monotonic() + 1.0)
        self._delay_s = _LATER_S if self._rank == 0 else 0.0
        self._period = self._period_now()
        self._has_stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = Thread(self._work, "drivetrain-monitor")

    def start(self) -> None:
        """Starts the thread that takes steps from the trace."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and takes what the trace still holds."""
        self._has_stopped.set()
        self._thread.join(_STOP_S)
        if self._places is not None and not self._thread.is_alive():
            self._places.publish(self.num_steps, "past the end of its monitor")
        deadline = time.monotonic() + _DRAIN_S
        while not self._reader.has_read_all() and time.monotonic() < deadline:
            self.poll()
            time.sleep(_DRAIN_POLL_S)
        self.poll(is_last=True)

    def poll(self, is_last: bool = False) -> None:
        """Takes all steps that have ended since the last call."""
        with self._lock:
            # All at once, because each wake-up of a sink's thread costs more than the event.
            self._stream.send(*[step for account in self._reader.read() if (step := self._take(account)) is not None])
            self._send_logged()
            if is_last or self._is_due("advice", _ADVICE_S):
                self._advise(is_last)
            if not is_last and (period := self._period_now()) != self._period:
                self._period = period
                self._compare()
            if is_last or self._is_due("system", _SYSTEM_S):
                self._send("system", values=system_values(self._monitor._device), dropped=self._stream.dropped())
            if self._progress is not None:
                self._progress.show()

    def _work(self) -> None:
        wait_s = _BUSY_POLL_S
        while not self._has_stopped.wait(wait_s - (time.time() - self._delay_s) % wait_s):
            num_steps, num_records = self.num_steps, self._reader.num_read()
            settle_on_device()
            try:
                self.poll()
            except Exception:
                _logger.exception("monitor: a defect of drivetrain; the training goes on, and the monitor too")
            is_busy = self._monitor._device.type == "cuda" or is_filling(
                self.num_steps - num_steps, self._reader.num_read() - num_records, wait_s
            )
            wait_s = _BUSY_POLL_S if is_busy else _LONE_POLL_S if self._exchange is None else _POLL_S

    def _period_now(self) -> int:
        """Returns the number of the period of exchanges, by the clock that ranks share."""
        return int((time.time() - self._delay_s) / _POLL_S)

    def _is_due(self, what: str, period_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + period_s
        return True

    def _send(self, kind: str, **fields: object) -> None:
        sent = event(kind, self._rank, self.num_steps, **fields)
        self.summary.take(sent)
        self._stream.send(sent)

    def _send_logged(self) -> None:
        """Sends what was logged or measured. Reading a value of a GPU waits for it, here and not in the training."""
        while self.logged:
            step, values = self.logged.popleft()
            if isinstance(values, StepStatistics):
                self._stream.send(event("statistics", self._rank, step, **values.fields()))
                continue
            numbers = {name: float(value) for name, value in values.items()}
            finite = {name: number if math.isfinite(number) else str(number) for name, number in numbers.items()}
            self._stream.send(event("metrics", self._rank, step, values=finite))
            if self._progress is not None:
                self._progress.take_metrics(numbers)

    def _take(self, account: _C.StepAccount) -> Event | None:
        """Returns the event of a step, after all but the sinks have taken it; None for a time that is no step."""
        if account.step == OUTSIDE:
            return None
        self.num_steps = account.step
        if self._monitor._device.type == "cpu" and torch.cuda.is_initialized() and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "monitor: times are of the host, and CUDA runs behind it. A phase shows when work was enqueued or "
                "waited for, not when the GPU did it"
            )
        samples = self._monitor._samples.pop(account.step, 0)
        self.total_ns += account.wall_ns
        if account.is_complete:
            self.attributed_ns += sum(account.phase_ns)
        # A division rounds to the number that prints with nine decimals; a product prints with up to 17 digits.
        wall_s = account.wall_ns / 1e9
        step = event(
            "step",
            self._rank,
            account.step,
            wall_s=wall_s,
            phases={name: ns / 1e9 for name, ns in zip(PHASES, account.phase_ns, strict=True)},
            forwards=account.num_forwards,
            complete=account.is_complete,
            samples=samples,
            samples_per_s=samples / wall_s if samples and wall_s else None,
            **self._monitor._rates(account.step, samples, wall_s),
        )
        self.summary.take(step)
        if self._exchange is not None and account.is_complete:
            self._exchange.add(step["phases"])
        if self._progress is not None:
            self._progress.take(step, self._monitor._place)
        return step

    def _advise(self, is_last: bool) -> None:
        were_compared = self._exchange is not None and self._exchange.has_compared
        setup = Setup(
            num_workers=self._monitor._num_workers,
            num_cores=len(os.sched_getaffinity(0)),
            sees_loader=self._monitor._has_loader,
            ranks_are_even=were_compared and self.straggler is None,
        )
        for phase, text in advise(self.summary, setup).items():
            if phase not in self.advice or (is_last and text != self.advice[phase]):  # the figures of the whole run
                self._send("advice", phase=phase, text=text)
            self.advice[phase] = text

    def _compare(self) -> None:
        """Reports a training thread that stands still, and compares the ranks."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if self._exchange is None and group is not None and dist.get_world_size() > 1:
            ranks = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]
            beat_s, store = self._hangs.beat_s, connection_to_store(group)
            block = ControlBlock(store, _PREFIX, ranks, dist.get_rank(group), host_name(), beat_s or _PERIOD_S)
            self._exchange = Exchange(block)
            if beat_s > 0:
                self._places = Places(block, beat_s)
        step, standing = self.num_steps + 1, self._reader.standing()
        if self._places is not None and self._places.is_due():
            self._places.publish(step, self._hangs.place(standing))
        since_ns = standing.since_ns
        if self._places is not None and since_ns and time.monotonic_ns() - since_ns >= 1e9 * self._hangs.beat_s:
            self._places.listen(since_ns)
        if (hang := self._hangs.report(standing, step)) is not None:
            others = [] if self._places is None else self._places.others(step)
            text = "; ".join([hang.text, *others])
            # NCCL knows which ranks are behind in its collectives.
            said = "" if self._exchange is None else nccl_ras.describe()
            self.hang = hang = replace(hang, text=f"{text}. {said}" if said else text)
            self._send("hang", **asdict(hang))
            _logger.warning("monitor: %s", hang.text)
        if self._exchange is not None and (found := self._exchange.compare()) is not None:
            self._name(found)

    def _name(self, found: Straggler) -> None:
        if self.straggler is None or (found.rank, found.phase) != (self.straggler.rank, self.straggler.phase):
            how = (
                f"is {found.excess:.0%} slower than"
                if found.excess < 1
                else f"takes {1 + found.excess:.1f} times as long as"
            )
            text = f"rank {found.rank} {how} the others, which wait for it; it loses the time in: {LABELS[found.phase]}"
            self._send("straggler", slow_rank=found.rank, phase=found.phase, excess=found.excess, text=text)
            _logger.warning("monitor: %s", text)
        self.straggler = found
        self.advice.pop("communication", None)
