"""Tests values of scripts that a checkpoint keeps, or that it refuses before the training."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.checkpointing import Checkpointer


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


def test_config_takes_paths_and_enumerations(tmp_path: Path) -> None:
    config = {"data": Path("/data/rows"), "color": Color.RED, "levels": [Level.LOW], "by": {Color.BLUE: Path("b")}}
    for steps in range(2):
        with Checkpointer(tmp_path, model=nn.Linear(2, 2), config=config, every=None) as ckpt:
            assert ckpt.steps == steps
            ckpt.step()
    other = config | {"color": Color.BLUE, "data": Path("/data/others")}
    message = r"config\.color: Color\.BLUE, was Color\.RED; config\.data: /data/others, was /data/rows"
    with pytest.raises(ValueError, match=message), Checkpointer(tmp_path, model=nn.Linear(2, 2), config=other):
        pytest.fail("the block has begun")


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_a_generator_spawns_the_children_that_it_would_have_spawned(tmp_path: Path, bits: Any) -> None:
    drawn = []
    for seed in (5, 6):  # a script may take its seed from the operating system
        generator = np.random.Generator(bits(seed))
        with Checkpointer(tmp_path, model=nn.Linear(2, 2), generators=[generator], every=None) as ckpt:
            if not ckpt.steps:
                generator.spawn(2)
                ckpt.step()
                ckpt.save()
            children = [*generator.spawn(2), generator, *generator.spawn(1)]
            drawn.append([child.integers(1 << 40) for child in children])
    assert drawn[0] == drawn[1]


class QuantizedLinear(nn.Linear):
    """Saves what belongs to its packed weight under further names and does not load it, as layers of bitsandbytes."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}weight.absmax"] = torch.ones(4)
        destination[f"{prefix}weight.quant_map"] = torch.ones(16)


class LoadingLinear(QuantizedLinear):
    """Loads its further names, as Linear8bitLt of bitsandbytes does."""

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in ("absmax", "quant_map"):
            state.pop(f"{prefix}weight.{name}")
        super()._load_from_state_dict(state, prefix, *args)  # type: ignore[no-untyped-call]
        unexpected = args[3]
        unexpected[:] = [name for name in unexpected if not name.startswith(f"{prefix}weight.")]


class Counting(nn.Linear):
    """Has an extra state, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("second", self.first)

    def get_extra_state(self) -> Any:
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None: ...


def test_a_model_that_does_not_load_what_it_saves_is_refused_before_the_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), QuantizedLinear(3, 3))
    message = "model saves '1.weight.absmax', which it does not load, so that no checkpoint could be restored. Pass the"
    with pytest.raises(TypeError, match=message), Checkpointer(tmp_path, model=model):
        pytest.fail("the block has begun")
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("kind", [LoadingLinear, Counting])
def test_a_model_that_loads_what_it_adds_is_saved(tmp_path: Path, kind: Any) -> None:
    for steps in range(2):
        layer = kind(3, 3) if kind is LoadingLinear else kind()
        with Checkpointer(tmp_path, model=nn.Sequential(layer), every=None) as ckpt:
            assert ckpt.steps == steps
            ckpt.step()
