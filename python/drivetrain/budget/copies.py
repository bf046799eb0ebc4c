"""Measures the link to the host, and simulates the copies of offloaded values over it and the waits for them."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import nn

from .trace import STORAGE_FORMATS, Trace

_BACKWARD_PER_FORWARD = 2.0  # ratio of times: backward computes gradients of inputs and of weights
_MARGIN = 1.25  # factor on the time of a copy back when its latest start is computed
_LARGE_BYTES = 16 << 20  # one millisecond at 16 GB/s
_SMALL_BYTES = 512
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class HostLink:
    """Bandwidth and latency of copies between a device and pinned host memory.

    Attributes:
        out_bytes_per_second: from the device to the host.
        in_bytes_per_second: from the host to the device.
        copy_seconds: the latency of a copy, whatever its size.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    copy_seconds: float

    def out_seconds(self, num_bytes: int) -> float:
        return self.copy_seconds + num_bytes / self.out_bytes_per_second

    def in_seconds(self, num_bytes: int) -> float:
        return self.copy_seconds + num_bytes / self.in_bytes_per_second

    def __str__(self) -> str:
        return (
            f"{self.out_bytes_per_second / 1e9:.1f} GB/s to the host, {self.in_bytes_per_second / 1e9:.1f} GB/s back, "
            f"{1e6 * self.copy_seconds:.0f} us a copy"
        )


