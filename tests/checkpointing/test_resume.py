"""Tests that a training continues with the same bits after it was killed, and at another number of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from effort import rounds
from resumed_training import SAMPLES, Case, Death, assert_same_bits, run, steps_of

FURTHER = rounds(40, whole=200)  # steps after the last resume: two epochs and more

CASES = [
    Case("ours"),
    Case("8-bit", optimizer="ours 8-bit", bfloat16=True),
    Case("torch", optimizer="torch", sampler="random"),
    Case("torch with scaler", optimizer="torch sgd", scaler=True, sampler="random with generator"),
    Case("window", window=3),
    Case("window with scaler", window=4, scaler=True, optimizer="torch", sampler="distributed"),
    Case("own accumulation", no_sync=3, optimizer="ours 8-bit", bfloat16=True),
    Case("workers", workers=2),
    Case("persistent workers", workers=2, persistent=True, sampler="random"),
    Case("stateful", sampler="stateful"),
    Case("stateful workers", sampler="stateful", workers=2),
    Case("two ranks", wrapper="ours"),
    Case("ours, window", wrapper="ours", window=3, optimizer="ours 8-bit", bfloat16=True),
    Case("torch, own accumulation", wrapper="torch", no_sync=3, optimizer="torch", sampler="distributed"),
    Case("torch, workers", wrapper="torch", optimizer="torch sgd", workers=1),
]


def deaths(seed: str) -> list[Death]:
    """Draws a step and a point for two kills; the second is after the first."""
    rng = random.Random(seed)
    first = rng.randrange(2, 40)
    return [Death(step, rng.choice(["forward", "backward", "step"])) for step in (first, first + rng.randrange(2, 40))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_killed_run_continues_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    """One with a wrapper has two ranks."""
    world_size = 2 if case.wrapper else 1
    first, second = deaths(case.name)
    total = second.step + FURTHER
    for death in (first, second, None):
        run(case, tmp_path / "killed", total, world_size, death)
    run(case, tmp_path / "reference", total, world_size, every=None)
    assert_same_bits(tmp_path / "killed", tmp_path / "reference", total, world_size)
    resumed = len(steps_of(tmp_path / "killed")) < 2 * total
    assert resumed, "the runs began again instead of resuming"


def test_a_finished_run_does_no_step_again(tmp_path: Path) -> None:
    case = Case("ours", every=10)
    run(case, tmp_path / "run", SAMPLES)
    run(case, tmp_path / "run", SAMPLES)
    assert [line["step"] for line in steps_of(tmp_path / "run")] == list(range(1, SAMPLES + 1))
