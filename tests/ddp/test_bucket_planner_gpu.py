"""Checks buckets that are planned from a device's times, on GPUs or on the stand-in of tests/fake_cuda."""

import os
from pathlib import Path

import pytest
from test_nccl_gpu import run_ranks

pytestmark = pytest.mark.gpu


def run_cases(folder: Path, monkeypatch: pytest.MonkeyPatch, carrier: str, cases: tuple[str, ...]) -> None:
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    script = Path(__file__).with_name("planner_nccl_ranks.py")
    for code, output in run_ranks([str(script)], 2, folder, carrier, *cases):
        assert code == 0, output
        assert output.count("ok ") == len(cases), output


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
def test_plans_keep_bits_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: str) -> None:
    run_cases(tmp_path, monkeypatch, carrier, ("bits", "nothing_moves", "host_far_ahead"))


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
@pytest.mark.parametrize(("link", "case"), [("150000 0", "long_way"), ("0 1000", "short_way")])
def test_sizes_follow_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: str, link: str, case: str
) -> None:
    if "libcudart" not in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("only the stand-in's link has a given speed")
    monkeypatch.setenv("FAKE_NCCL_LINK", link)
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "0")
    run_cases(tmp_path, monkeypatch, carrier, (case,))


def test_what_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "4")
    run_cases(tmp_path, monkeypatch, "torch", ("refusals", "captured_steps"))
