"""Measures the monitor: the time that it attributes, what it costs, and its account against torch.profiler's."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drivetrain.bench.measure import Row, median_interval, small_collections
from drivetrain.bench.ranks import on_ranks
from drivetrain.monitor import Monitor, read_events

from .monitor_training import STEPS, Training
from .traceml import traceml_row

_PROFILED_ROUNDS = 3
_ADDED_STEPS = 1000
_PAIRS = 500
_TARGET_STEP_S = 0.020  # the overhead is a share of such a step
_OVERHEAD, _ATTRIBUTED, _DIFFERENCE = 0.005, 0.97, 0.05
_SLOWER, _NAMED_STEPS = 1.05, 50
_NAMED_ROUNDS, _MOST_STEPS = 8, 400
_RANGES = ("data", "forward", "backward", "optimizer")


def run(threads: int = 2, rounds: int = 31) -> list[Row]:
    """Returns the rows of topic monitor.

    Args:
        threads: CPU threads of torch.
        rounds: Timed rounds of `STEPS` steps each, for each of: no monitor, the monitor, torch.profiler.
    """
    torch.set_num_threads(threads)
    training = Training()
    with tempfile.TemporaryDirectory() as name, small_collections():
        folder = Path(name)
        training.loop(training.batches(STEPS))
        return [
            *_overhead(training, folder),
            *_blocks(training, folder, rounds),
            *([found] if (found := traceml_row(threads, rounds)) else []),
            _steps_until_named(),
            *_account(training, folder),
        ]


def _overhead(training: Training, folder: Path) -> list[Row]:
    """Compares watched steps with bare ones, and measures the processor time that the monitor adds.

    The monitor's threads serve the watched steps and the bare ones alike. So their whole processor time is
    added to the watched ones, as if the training had stood still meanwhile.
    """
    alone = _measure_added(str(folder))
    of_ranks = on_ranks(functools.partial(_measure_added, str(folder)))
    bare_s, watched_s = _alternate_steps(training, folder)
    others_s = 1e-6 * alone[2]
    ratio, low, high = median_interval([(b + others_s) / a for a, b in zip(bare_s, watched_s, strict=True)])
    row = Row("step with the monitor, against bare ones in the same loop", "ms", 1e3 * statistics.median(bare_s))
    row.ours, row.ratio, row.low, row.high = 1e3 * (statistics.median(watched_s) + others_s), ratio, low, high
    row.target, row.met = f"<= {1 + _OVERHEAD:g}", ratio <= 1 + _OVERHEAD
    rows = [row]
    limit_us = 1e6 * _OVERHEAD * _TARGET_STEP_S
    for where, (bare_us, own_us, others_us) in {"": alone, ", on each of 2 ranks": of_ranks}.items():
        added_us = own_us + others_us
        row = Row(f"processor time that the monitor adds to a step of 20 ms{where}", "us", bare_us, added_us)
        row.target, row.met = f"<= {limit_us:g} us, 0.5 % of 20 ms", added_us <= limit_us
        rows.append(row)
    return rows


def _alternate_steps(training: Training, folder: Path) -> tuple[list[float], list[float]]:
    """Returns the seconds of bare and of watched steps that alternate in one loop.

    Machines change their speed by the second, and neighbors see one speed.
    """
    bare: list[float] = []
    watched: list[float] = []
    to = [f"jsonl:{folder}/alternate.jsonl"]
    with Monitor(training.model, training.optimizer, to=to, progress=False, flops=None) as monitor:
        batches = {True: training.batches(_PAIRS), False: iter(monitor(training.batches(_PAIRS)))}
        for index in range(2 * _PAIRS):
            is_bare = index % 4 in (0, 3)
            if is_bare:
                monitor._hooks.close()
            begin = time.perf_counter()
            training.step(next(batches[is_bare]))
            (bare if is_bare else watched).append(time.perf_counter() - begin)
            if is_bare:
                monitor._attach()
    return bare, watched


def _monitored(training: Training, folder: Path) -> tuple[float, Monitor]:
    """Runs a monitored loop and returns its seconds without the entry and the exit of the block."""
    to = [f"jsonl:{folder}/run.jsonl"]
    with Monitor(training.model, training.optimizer, to=to, progress=False, flops=None) as monitor:
        seconds = training.loop(iter(monitor(training.batches(STEPS))))
    return seconds, monitor


def _blocks(training: Training, folder: Path, rounds: int) -> list[Row]:
    """Compares blocks of steps: neighbors of a second each, whose speed may differ by more than the monitor takes."""

    def profiled() -> float:
        with profile(activities=[ProfilerActivity.CPU]):
            return training.loop(training.batches(STEPS))

    sides: dict[str, Callable[[], float]] = {
        "none": lambda: training.loop(training.batches(STEPS)),
        "monitor": lambda: _monitored(training, folder)[0],
        "profiler": profiled,
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(rounds):
        # The profiler takes long to begin and to end, so that it takes part in a few rounds only.
        names = [side for side in sides if side != "profiler" or index < _PROFILED_ROUNDS]
        for side in names[index % 2 :] + names[: index % 2]:
            seconds[side].append(sides[side]() / STEPS)
    rows = []
    whats = {
        "monitor": f"blocks of {STEPS} steps with the monitor, against none",
        "profiler": f"blocks of {STEPS} steps under torch.profiler, against none",
    }
    for side, what in whats.items():
        ratios = [watched / bare for watched, bare in zip(seconds[side], seconds["none"], strict=False)]
        row = Row(what, "ms", 1e3 * statistics.median(seconds["none"]), 1e3 * statistics.median(seconds[side]))
        row.ratio, row.low, row.high = median_interval(ratios)
        rows.append(row)
    return rows


def _measure_added(directory: str) -> tuple[float, float, float]:
    """Measures what the monitor adds to a step of 20 ms, in one process or as a rank.

    This is processor time of all threads. Other processes disturb it less than times, so that it judges the overhead on
    a busy machine as well. Every step makes the calls of a training twice: for a model that the monitor does not
    know, and for the watched one. Machines change their speed by the second, and a pair of calls sees one speed.
    Products of matrices fill the rest of the step, and the caches.

    Returns:
        On rank 0, microseconds per step of a bare step's calls, of what the monitor adds to them, and of its threads.
    """
    plain_backward = torch.autograd.backward  # the monitor replaces it
    watched, bare = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizer, bare_optimizer = (torch.optim.SGD(model.parameters(), lr=0.0) for model in (watched, bare))
    one, filling = torch.ones(1), torch.randn(400, 400)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def fill() -> None:
        end = time.perf_counter() + _TARGET_STEP_S / 2
        while time.perf_counter() < end:
            filling @ filling

    def bare_calls(batches: Iterator[Tensor]) -> None:
        plain_backward(bare(next(batches)).sum())
        bare_optimizer.step()

    def watched_calls(batches: Iterator[Tensor]) -> None:
        torch.autograd.backward(watched(next(batches)).sum())
        optimizer.step()

    def seconds_of(calls: Callable[[], None]) -> float:
        fill()
        begin = time.thread_time()
        calls()
        return time.thread_time() - begin

    def seconds_of_pairs(watched_batches: Iterator[Tensor]) -> tuple[list[tuple[float, float]], float]:
        """Returns the seconds of each step's bare and watched calls, and all other threads' seconds per step."""
        bare_batches = iter([one] * _ADDED_STEPS)
        sides = [functools.partial(bare_calls, bare_batches), functools.partial(watched_calls, watched_batches)]
        pairs, before = [], time.process_time() - time.thread_time()
        for step in range(_ADDED_STEPS):
            if step % 2:
                second, first = seconds_of(sides[1]), seconds_of(sides[0])
            else:
                first, second = seconds_of(sides[0]), seconds_of(sides[1])
            pairs.append((first, second))
        return pairs, (time.process_time() - time.thread_time() - before) / _ADDED_STEPS

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads would count as others
    _, others_s = seconds_of_pairs(iter([one] * _ADDED_STEPS))
    with Monitor(
        watched, optimizer, to=[f"jsonl:{directory}/added-{rank}.jsonl"], progress=False, flops=None
    ) as monitor:
        pairs, watched_others_s = seconds_of_pairs(iter(monitor([one] * _ADDED_STEPS)))
    torch.set_num_threads(num_threads)
    own_bare_s = statistics.median(bare_s for bare_s, _ in pairs)
    own_s = statistics.median(watched_s - bare_s for bare_s, watched_s in pairs)
    return 1e6 * own_bare_s, 1e6 * own_s, 1e6 * (watched_others_s - others_s)


def _steps_until_named() -> Row:
    """Counts the steps of 20 ms until a rank that has become 5 % slower is named."""
    counts = on_ranks(_name_slow_rank)
    what = f"steps of 20 ms until a rank 5 % slower is named: the fewest and the most of {_NAMED_ROUNDS} runs"
    row = Row(what, "steps", float(min(counts)), float(max(counts)))
    row.target, row.met = f"<= {_NAMED_STEPS}", max(counts) <= _NAMED_STEPS
    return row


def _name_slow_rank() -> list[int]:
    """Returns the counts of all runs, on rank 0. Rank 1 becomes slow at another time in each.

    Steps sleep, so that the ranks' other differences stay small. A collective in each step lets them wait for each
    other, as gradients do.
    """
    weight = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    counts = []
    for run in range(_NAMED_ROUNDS):
        first_slow = 40 + 5 * run
        is_named = torch.tensor([0])
        with Monitor(weight, optimizer, progress=False, flops=None) as monitor:
            for step, batch in enumerate(monitor([torch.ones(1)] * _MOST_STEPS)):
                is_slow = dist.get_rank() == 1 and step >= first_slow
                with monitor.phase("backward"):
                    time.sleep(_TARGET_STEP_S * (_SLOWER if is_slow else 1.0))
                weight(batch).sum().backward()
                is_named[0] = monitor.straggler is not None
                with monitor.phase("communication"):
                    dist.all_reduce(is_named)
                optimizer.step()
                if is_named:
                    break
        counts.append(step - first_slow + 1 if is_named else _MOST_STEPS)
    return counts


def _account(training: Training, folder: Path) -> list[Row]:
    """Compares the monitor's account of the same steps with the host's clock and with torch.profiler's ranges."""
    wall_s, monitor = _monitored(training, folder)
    steps_s = _all_steps(folder / "run.jsonl")
    attributed = sum(sum(step.values()) for step in steps_s)
    share = Row("time of the loop that is attributed to phases", "%", 100.0, 100.0 * attributed / wall_s)
    share.ratio = attributed / wall_s
    share.target, share.met = f">= {_ATTRIBUTED:g}", share.ratio >= _ATTRIBUTED
    named = Row("of it to named phases, not the rest of the host", "%", 100.0)
    named.ours = 100.0 * (1 - monitor.summary().share("host"))
    named.ratio = named.ours / 100.0
    rows = [share, named]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _monitored(training, folder)
    seen = {event.key: event.cpu_time_total * 1e-6 for event in profiler.key_averages()}
    return rows + compare_with_profiler(_all_steps(folder / "run.jsonl"), seen)


def compare_with_profiler(steps: Sequence[Mapping[str, float]], seen: Mapping[str, float]) -> list[Row]:
    """Returns a row for each phase of the loop.

    Args:
        steps: Seconds by phase of every step, by the monitor.
        seen: Seconds of all these steps by range, by torch.profiler; a phase's range is "bench:PHASE".
    """
    rows = []
    for name in _RANGES:
        ours, theirs = sum(step[name] for step in steps), seen[f"bench:{name}"]
        row = Row(f"{name} of {len(steps)} steps: torch.profiler's range, the monitor's phase", "ms", 1e3 * theirs)
        row.ours, row.ratio = 1e3 * ours, ours / theirs
        row.target, row.met = "within 5 %", abs(row.ratio - 1) <= _DIFFERENCE
        rows.append(row)
    return rows


def _all_steps(path: Path) -> list[dict[str, float]]:
    return [event["phases"] for event in read_events(path) if event["type"] == "step"]
