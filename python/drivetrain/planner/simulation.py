"""Simulates data-parallel steps event by event: the reducer's own bucket plan, slow ranks, and links that degrade."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import _C
from .network import Cluster, all_reduce_seconds, split_seconds

_PROBES = tuple(1 << power for power in range(6, 34))  # bytes at which the planner learns the model's costs


@dataclass(frozen=True)
class Workload:
    """A training step of one rank, on a device that waits for nothing.

    Attributes:
        name: Its name.
        sizes: Elements of each parameter, in the order of registration.
        element_bytes: Bytes of an element of a gradient.
        ready: Seconds from the begin of backward at which each gradient is there.
        forward_s: Seconds of forward.
        optimizer_s: Seconds of the optimizer.
    """

    name: str
    sizes: tuple[int, ...]
    element_bytes: int
    ready: tuple[float, ...]
    forward_s: float
    optimizer_s: float = 0.0

    @property
    def gradient_bytes(self) -> int:
        return sum(self.sizes) * self.element_bytes

    @property
    def backward_s(self) -> float:
        return max(self.ready)

    @property
    def alone_s(self) -> float:
        """Seconds of a step without other ranks."""
        return self.forward_s + self.backward_s + self.optimizer_s


def transformer(
    layers: int, hidden: int, vocabulary: int, tokens: int, flops_per_s: float, element_bytes: int = 4
) -> Workload:
    """Returns the step of a GPT. Its backward takes 4, and its forward 2 FLOPs per weight and token.

    Args:
        layers: Number of blocks.
        hidden: Width.
        vocabulary: Rows of the embedding, whose gradient comes last.
        tokens: Tokens of a rank in a step.
        flops_per_s: FLOP/s that the device achieves.
        element_bytes: Bytes of an element of a gradient.
    """
    block = [hidden, hidden, 3 * hidden * hidden, hidden * hidden, hidden, hidden, 4 * hidden * hidden, 4 * hidden**2]
    sizes = [vocabulary * hidden, *block * layers, hidden, hidden]
    ready, clock = [0.0] * len(sizes), 0.0
    for index in reversed(range(len(sizes))):
        clock += 4 * sizes[index] * tokens / flops_per_s
        ready[index] = clock
    name = f"GPT of {sum(sizes) / 1e9:.2f} B parameters, {tokens} tokens per rank"
    return Workload(name, tuple(sizes), element_bytes, tuple(ready), clock / 2)


@dataclass(frozen=True)
class Bucket:
    """A bucket of a plan.

    Attributes:
        bytes: Its bytes, with padding.
        ready_s: Seconds from the begin of backward until its last gradient, and earlier buckets' gradients, exist.
    """

    bytes: int
    ready_s: float


def capped_plan(workload: Workload, caps: Sequence[int]) -> list[Bucket]:
    """Returns the buckets that the reducer makes with these sizes, in bytes; the last repeats."""
    return _timed(workload, _C.plan_buckets(_native_sizes(workload), _order(workload), list(caps)))


def measured_plan(workload: Workload, seconds: Callable[[int], float], in_background: bool = True) -> list[Bucket]:
    """Returns the buckets that the reducer's planner chooses for the cost of all-reduces.

    Args:
        workload: The step.
        seconds: Seconds of an all-reduce by its bytes.
        in_background: As the cluster's.
    """
    costs: list[tuple[int, float]] = []
    for num_bytes in _PROBES:
        costs.append((num_bytes, max(seconds(num_bytes), costs[-1][1] if costs else 0.0)))
    buckets, _ = _C.plan_measured_buckets(
        _native_sizes(workload), _order(workload), list(workload.ready), costs, in_background
    )
    return _timed(workload, buckets)


def _native_sizes(workload: Workload) -> list[tuple[int, int, int]]:
    return [(numel, workload.element_bytes, 0) for numel in workload.sizes]


def _order(workload: Workload) -> list[int]:
    return sorted(range(len(workload.sizes)), key=lambda index: (workload.ready[index], -index))


def _timed(workload: Workload, buckets: list[tuple[int, int, list[tuple[int, int]]]]) -> list[Bucket]:
    plan: list[Bucket] = []
    for _, num_bytes, entries in buckets:
        ready = max(workload.ready[param] for param, _ in entries)
        plan.append(Bucket(num_bytes, max(ready, plan[-1].ready_s if plan else 0.0)))
    return plan


def exposed_seconds(plan: Sequence[Bucket], seconds: Callable[[int], float], in_background: bool = True) -> float:
    """Returns the seconds by which all-reduces lengthen a backward, in closed form: no rank is slow, no link fails."""
    end = ready = 0.0
    for bucket in plan:
        start = max(end, bucket.ready_s) if in_background else end + bucket.ready_s - ready
        end, ready = start + seconds(bucket.bytes), bucket.ready_s
    return max(0.0, end - ready)


# ---- Events.


@dataclass(frozen=True)
class Stragglers:
    """Says how ranks differ in speed.

    Attributes:
        slow: By rank, the factor by which its forward and backward take longer.
        jitter: Standard deviation of the logarithm of every rank's and step's time. 0: none.
        seed: Seed of the jitter.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.jitter < 0 or any(factor <= 0 for factor in self.slow.values()):
            raise ValueError(f"jitter is {self.jitter} and slow {dict(self.slow)}, expected jitter >= 0, factors > 0")


