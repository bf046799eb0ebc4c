"""Tests that ranks continue in their processes after others were killed, and that a rank raises an error of its own."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from survivors_training import EPOCHS, EXIT_CODE, SAMPLES

from drivetrain.checkpointing import continue_in_place
from warm_python import warm_python

PROGRAM = Path(__file__).with_name("survivors_training.py")
LIMIT_S = 240.0


def run(
    folder: Path,
    *,
    kills: Mapping[int, int] | None = None,
    raises: Mapping[int, int] | None = None,
    errs: Mapping[int, int] | None = None,
    world_size: int = 4,
    min_ranks: int = 1,
) -> list[tuple[int, str, str]]:
    """Runs the program on each rank, and returns exit codes, outputs and errors.

    At the given steps ranks die, raise an error, or begin to compute wrongly.
    """
    plan = {"directory": str(folder / "runs"), "world_size": world_size}
    plan |= {"kills": kills or {}, "raises": raises or {}, "errs": errs or {}, "min_ranks": min_ranks}
    (folder / "runs").mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [warm_python(), str(PROGRAM), str(folder / "plan.json")]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen([*command, str(rank)], stdout=pipe, stderr=pipe, text=True) for rank in range(world_size)]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "runs" / f"told-{rank}.json").read_text())
    return found


def test_the_ranks_that_are_left_continue(tmp_path: Path) -> None:
    """First the rank that leads dies, then another one: 4, 3 and 2 ranks."""
    ranks = run(tmp_path, kills={0: 3, 2: 6})
    assert [code for code, *_ in ranks] == [-9, 0, -9, 0], ranks
    begins = [line for line in told(tmp_path, 3) if "begin" in line]
    assert [line["world_size"] for line in begins] == [4, 3, 2]
    assert [line["rank"] for line in begins] == [3, 2, 1]
    assert begins[1]["begin"] == 2  # no complete step is repeated
    assert begins[2]["begin"] == 5
    counted: Counter[tuple[int, int]] = Counter()
    for rank in range(4):
        for line in told(tmp_path, rank):
            limit = {4: begins[1]["begin"], 3: begins[2]["begin"]}.get(line["world_size"], 1000)
            if "step" in line and line["step"] <= limit:
                counted.update((line["epoch"], sample) for sample in line["samples"])
    assert set(counted) == {(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)}
    assert set(counted.values()) == {1}
    weights = [json.loads(output)["weights"] for code, output, _ in ranks if code == 0]
    assert weights[0] == weights[1]
    errors = ranks[3][2]
    assert "rank 0 (process " in errors
    assert "3 of 4 ranks continue" in errors
    assert "2 of 3 ranks continue" in errors
    assert not list((tmp_path / "runs").glob(".survivors-*"))


def test_the_others_continue_without_a_rank_that_computes_wrongly(tmp_path: Path) -> None:
    ranks = run(tmp_path, errs={2: 4})
    assert [code for code, *_ in ranks] == [0, 0, EXIT_CODE, 0], ranks
    begins = [line for line in told(tmp_path, 3) if "begin" in line]
    assert [line["world_size"] for line in begins] == [4, 3]
    assert 3 <= begins[1]["begin"] <= 3 + 4  # each rank repeats passes, and has its own repeated, within four checks
    errors = ranks[3][2]
    assert "rank 2 (process " in errors
    assert "it saw: gradients of one pass differ between ranks in step " in errors
    weights = [json.loads(output)["weights"] for code, output, _ in ranks if code == 0]
    assert weights[0] == weights[1] == weights[2]


def test_a_rank_raises_an_error_of_its_own_and_too_few_ranks_raise(tmp_path: Path) -> None:
    """Rank 1 raises, ranks 0 and 2 continue, and once rank 2 has died, rank 0 is alone, which is too few."""
    ranks = run(tmp_path, raises={1: 3}, kills={2: 6}, world_size=3, min_ranks=2)
    assert [code for code, *_ in ranks] == [1, 1, -9], ranks
    assert "ArithmeticError: a defect of the script" in ranks[1][2]
    assert [line["world_size"] for line in told(tmp_path, 0) if "begin" in line] == [3, 2]
    assert "2 of 3 ranks continue" in ranks[0][2]
    assert "1 of 2 ranks continue" not in ranks[0][2]


def test_a_process_without_a_group_is_told_what_to_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'no process group: call torch\.distributed\.init_process_group\("gloo"\)'):
        continue_in_place(lambda: None, tmp_path)
