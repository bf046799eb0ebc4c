"""Tests that Accelerate, Lightning Fabric and the Trainers of Lightning and Hugging Face train as with torch's class.

Each script in tests/frameworks runs on two real ranks per engine, started as its users start it, and may train twice.
test_every_class.py and test_lightning_cli.py have every optimizer class.
"""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optim_cases import OWN_CLASSES
from warm_python import installed_frameworks, warm_environ, warm_python

SCRIPTS = Path(__file__).parent
TIMEOUT_S = 150  # longer than the scripts' own limit, after which their ranks print their stacks and end
ENGINES = {
    "torch": "torch.nn.parallel.distributed.DistributedDataParallel",
    "drivetrain": "drivetrain.ddp.distributed.DistributedDataParallel",
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Maps each script to the packages that it needs and its launcher. Lightning's scripts start the second rank themselves.
NEEDS = {
    "accelerate_loop": (("accelerate", "safetensors", "sklearn"), TORCHRUN),
    "fabric_loop": (("lightning", "sklearn"), ()),
    "lightning_trainer": (("lightning", "sklearn"), ()),
    "huggingface_trainer": (("transformers", "accelerate", "sklearn"), TORCHRUN),
}

Report = dict[str, Any]  # written by job.Notes.report
Reports = Callable[[str, str, str], list[Report]]


def start(script: str, engine: str, out: Path) -> subprocess.Popen[bytes]:
    out.mkdir()
    imported = installed_frameworks()
    # The output goes to a file, because a rank that outlives its launcher would keep a pipe open.
    with (out / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [
                warm_python(*imported),
                *NEEDS[script][1],
                str(SCRIPTS / f"{script}.py"),
                "--engine",
                engine,
                "--out",
                str(out),
            ],
            env={**warm_environ(*imported), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: subprocess.Popen[bytes], what: str, out: Path) -> None:
    try:
        code = process.wait(TIMEOUT_S)
        ended = f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        process.kill()
        code, ended = process.wait(), f"did not end within {TIMEOUT_S} s"
    assert code == 0, f"{what} {ended}; its output:\n{(out / 'output.txt').read_text(errors='replace')}"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Returns a function that reads the reports of both ranks by script, engine and training.

    The first call for a script runs it.
    """
    folders: dict[str, Path] = {}

    def read(script: str, engine: str, training: str) -> list[Report]:
        missing = [name for name in NEEDS[script][0] if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"{', '.join(missing)} not installed: pip install 'drivetrain[frameworks]'")
        if script not in folders:
            folder = tmp_path_factory.mktemp(script)
            processes = {engine: start(script, engine, folder / engine) for engine in ENGINES}
            try:
                for name, process in processes.items():
                    finish(process, f"{script}.py --engine {name}", folder / name)
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait()
            folders[script] = folder
        return [torch.load(folders[script] / engine / f"{training}-{rank}.pt") for rank in range(2)]

    return read


@pytest.mark.parametrize(
    ("script", "training"),
    [
        ("accelerate_loop", "accumulate"),
        ("accelerate_loop", "trigger_sync"),
        ("fabric_loop", "no_backward_sync"),
        ("lightning_trainer", "automatic"),
        ("lightning_trainer", "manual"),
        ("huggingface_trainer", "plain"),
        ("huggingface_trainer", "checkpointing"),
    ],
)
def test_framework_trains_on_ours_as_on_torchs(script: str, training: str, reports: Reports) -> None:
    by_engine = {engine: reports(script, engine, training) for engine in ENGINES}
    for engine, wrapper in ENGINES.items():
        assert [rank["class"] for rank in by_engine[engine]] == [wrapper, wrapper]
    assert all(rank["num_buckets"] > 1 for rank in by_engine["drivetrain"])

    first, second = by_engine["drivetrain"]
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
    torch.testing.assert_close(first["state"], by_engine["torch"][0]["state"], rtol=1e-5, atol=1e-5)
    for rank in (first, second):
        torch.testing.assert_close(rank["saved"], rank["state"], rtol=0, atol=0)
        assert sum(rank["losses"][-4:]) / 4 < 0.8 * rank["losses"][0]

    # Under accumulation, ranks agree on a gradient only after the last micro-batch of a step.
    assert [len(rank["reduced"]) for rank in (first, second)] == [30 if training == "manual" else 15] * 2
    assert [len(rank["collected"]) for rank in (first, second)] == [0 if training == "manual" else 15] * 2
    assert all(torch.equal(*gradients) for gradients in zip(first["reduced"], second["reduced"], strict=True))
    assert not any(torch.equal(*gradients) for gradients in zip(first["collected"], second["collected"], strict=True))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning warns about its own calls
@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed")
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_clips_under_mixed_precision(precision: str, clip: str) -> None:
    """Lightning does not clip the gradients of an optimizer that claims to unscale them itself."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import MixedPrecision

    from drivetrain import optim

    class Module(pl.LightningModule):
        def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.cls = torch.nn.Linear(4, 4, bias=False), cls

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).float().square().sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.cls(self.parameters(), lr=0.1)

    def train(cls: type[torch.optim.Optimizer]) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if precision == "16-mixed" else None
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=2,
            gradient_clip_val=0.5,
            gradient_clip_algorithm=clip,
            plugins=[MixedPrecision(precision, "cpu", scaler)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module(cls)
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        return module.net.weight.detach()

    for name in OWN_CLASSES:
        weight = train(getattr(optim, name))
        if hasattr(torch.optim, name):
            torch.testing.assert_close(weight, train(getattr(torch.optim, name)), rtol=1e-4, atol=1e-5)