@dataclass(frozen=True)
class LinkFault:
    """A time in which the slowest link on the way of all-reduces carries less.

    Attributes:
        begin_s: Its begin, in seconds of the simulation.
        end_s: Its end. It must have one, because a transfer would never end over a link that stays down.
        share: The share of the bandwidth that is left; 0: the link is down, and transfers wait.
    """

    begin_s: float
    end_s: float
    share: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.begin_s < self.end_s < math.inf and 0 <= self.share <= 1):
            raise ValueError(f"{self} is no fault, expected 0 <= begin_s < end_s < inf and a share from 0 to 1")


@dataclass(frozen=True)
class SimulatedStep:
    """A step of all ranks, in seconds.

    Attributes:
        begin_s: Its begin.
        end_s: The end of the last rank's optimizer.
        exposed_s: Time between the end of the slowest rank's backward and the end of the last all-reduce.
        straggled_s: Time by which the slowest rank's forward and backward took longer than the workload's.
    """

    begin_s: float
    end_s: float
    exposed_s: float
    straggled_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


_READY, _LATENCY_OVER, _TRANSFERRED, _LINK = range(4)


class _Network:
    """Carries one all-reduce at a time. Its transfer slows while a link fault lasts."""

    def __init__(self, events: list[tuple[float, int, int, int]], faults: Sequence[LinkFault]) -> None:
        self._events = events
        self._faults = faults
        self._remaining = self._since = 0.0
        self._number = 0  # of the expected end, so that older ones are known as outdated
        self._is_moving = False
        for fault in faults:
            for moment in (fault.begin_s, fault.end_s):
                heapq.heappush(events, (moment, _LINK, 0, 0))

    def _share(self, now: float) -> float:
        return min((fault.share for fault in self._faults if fault.begin_s <= now < fault.end_s), default=1.0)

    def start(self, now: float, seconds: float) -> None:
        """Starts a transfer that takes so long where no fault is."""
        self._remaining, self._since, self._is_moving = seconds, now, True
        self._rate = self._share(now)
        self._expect(now)

    def change(self, now: float) -> None:
        """Goes on with another rate."""
        if self._is_moving:
            self._remaining -= (now - self._since) * self._rate
            self._since, self._rate = now, self._share(now)
            self._expect(now)

    def is_over(self, number: int) -> bool:
        """Returns true if an end is the one that is expected last, and ends the transfer."""
        if not self._is_moving or number != self._number:
            return False
        self._is_moving = False
        return True

    def _expect(self, now: float) -> None:
        self._number += 1
        if self._rate > 0:
            end = now + max(0.0, self._remaining) / self._rate
            heapq.heappush(self._events, (end, _TRANSFERRED, self._number, 0))


