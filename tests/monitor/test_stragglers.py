"""Tests which rank is named as slow: the rule by simulation, and two real ranks."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Kept, make_batches, make_model
from torch import nn

import drivetrain
from drivetrain.monitor import Monitor
from drivetrain.monitor.stragglers import WINDOW, Straggler, find_straggler, profile_of
from drivetrain.phases import PHASES

NORMAL_S = {"data": 0.002, "forward": 0.030, "backward": 0.060, "optimizer": 0.010, "host": 0.001}


def simulate(
    rng: random.Random, ranks: int, steps: int, jitter: float, slow: int = -1, phase: str = "", factor: float = 1.0
) -> list[list[dict[str, float]]]:
    """Returns seconds by phase of every step, per rank. One step in fifty has a pause of half its time, as a garbage
    collection makes it. Faster ranks wait in communication for the slowest."""
    own: list[list[dict[str, float]]] = [[] for _ in range(ranks)]
    for _ in range(steps):
        times = []
        for rank in range(ranks):
            step = dict.fromkeys(PHASES, 0.0)
            for name, seconds in NORMAL_S.items():
                step[name] = seconds * max(rng.gauss(1.0, jitter), 0.2)
            if rng.random() < 0.02:
                step["host"] += 0.5 * sum(NORMAL_S.values())
            if rank == slow:
                step[phase] += (factor - 1) * sum(NORMAL_S.values())
            times.append(step)
        longest = max(sum(step.values()) for step in times)
        for rank, step in enumerate(times):
            step["communication"] = longest - sum(step.values())
            own[rank].append(step)
    return own


def compared(runs: dict[int, list[dict[str, float]]]) -> Straggler | None:
    profiles = {rank: profile_of(run) for rank, run in runs.items()}
    return find_straggler({rank: profile for rank, profile in profiles.items() if profile is not None})


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(2, 16),
    where=st.floats(0, 0.999),
    phase=st.sampled_from(["data", "forward", "backward", "optimizer", "checkpoint"]),
    jitter=st.sampled_from([0.0, 0.01, 0.03]),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_rank_5_percent_slower_is_named_within_50_steps(
    seed: int, ranks: int, where: float, phase: str, jitter: float
) -> None:
    slow = int(where * ranks)
    runs = simulate(random.Random(seed), ranks, 50, jitter, slow, phase, 1.05)
    found = [compared({rank: run[:end] for rank, run in enumerate(runs)}) for end in range(WINDOW, 51)]
    assert any(one is not None and (one.rank, one.phase) == (slow, phase) for one in found)
    assert all(one is None or one.rank == slow for one in found)


@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.10])
def test_balanced_ranks_raise_no_alarm_in_10_000_steps(jitter: float) -> None:
    runs = simulate(random.Random(17), 4, 10_000, jitter)
    for end in range(WINDOW, 10_001, 20):
        assert compared({rank: run[end - WINDOW : end] for rank, run in enumerate(runs)}) is None


def test_nothing_is_said_before_all_ranks_have_enough_steps() -> None:
    runs = simulate(random.Random(0), 2, WINDOW, 0.0, 0, "data", 2.0)
    assert compared({0: runs[0]}) is None
    assert profile_of(runs[1][1:]) is None
    assert compared({0: runs[0], 1: runs[1]}) is not None


def slow_loader_on_rank_1() -> tuple[dict[str, float], Any, dict[str, list[str]]]:
    """Trains until rank 0 has named the slow rank, which it tells the others by a flag."""
    model = drivetrain.DistributedDataParallel(make_model(), report_hang_after=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()

    def batches() -> Iterator[Any]:
        for batch in make_batches(1) * 2000:
            if dist.get_rank() == 1:
                time.sleep(0.02)
            yield batch

    with Monitor(model, optimizer, to=[kept], progress=False) as monitor:
        for inputs, targets in monitor(batches()):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            is_done = torch.tensor([monitor.straggler is not None])
            with monitor.phase("communication"):
                dist.broadcast(is_done, 0)
            if is_done:
                break
    means = {phase: monitor.summary().share(phase) for phase in PHASES}
    texts = {kind: [one["text"] for one in kept.events if one["type"] == kind] for kind in ("straggler", "advice")}
    return means, monitor.straggler, texts


def test_two_real_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    (fast, straggler, texts), (slow, other, others_texts) = on_ranks(slow_loader_on_rank_1)
    assert (straggler.rank, straggler.phase) == (1, "data")
    pattern = r"rank 1 (is \d+% slower than|takes \d+\.\d times as long as) the others, which wait for it; "
    assert re.match(pattern + "it loses the time in: waiting for data$", texts["straggler"][0])
    # The fast rank waits for the slow one and not for the network.
    assert not [text for text in texts["advice"] + others_texts["advice"] if "exposed communication" in text]
    assert other is None
    assert others_texts["straggler"] == []
    # The fast rank waits in backward, for the gradients of the slow one.
    assert fast["communication"] > slow["communication"]
    assert slow["data"] > fast["data"]