def link_of(model: nn.Module) -> HostLink | None:
    """Returns the slowest link of the devices that hold the model; None on the CPU, where no copy leaves the host."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    found = [device for device in devices if device.type not in ("cpu", "meta")]
    return min((measured_link(device) for device in found), key=lambda link: link.out_bytes_per_second, default=None)


@functools.cache
def measured_link(device: torch.device) -> HostLink:
    """Measures the link of a device once per process, which takes a few milliseconds."""
    large, small = (_copy_seconds(device, num_bytes) for num_bytes in (_LARGE_BYTES, _SMALL_BYTES))
    out_bytes_per_second, in_bytes_per_second = (
        _LARGE_BYTES / max(of_large - of_small, 1e-9) for of_large, of_small in zip(large, small, strict=True)
    )
    return HostLink(out_bytes_per_second, in_bytes_per_second, max(small))


def _copy_seconds(device: torch.device, num_bytes: int) -> list[float]:
    """Returns the shortest seconds of a few copies to the host and back. The first round only warms up."""
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    shortest = [float("inf"), float("inf")]
    for _ in range(1 + _ROUNDS):
        events = [torch.Event(device, enable_timing=True) for _ in range(3)]
        events[0].record()
        on_host.copy_(on_device, non_blocking=True)
        events[1].record()
        on_device.copy_(on_host, non_blocking=True)
        events[2].record()
        events[2].synchronize()
        took = (begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events))
        shortest = list(map(min, shortest, took))
    return shortest


class Prefetch(NamedTuple):
    """The copy back of `value` starts when backward takes the value `at`. Both are numbers of the trace."""

    value: int
    at: int


@dataclasses.dataclass
class Copies:
    """The copies to the host and back under a plan.

    Attributes:
        num_bytes: the bytes copied in each direction.
        num_values: the number of offloaded values.
        host_bytes: the most that the pool of host memory reserves, which is a power of two per value.
        exposed_seconds: the time that the step waits for copies.
        prefetches: when copies back start.
    """

    num_bytes: int
    num_values: int
    host_bytes: int
    exposed_seconds: float
    prefetches: list[Prefetch]

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Copies":
        return cls(**{**plain, "prefetches": [Prefetch(*pair) for pair in plain["prefetches"]]})


class StepClock:
    """Estimates when a step makes each value and takes it in backward, without the delays of replays and copies."""

    def __init__(self, trace: Trace) -> None:
        self.made_at: dict[int, float] = {}
        saved_at: dict[int, list[float]] = {}
        clock = 0.0
        for begin, one in trace.passes_at():
            ends = []
            for op in one.ops:
                clock += op.seconds or 0.0
                ends.append(clock)
                self.made_at.update((begin + write, clock) for write in op.writes)
            for save in one.saves:
                if save.value >= 0:
                    saved_at.setdefault(begin + save.value, []).append(ends[save.op] if save.op < len(ends) else clock)
        self.forward_seconds = clock
        self.used_at: list[float] = []  # per use; backward visits the operations of forward in reverse order
        now = clock
        for use in trace.uses:
            if not use.is_release:
                saves = saved_at.get(use.value, [])
                at = saves.pop() if saves else self.made_at.get(use.value, 0.0)
                now = max(now, clock + _BACKWARD_PER_FORWARD * (clock - at))
            self.used_at.append(now)


def copies_of(
    trace: Trace,
    policy: list[int],
    peak_bytes: list[int],
    brought_back_at: list[int],
    budget_bytes: int,
    link: HostLink,
) -> Copies:
    """Simulates the copies of offloaded values over the link, one after the other in each direction.

    A copy out starts when the value is made. A copy back starts as late as possible, and no earlier than the budget has
    room for it. Values that are still being copied out after forward count for the budget, so the step may have to wait
    for them.

    Args:
        policy: The save/recompute policy of the solver: per value -1 (recompute), 0 (keep), or n for its n-th format.
        peak_bytes: The "peaks" of `_C.activation_simulate` for this policy.
        brought_back_at: Another result of it: per value, the use at which it is back on the device, or -1.
        budget_bytes: The budget of the plan.
        link: The measured link.
    """
    clock = StepClock(trace)
    sizes: dict[int, int] = {}
    for begin, one in trace.passes_at():
        for index, value in enumerate(one.values):
            choice = policy[begin + index]
            if choice <= 0 or brought_back_at[begin + index] < 0:
                continue
            if value.formats[choice - 1].storage_format == STORAGE_FORMATS["host"]:
                sizes[begin + index] = value.num_bytes
    out_ends, exposed = _copies_out(clock, sizes, peak_bytes[0], budget_bytes, link)
    in_order = sorted(sizes, key=lambda value: brought_back_at[value])
    latest: dict[int, float] = {}  # when each copy back must start so that it and all later ones end in time
    end = float("inf")
    for number in reversed(in_order):
        end = min(clock.used_at[brought_back_at[number]], end) - _MARGIN * link.in_seconds(sizes[number])
        latest[number] = end
    peaks = list(peak_bytes)
    prefetches: list[Prefetch] = []
    # A tape can start a copy back where it first takes a value that its own operations made.
    pass_of = {begin + i: which for which, (begin, one) in enumerate(trace.passes_at()) for i in one.made}
    first_takes = {use.value: index for index, use in reversed(list(enumerate(trace.uses))) if not use.is_release}
    free_at, delay, first = 0.0, exposed, 0
    for number in in_order:
        use = at = brought_back_at[number]
        for earlier in range(use - 1, first - 1, -1):
            if clock.used_at[at] <= latest[number] or peaks[earlier + 1] + sizes[number] > budget_bytes:
                break
            taken = trace.uses[earlier].value
            if first_takes.get(taken) == earlier and pass_of.get(taken, -1) == pass_of.get(number):
                at = earlier
        if at < use:
            prefetches.append(Prefetch(number, trace.uses[at].value))
            for between in range(at + 1, use + 1):
                peaks[between] += sizes[number]
        first = at
        start = max(clock.used_at[at] + delay, free_at, out_ends[number])
        free_at = start + link.in_seconds(sizes[number])
        delay += max(0.0, free_at - (clock.used_at[use] + delay))
    host_bytes = sum(1 << (size - 1).bit_length() for size in sizes.values())
    return Copies(sum(sizes.values()), len(sizes), host_bytes, delay, prefetches)


def _copies_out(
    clock: StepClock, sizes: dict[int, int], forward_bytes: int, budget_bytes: int, link: HostLink
) -> tuple[dict[int, float], float]:
    """Returns when each copy out ends, and how long the step exceeds its budget after forward because of them."""
    ends: dict[int, float] = {}
    free_at = 0.0
    for value in sorted(sizes, key=lambda value: clock.made_at.get(value, 0.0)):
        free_at = max(free_at, clock.made_at.get(value, 0.0)) + link.out_seconds(sizes[value])
        ends[value] = free_at
    waiting = forward_bytes + sum(sizes[value] for value, end in ends.items() if end > clock.forward_seconds)
    exposed = 0.0
    for value, end in sorted(ends.items(), key=lambda item: item[1]):
        if waiting <= budget_bytes:
            break
        if end > clock.forward_seconds:
            waiting -= sizes[value]
            exposed = end - clock.forward_seconds
    return ends, exposed
