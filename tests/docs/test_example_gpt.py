"""Tests examples/gpt: its data split and model alone, and two-rank runs with both engines by benchmarks/gpt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("examples/gpt", "benchmarks/gpt")]

import accuracy  # noqa: E402
import compare  # noqa: E402
import data  # noqa: E402
import model  # noqa: E402
import train  # noqa: E402

from warm_python import warm_environ, warm_python  # noqa: E402

TIMEOUT_S = 120


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), str(REPOSITORY / script), *arguments]
    return subprocess.run(command, env=warm_environ(), capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    """Creates a folder like a standard library, with 200 small modules and files that must be ignored."""
    for index in range(200):
        path = tmp_path / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# module {index}\n")
    for folder in ("site-packages", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "installed.py").write_text("# not of the standard library\n")
    (tmp_path / "notes.txt").write_text("no Python\n")
    return tmp_path


def lines(text: torch.Tensor) -> list[str]:
    return bytes(text.tolist()).decode().splitlines()


def test_every_file_is_on_one_side_of_the_split(stdlib: Path) -> None:
    corpus = data.load_corpus(stdlib, minimum_bytes=0)
    train, held_out = lines(corpus.train), lines(corpus.held_out)
    assert sorted(train + held_out) == sorted(f"# module {index}" for index in range(200))
    assert 0 < len(held_out) < 30


def test_the_corpus_does_not_depend_on_where_it_lies(stdlib: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "lib"
    stdlib.rename(elsewhere)
    again = data.load_corpus(elsewhere, minimum_bytes=0)
    elsewhere.rename(stdlib)
    corpus = data.load_corpus(stdlib, minimum_bytes=0)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)


def test_a_small_standard_library_is_topped_up_and_says_so(stdlib: Path) -> None:
    corpus = data.load_corpus(stdlib, minimum_bytes=500_000)
    assert len(corpus.train) + len(corpus.held_out) >= 500_000
    assert "of torch's own" in corpus.description


def test_batches_follow_seed_step_and_rank_and_nothing_else() -> None:
    text = torch.randint(256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def batch(seed: int = 0, step: int = 0, rank: int = 0, world_size: int = 2, rows: int = 4) -> torch.Tensor:
        inputs, targets = data.train_batch(text, rows, 16, seed=seed, step=step, rank=rank, world_size=world_size)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.shape == (rows, 16)
        return inputs

    assert torch.equal(batch(), batch())
    for other in (batch(seed=1), batch(step=1), batch(rank=1)):
        assert not torch.equal(batch(), other)
    assert torch.equal(torch.cat([batch(rank=0), batch(rank=1)]), batch(world_size=1, rows=8))


def test_held_out_rows_are_dealt_to_the_ranks_once_each() -> None:
    text = (torch.arange(5000) % 251).to(torch.uint8)

    def rows(rank: int, world_size: int) -> set[tuple[int, ...]]:
        batches = data.held_out_batches(text, 3, 8, num_rows=20, rank=rank, world_size=world_size)
        return {tuple(row) for inputs, _ in batches for row in inputs.tolist()}

    assert rows(0, 1) == rows(0, 2) | rows(1, 2)
    assert not rows(0, 2) & rows(1, 2)


def tiny_gpt() -> model.GPT:
    torch.manual_seed(0)
    return model.GPT(model.PRESETS["tiny"])


def test_a_later_byte_does_not_change_earlier_logits() -> None:
    gpt, tokens = tiny_gpt(), torch.randint(256, (2, 32))
    changed = tokens.clone()
    changed[:, 20] ^= 1
    before, after = gpt(tokens), gpt(changed)
    assert before.shape == (2, 32, model.VOCAB_SIZE)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_the_order_of_earlier_bytes_matters() -> None:
    gpt, tokens = tiny_gpt(), torch.arange(32)[None]
    swapped = tokens.clone()
    swapped[0, :2] = torch.tensor([1, 0])
    assert not torch.allclose(gpt(tokens)[:, -1], gpt(swapped)[:, -1])


def test_head_and_embedding_are_one_matrix_that_begins_near_chance() -> None:
    gpt = tiny_gpt()
    assert [name for name, parameter in gpt.named_parameters() if len(parameter) == model.VOCAB_SIZE] == [
        "embedding.weight"
    ]
    assert gpt(torch.randint(256, (4, 32)), torch.randint(256, (4, 32))).item() == pytest.approx(5.545, abs=0.2)


def test_generation_goes_past_the_block_size_and_follows_its_seed() -> None:
    gpt = tiny_gpt()
    sample = gpt.generate(b"def ", 40, seed=1)
    assert sample.startswith(b"def ")
    assert len(sample) == 44
    assert sample == gpt.generate(b"def ", 40, seed=1)
    assert sample != gpt.generate(b"def ", 40, seed=2)


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width 10 must be a multiple of num_heads, 3"):
        model.GPTConfig(num_layers=1, num_heads=3, width=10, block_size=8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the metrics that compare.py writes for 30 steps on two real ranks, by engine."""
    result = tmp_path_factory.mktemp("compare") / "metrics.json"
    done = run(
        "benchmarks/gpt/compare.py", "--preset=tiny", "--steps=30", "--accumulate=2", "--device=cpu", f"--json={result}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 2
    return {engine: of_engine[0] for engine, of_engine in json.loads(result.read_text()).items()}


def test_both_engines_learn(runs: dict[str, dict[str, Any]]) -> None:
    assert set(runs) == {"torch", "drivetrain"}
    for metrics in runs.values():
        assert metrics["held_out_losses"][-1][1] < metrics["held_out_losses"][0][1] - 1
        assert metrics["losses"][-1] < metrics["losses"][0] - 1


def test_the_losses_of_both_engines_agree(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["drivetrain"]["losses"] == pytest.approx(runs["torch"]["losses"], abs=1e-4)
    ours, theirs = (dict(runs[engine]["held_out_losses"]) for engine in ("drivetrain", "torch"))
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_the_measurements_are_there_for_each_rank(runs: dict[str, dict[str, Any]]) -> None:
    for metrics in runs.values():
        assert metrics["world_size"] == 2
        assert len(metrics["peak_memory_bytes"]) == 2
        assert all(peak >= 50 * 2**20 for peak in metrics["peak_memory_bytes"])
        assert metrics["nccl_memory_bytes"] == [0, 0]  # the CPU has no NCCL
        assert metrics["synced_step_ms"] > 0
        assert metrics["step_ms"] > 0


def test_one_process_needs_no_launcher_and_fits_into_its_time() -> None:
    done = run("examples/gpt/train.py", "--device=cpu", "--preset=tiny", "--steps=1000000", "--max-seconds=1", "--bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cpu rank" in done.stdout
    assert "sample, from the prompt 'def '" in done.stdout


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """Runs a script's `main` in this process and returns its exit code or message."""
    monkeypatch.setattr(sys, "argv", [str(module.__file__), *arguments])
    with pytest.raises(SystemExit) as exit_:
        module.main()
    return exit_.value.code


def test_compare_fails_where_losses_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stand_in(engine: str, *_: object) -> dict[str, Any]:
        times = dict.fromkeys(("step_ms", "unsynced_step_ms", "exposed_communication_ms"), 1.0)
        losses = {
            "losses": [5.0, 4.0 if engine == "torch" else 4.001],
            "held_out_losses": [[0, 5.0], [2, 4.0]],
        }
        return times | losses | {"bf16": False, "peak_memory_bytes": [1], "rest_memory_bytes": [1]}

    monkeypatch.setattr(compare, "train", stand_in)
    assert call(compare, monkeypatch, "--repeat=2") == 1
    printed = capsys.readouterr().out
    assert "FAIL  first 20 training losses: differ by 1.0e-03" in printed
    assert "PASS  final held-out loss" in printed


def test_a_loss_that_is_no_number_is_within_no_tolerance() -> None:
    gap = compare.difference([5.0, float("nan")], [5.0, float("nan")])
    assert not compare.verdict("training losses", gap, 1.0)


def test_accuracy_trains_every_storage_and_says_what_it_costs(tmp_path: Path) -> None:
    result = tmp_path / "accuracy.json"
    done = run("benchmarks/gpt/accuracy.py", "--quick", "--threads=1", f"--json={result}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert set(rows) == {row.name for row in (*accuracy.USUAL, *accuracy.SLOW)}
    assert all(row.label in done.stdout for row in (*accuracy.USUAL, *accuracy.SLOW))
    assert all(len(row["losses"]) == 2 and max(row["losses"]) < 5.6 for row in rows.values())
    assert rows[accuracy.REFERENCE.name]["bytes_per_parameter"] == 16
    assert rows[accuracy.MASTER_32.name]["bytes_per_parameter"] == 14
    assert rows[accuracy.CONTROL.name]["bytes_per_parameter"] == 8
    # torch's step and drivetrain's with full masters and states differ only by float32 rounding.
    assert abs(rows["fp32"]["difference"]) < 1e-3
    assert abs(rows[accuracy.SLOW_MASTERS[0].name]["difference"]) < 1e-3


def test_an_interval_is_students_over_paired_seeds() -> None:
    for degrees, quantile in ((1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)):
        assert accuracy.t_quantile(degrees) == pytest.approx(quantile, rel=1e-5)
    gap = accuracy.paired_difference([2.0, 3.0, 4.5], [1.0, 2.0, 3.0])
    assert gap.mean == pytest.approx(3.5 / 3)
    assert gap.half_width == pytest.approx(4.30265 * 0.288675 / 3**0.5, rel=1e-4)


def test_the_control_must_lose_for_certain() -> None:
    masters = {row.name: accuracy.Difference(0.0, 0.01) for row in accuracy.SLOW_MASTERS}
    for gap, passed in ((accuracy.Difference(0.1, 0.05), True), (accuracy.Difference(0.1, 0.2), False)):
        assert accuracy.control_is_worse(masters | {accuracy.CONTROL.name: gap}) == passed
    assert not accuracy.control_is_worse(masters | {accuracy.CONTROL.name: accuracy.Difference(0.015, 0.006)})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--preset=huge", "invalid choice: 'huge'"),
        ("--steps=0", "--steps: must be above 0, not 0"),
        ("--lr=fast", "--lr: invalid float value: 'fast'"),
    ],
)
def test_wrong_arguments_are_named(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(train, monkeypatch, argument) == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "drivetrain", None)
    assert "or pass --engine torch" in str(call(train, monkeypatch))