def simulate(
    workload: Workload,
    plan: Sequence[Bucket],
    cluster: Cluster,
    ranks: int,
    steps: int = 1,
    stragglers: Stragglers | None = None,
    faults: Sequence[LinkFault] = (),
    algorithm: str | None = None,
) -> list[SimulatedStep]:
    """Simulates steps. An all-reduce begins when every rank has filled its bucket and the one before it has ended.

    Args:
        workload: The step of each rank.
        plan: The buckets.
        cluster: The cluster.
        ranks: Number of ranks.
        steps: Number of steps. The next one begins when all ranks have ended the one before.
        stragglers: The slow ranks; None: none.
        faults: The times at which links fail.
        algorithm: As for `all_reduce_seconds`.

    Raises:
        ValueError: `ranks` or `steps` is below 1, the plan is empty, or a slow rank is none of the ranks.
    """
    stragglers = stragglers or Stragglers()
    if ranks < 1 or steps < 1 or not plan:
        raise ValueError(f"{ranks} ranks, {steps} steps, {len(plan)} buckets: expected at least 1 of each")
    if beyond := [rank for rank in stragglers.slow if not 0 <= rank < ranks]:
        raise ValueError(f"slow has rank {beyond[0]}, expected ranks from 0 to {ranks - 1}")
    costs = [_cost(bucket.bytes, ranks, cluster, algorithm) for bucket in plan]
    random_s = random.Random(stragglers.seed)
    events: list[tuple[float, int, int, int]] = []
    network = _Network(events, faults)
    results: list[SimulatedStep] = []
    begin = 0.0
    for _ in range(steps):
        speeds = [
            stragglers.slow.get(rank, 1.0) * (random_s.lognormvariate(0, stragglers.jitter) if stragglers.jitter else 1)
            for rank in range(ranks)
        ]
        end = _simulate_backward(events, network, workload, plan, cluster.in_background, costs, begin, speeds)
        computed = begin + max(speeds) * (workload.forward_s + workload.backward_s)
        results.append(
            SimulatedStep(
                begin_s=begin,
                end_s=max(end, computed) + workload.optimizer_s,
                exposed_s=max(0.0, end - computed),
                straggled_s=(max(speeds) - 1) * (workload.forward_s + workload.backward_s),
            )
        )
        begin = results[-1].end_s
    return results


def _cost(num_bytes: int, ranks: int, cluster: Cluster, algorithm: str | None) -> tuple[float, float]:
    """Returns the latency and the transfer of the fastest algorithm."""
    if ranks == 1:
        return 0.0, 0.0
    names = cluster.algorithms if algorithm is None else (algorithm,)
    latency, transfer, _ = min((split_seconds(num_bytes, ranks, cluster, name) for name in names), key=lambda s: s[2])
    return latency, transfer


def _simulate_backward(
    events: list[tuple[float, int, int, int]],
    network: _Network,
    workload: Workload,
    plan: Sequence[Bucket],
    in_background: bool,
    costs: Sequence[tuple[float, float]],
    begin: float,
    speeds: Sequence[float],
) -> float:
    """Returns when the last all-reduce ends."""
    missing = [len(speeds)] * len(plan)
    clocks = [begin + speed * workload.forward_s for speed in speeds]  # of each rank's backward
    before = 0  # all-reduces that have ended

    def compute(rank: int, bucket: int) -> None:
        """Lets a rank compute until it has filled a bucket."""
        since = plan[bucket - 1].ready_s if bucket else 0.0
        clocks[rank] += speeds[rank] * (plan[bucket].ready_s - since)
        heapq.heappush(events, (clocks[rank], _READY, bucket, rank))

    def start(bucket: int, now: float) -> None:
        heapq.heappush(events, (now + costs[bucket][0], _LATENCY_OVER, bucket, 0))

    for rank in range(len(speeds)):
        compute(rank, 0)
    while events:
        now, kind, which, rank = heapq.heappop(events)
        if kind == _READY:
            missing[which] -= 1
            if in_background and which + 1 < len(plan):
                compute(rank, which + 1)
            if missing[which] == 0 and before == which:
                start(which, now)
        elif kind == _LATENCY_OVER:
            network.start(now, costs[which][1])
        elif kind == _LINK:
            network.change(now)
        elif network.is_over(which):
            before += 1
            if before == len(plan):
                return now
            if not in_background:  # the ranks' own threads have reduced, and go on with backward now
                for each in range(len(speeds)):
                    clocks[each] = now
                    compute(each, before)
            elif missing[before] == 0:
                start(before, now)
    raise AssertionError("the last all-reduce never ended: a link fault without an end was let through")


def efficiency(step_s: float, workload: Workload) -> float:
    """Returns the weak-scaling efficiency: the time of a step alone by the time with other ranks."""
    return workload.alone_s / step_s


def seconds_by_bytes(ranks: int, cluster: Cluster, algorithm: str | None = None) -> Callable[[int], float]:
    """Returns the function from bytes to the seconds of an all-reduce."""
    return lambda num_bytes: all_reduce_seconds(num_bytes, ranks, cluster, algorithm)
