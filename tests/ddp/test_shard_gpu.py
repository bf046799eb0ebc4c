"""Compares sharded wrappers over NCCL with unsharded ones, on GPUs or on the stand-in of tests/fake_cuda."""

import os
from pathlib import Path

import pytest
from test_nccl_gpu import run_ranks

pytestmark = pytest.mark.gpu

# Each group of ranks runs these functions, in processes that start once.
CASES = {
    "one rank": (1, ("one_rank",)),
    "steps": (2, ("bits", "scatters", "default_buckets", "formats", "sums", "muon", "moves_between_steps")),
    "matrices": (2, ("shared_matrices", "shared_rows")),
    "gradients": (2, ("accumulation", "kept_gradients", "penalty", "main_grads_and_states", "main_grads")),
    "scalers": (2, ("scalers",)),
    "windows": (
        2,
        ("windows", "clipped_windows", "restored_windows", "weights", "losses_from_elsewhere", "late_misuse"),
    ),
    "gathers": (2, ("scalars_alone", "overlapped_gathers", "uses_on_other_streams", "steps_on_a_side_stream", "uses")),
    "states": (2, ("unsharded_states", "whole_states", "checkpoints", "host_waits", "refusals")),
    "four ranks": (4, ("bits", "scatters", "sums", "kept_gradients", "windows", "overlapped_gathers")),
    "shard groups": (4, ("shard_groups", "windows_of_shard_groups")),
}


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
@pytest.mark.parametrize("name", list(CASES))
def test_sharded_wrappers_equal_unsharded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, carrier: str
) -> None:
    ranks, cases = CASES[name]
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    script = Path(__file__).with_name("shard_nccl_ranks.py")
    for code, output in run_ranks([str(script)], ranks, tmp_path, carrier, *cases):
        assert code == 0, output
        assert output.count("ok ") == len(cases), output
