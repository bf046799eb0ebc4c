"""Tests the benchmark that distinguishes races from noise by the bits of repeated runs."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from suite import repeats

CPU = torch.device("cpu")


def test_on_the_cpu_every_form_has_the_same_bits_every_time() -> None:
    rows = list(repeats.run_gpu(CPU, 2, is_dry=True))
    assert len(rows) == 2 * len(repeats.VARIANTS) + 1
    assert all(row.met is not False for row in rows), rows
    assert "the same bits every time" in rows[0].what


def test_what_differs_in_deterministic_mode_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, form = itertools.count(), repeats.VARIANTS["clipped and zeroed in the step"]

    def racing(model: nn.Module) -> Callable[[], None]:
        finish = form(model)

        def finish_and_race() -> None:
            finish()
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1e-3 * next(numbers)

        return finish_and_race

    monkeypatch.setattr(repeats, "VARIANTS", {**repeats.VARIANTS, "clipped and zeroed in the step": racing})
    rows = list(repeats.run_gpu(CPU, 2, is_dry=True))
    assert [row.met for row in rows if "clipped and zeroed" in row.what] == [False, None]
    assert "a race" in rows[-3].what
    assert rows[-1].met is False


@pytest.mark.parametrize(
    ("as_it_is", "deterministic", "verdict"),
    [("aa", "aa", "the same bits every time"), ("ab", "aa", "noise of torch's kernels"), ("ab", "ab", "a race")],
)
def test_verdicts(as_it_is: str, deterministic: str, verdict: str) -> None:
    assert repeats.verdict(repeats.Runs([*as_it_is]), repeats.Runs([*deterministic])) == verdict
