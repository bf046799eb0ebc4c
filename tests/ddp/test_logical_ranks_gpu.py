"""Tests logical ranks over NCCL on GPUs, or on the stand-in of tests/fake_cuda: bits, streams and lost ranks."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_logical_ranks import assert_same_bits
from test_nccl_gpu import on_gpu, run_ranks

pytestmark = pytest.mark.gpu

CASES = ("float32", "bfloat16", "float64", "scaled", "scaled in groups", "streams", "written", "generators")
OPTIMIZERS = ("8 bits, kahan", "torch", "two rules", "LAMB", "Adafactor", "Muon")


def results_of(folder: Path, ranks: int, carrier: str, *cases: str) -> list[dict[str, Any]]:
    folder.mkdir()
    script = Path(__file__).with_name("logical_nccl_ranks.py")
    for code, output in run_ranks([str(script)], ranks, folder, carrier, *cases):
        assert code == 0, output
    return [torch.load(folder / f"result-{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module", autouse=True)
def _path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, _path: None) -> dict[str, Any]:
    """Returns the results of one rank, which equal those of torch's autograd and optimizer."""
    (result,) = results_of(tmp_path_factory.mktemp("logical") / "alone", 1, "torch", *CASES, *OPTIMIZERS)
    return result


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_of_one_rank(tmp_path: Path, alone: dict[str, Any], ranks: int, carrier: str) -> None:
    for rank, result in enumerate(results_of(tmp_path / "ranks", ranks, carrier, "sums", *CASES)):
        for name in CASES:
            assert_same_bits(result[name], alone[name], f"{name}, rank {rank} of {ranks}")


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_of_sharded_optimizers(tmp_path: Path, alone: dict[str, Any], ranks: int, carrier: str) -> None:
    for rank, result in enumerate(results_of(tmp_path / "ranks", ranks, carrier, *OPTIMIZERS)):
        for name in OPTIMIZERS:
            assert_same_bits(result[name], alone[name], f"{name}, rank {rank} of {ranks}")


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
def test_rows_are_not_sent_back(tmp_path: Path, carrier: str) -> None:
    """The stand-in's log has the bytes of each message."""
    sent = {}
    for shard in ("optimizer", "gradients"):
        script = f"""
        import drivetrain
        model = DDP(net, logical_ranks=4, shard={shard!r}, transport={carrier!r})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with drivetrain.accumulate(model, optimizer, 1) as window:
            for _ in range(3):
                window.backward(model(torch.randn(8, 10, device="cuda")).sum())
        torch.cuda.synchronize()
        """
        folder = tmp_path / shard
        folder.mkdir()
        for code, output in on_gpu(script, 4, folder):
            assert code == 0, output
        if not (folder / "log-0").exists():
            pytest.skip("this NCCL writes no log of its messages")
        sent[shard] = sum(map(int, re.findall(r"send (\d+)", (folder / "log-0").read_text())))
    assert 0.4 * sent["optimizer"] < sent["gradients"] < 0.6 * sent["optimizer"], sent


@pytest.mark.parametrize("carrier", ["torch", "nccl"])
@pytest.mark.parametrize("shard", [None, "gradients"])
def test_a_lost_rank_is_an_error(tmp_path: Path, carrier: str, shard: str | None) -> None:
    script = """
    import drivetrain
    model = DDP(net, logical_ranks=2, report_hang_after=2, transport=CARRIER, shard=SHARD)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with drivetrain.accumulate(model, optimizer, 1) as window:
        for step in range(1000):
            if step == 20:
                time.sleep(2)  # until each rank has received the other's progress
                begin = time.monotonic()
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                window.backward(model(torch.randn(8, 10, device="cuda")).sum())
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"after {time.monotonic() - begin:.0f} s: {error}", flush=True)
                os._exit(0)
    """
    script = script.replace("CARRIER", repr(carrier)).replace("SHARD", repr(shard))
    ((code, output),) = on_gpu(script, 2, tmp_path, awaited=1)
    assert code == 0, output
    assert re.search(r"Rank 1 has ended: its process \d+ is gone", output), output
    waited = re.search(r"^after (\d+) s", output, re.MULTILINE)
    assert waited, output
    assert int(waited[1]) < 10, output  # the group's timeout is 15 s


def test_what_is_refused(tmp_path: Path) -> None:
    script = """
    try:
        DDP(net, logical_ranks=2, process_group=dist.new_group(backend="gloo"))
    except NotImplementedError as error:
        print(error)
    import drivetrain
    model = DDP(net, logical_ranks=2)
    window = drivetrain.accumulate(model, torch.optim.SGD(net.parameters(), lr=0.01), 1)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    try:
        with window, torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side, capture_error_mode="thread_local"):
            window.backward(model(torch.ones(8, 10, device="cuda")).sum())
    except NotImplementedError as error:
        print(error)
    """
    ((code, output),) = on_gpu(script, 1, tmp_path)
    assert code == 0, output
    assert "the process group's backend for them is 'gloo'" in output, output
    assert "windows with logical_ranks cannot be captured into a CUDA graph" in output, output
