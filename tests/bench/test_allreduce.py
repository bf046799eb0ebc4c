"""Tests `drivetrain bench allreduce`: its columns, its check of the sums, and its arguments."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drivetrain.bench import allreduce
from drivetrain.bench.allreduce import Line, Result, SideResult, sizes
from drivetrain.cli import main
from warm_python import warm_environ, warm_python

FLOAT = r"\d+\.\d\d"
SIDE = rf"\s+{FLOAT}\s+{FLOAT}\s+{FLOAT}\s+0"
COLUMNS = re.compile(rf"\s*(\d+)\s+(\d+)\s+float\s+sum\s+-1{SIDE}{SIDE}")


def test_ranks_of_a_launcher_print_nccl_tests_columns(tmp_path: Path) -> None:
    bench = ["bench", "allreduce", "--maxbytes", "64KiB", "--stepfactor", "64", "--json", str(tmp_path / "out.json")]
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "drivetrain", *bench]
    done = subprocess.run(command, env=warm_environ(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    tables = done.stdout.split("# drivetrain bench allreduce: 2 ranks on 1 host, transport ")[1:]
    assert [table.split()[0] for table in tables] == ["group", "torch", "shm", "nccl"]
    for table in tables[:3]:
        rows = [COLUMNS.fullmatch(line) for line in table.splitlines() if line and not line.startswith(("#", *"gts"))]
        assert [(row[1], row[2]) for row in rows if row] == [("1024", "256"), ("65536", "16384")]
        assert all(rows)
        assert "# Out of bounds values : 0 OK" in table
    assert "not measured: transport 'nccl' cannot be used" in tables[3]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ranks"] == "2 ranks on 1 host"
    line = written["allreduce"]["shm"]["lines"][0]
    assert line["num_bytes"] == 1024
    assert line["in_place"]["algbw"] == pytest.approx(1024 / line["in_place"]["us"] / 1e3)


def _with_a_wrong_sum() -> Any:
    import torch.distributed as dist

    plain = dist.all_reduce

    def wrong(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        plain(tensor, *args, **kwargs)
        if tensor.is_floating_point() and tensor.numel() == 256:
            tensor[3] += 1

    dist.all_reduce = wrong
    return allreduce.measured([1024], "cpu", "group")


def test_wrong_sums_are_counted_and_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = allreduce.on_ranks
    monkeypatch.setattr(allreduce, "on_ranks", lambda _, **options: plain(_with_a_wrong_sum, **options))
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "allreduce"]) == 1
    assert "# Out of bounds values : 4 FAILED" in capsys.readouterr().out  # of two ranks, out of place and in place


def test_a_line_has_the_bandwidths_of_its_definition() -> None:
    side = SideResult(us=10.0, algbw=0.4, busbw=0.6, num_wrong=0)
    columns = str(Line(4000, side, side)).split()
    assert columns == ["4000", "1000", "float", "sum", "-1", *["10.00", "0.40", "0.60", "0"] * 2]
    assert allreduce.HEADER.splitlines()[1].split() == [
        *["#", "size", "count", "type", "redop", "root"],
        *["time", "algbw", "busbw", "#wrong"] * 2,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minbytes", "3"], "--minbytes is 3, expected 4 bytes or more"),
        (["--minbytes", "1MiB", "--maxbytes", "1KiB"], r"--maxbytes is 1KiB, expected --minbytes \(1MiB\) or more"),
        (["--maxbytes", "big"], "--maxbytes is 'big', expected a number of bytes"),
        (["--stepfactor", "1"], "--stepfactor is 1, expected 2 or more"),
        (["--transport", "tcp"], "--transport is 'tcp', expected one of: 'group', 'torch', 'shm', 'nccl'"),
        (["--ranks", "1"], "--ranks is 1, expected 2 or more"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "allreduce", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_sizes_grow_by_the_factor() -> None:
    assert sizes("8", "1KiB", 4) == [8, 32, 128, 512]
    assert sizes("1KiB", "1KiB", 2) == [1024]


def test_no_transport_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ([Result("shm", [], "the ranks cannot share memory")], "2 ranks on 2 hosts")
    monkeypatch.setattr(allreduce, "on_ranks", functools.partial(lambda *_, **__: answer))
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "allreduce", "--transport", "shm"]) == 1
    assert "# not measured: the ranks cannot share memory" in capsys.readouterr().out
