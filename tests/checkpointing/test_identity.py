"""Tests that no run continues another one in silence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.checkpointing import Checkpointer


def trained(directory: Path, steps: int, every: int | None = 1, out: int = 1, **options: Any) -> Checkpointer:
    """Makes some steps, each of which adds 1 to the weight, and checks that it continues from the last one."""
    model = nn.Linear(1, out)
    nn.init.zeros_(model.weight)
    with Checkpointer(directory, model=model, every=every, **options) as ckpt:
        assert model.weight[0].item() == ckpt.steps
        for _ in range(steps):
            with torch.no_grad():
                model.weight.add_(1)
            ckpt.step()
            ckpt._open_saver().wait()
    return ckpt


def test_other_settings_raise_and_say_how_to_go_on(tmp_path: Path) -> None:
    trained(tmp_path, 1, config={"lr": 0.1, "depth": 2})
    others = {"lr": 0.2, "depth": 2}
    with pytest.raises(ValueError, match=r"config.lr: 0.2, was 0.1. .*another directory. .*start it once without"):
        trained(tmp_path, 1, config=others)
    assert trained(tmp_path, 1).steps == 2
    assert trained(tmp_path, 1, config=others).steps == 3
    with pytest.raises(ValueError, match=r"config.lr: 0.3, was 0.2"):
        trained(tmp_path, 1, config=others | {"lr": 0.3})


def test_another_model_raises_and_says_how_to_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    with pytest.raises(ValueError, match=r"model has 'weight' as .* choose another directory"):
        trained(tmp_path, 1, out=2)


def test_what_the_documentation_says_is_not_seen(tmp_path: Path) -> None:
    """The table of docs/checkpoints.md names these."""
    trained(tmp_path / "a", 1)

    class Other(nn.Linear):
        pass

    with Checkpointer(tmp_path / "a", model=Other(1, 1), every=None) as ckpt:
        assert ckpt.steps == 1
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert [trained(tmp_path / name, 1).steps for name in ("a", "b")] == [2, 2]
