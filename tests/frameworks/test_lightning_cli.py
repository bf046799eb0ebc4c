"""Tests that LightningCLI builds every optimizer class, from a class path and as an OptimizerCallable."""

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

from drivetrain import optim
from effort import covering
from optim_cases import OWN_CLASSES

TORCHS_OWN = ["LBFGS"]  # SparseAdam needs sparse gradients, and is torch's own class, too.
MISSING = [name for name in ("lightning", "jsonargparse") if not importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.filterwarnings("default"),  # of Lightning and jsonargparse about each other
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install 'drivetrain[frameworks]'"
    ),
]
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def run(name: str, is_callable: bool) -> tuple[torch.optim.Optimizer, Tensor]:
    """Trains as a script with LightningCLI does, and returns its optimizer and the weights."""
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI, OptimizerCallable

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 4, bias=False)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).square().sum()

        def train_dataloader(self) -> torch.utils.data.DataLoader[Tensor]:
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
            return torch.utils.data.DataLoader(data, batch_size=4)

    class WithCallable(Module):
        def __init__(self, optimizer: OptimizerCallable) -> None:
            super().__init__()
            self.make_optimizer = optimizer

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.make_optimizer(self.parameters())

    option = "--model.optimizer" if is_callable else "--optimizer"
    cli = LightningCLI(
        WithCallable if is_callable else Module,
        args=["fit", f"{option}=drivetrain.optim.{name}", f"{option}.lr=0.01"],
        trainer_defaults=QUIET,
        save_config_callback=None,
        seed_everything_default=False,
    )
    optimizer = cli.trainer.optimizers[0]
    return optimizer, cli.model.net.weight.detach()


def expected(name: str) -> Tensor:
    torch.manual_seed(0)
    net = nn.Linear(4, 4, bias=False)
    optimizer = getattr(torch.optim, name, getattr(optim, name))(net.parameters(), lr=0.01)
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for batch in data.split(4):

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = net(batch).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return net.weight.detach()


@pytest.mark.parametrize(("name", "is_callable"), covering(1, [*OWN_CLASSES, *TORCHS_OWN], [False, True]))
def test_cli(name: str, is_callable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI looks at it although it has arguments
    optimizer, weight = run(name, is_callable)
    assert type(getattr(optimizer, "optimizer", optimizer)) is getattr(optim, name)
    assert optimizer.param_groups[0]["lr"] == 0.01
    torch.testing.assert_close(weight, expected(name), rtol=1e-4, atol=1e-5)
