"""Tests that torch.distributed.checkpoint reads what is exported, and that its checkpoints can be imported."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import drivetrain
from drivetrain.checkpointing import Checkpointer, CheckpointError
from drivetrain.checkpointing.frameworks.dcp import export_dcp, import_dcp
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.cli import main
from ranks import RankPool

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls

OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "ours": lambda params: drivetrain.optim.AdamW(params, lr=1e-2),
    "ours 8-bit": lambda params: drivetrain.optim.AdamW(params, lr=1e-2, state_bits=8, min_8bit_size=64),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 31), nn.BatchNorm1d(31), nn.Linear(31, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.norm(self.first(rows)).relu())


def rows(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns two groups, in another order than the model's."""
    params = list(model.parameters())
    return [{"params": params[2:], "lr": 0.02}, {"params": params[:2]}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(rows(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(kind: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, OPTIMIZERS[kind](groups(model))


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    found = {size: RankPool(size, tmp_path_factory.mktemp(f"ranks-{size}")) for size in (2, 3)}
    yield found
    for pool in found.values():
        pool.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_exported_continues_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    model, optimizer = make(kind, 0)
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, every=None):
        train(model, optimizer, range(3))
    expected = train(model, optimizer, range(3, 9))
    out = tmp_path / "dcp"
    assert main(["ckpt", "export", str(tmp_path / "run"), "--format", "dcp", "--out", str(out)]) == 0

    other, its = make(kind, 1)
    import_dcp(out, other, its)
    assert train(other, its, range(3, 9)) == expected

    if kind in ("torch", "momentum"):  # torch's own way in
        other, its = make(kind, 2)
        model_state, optim_state = get_state_dict(other, its)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=out)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert train(other, its, range(3, 9)) == expected


@pytest.mark.parametrize("keys", ["names", "numbers"])
def test_what_torch_saved_is_imported_through_the_checkpointer(keys: str, tmp_path: Path) -> None:
    model, optimizer = make("torch", 0)
    train(model, optimizer, range(3))
    if keys == "names":
        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "old")
    else:
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / "old")
    expected = train(model, optimizer, range(3, 9))
    for seed in (1, 2):  # the second run continues from the checkpoint of the first
        other, its = make("torch", seed)
        import_dcp(tmp_path / "old", other, its)
        with Checkpointer(tmp_path / "run", model=other, optimizer=its, every=1) as ckpt:
            assert (ckpt.restored is None) == (seed == 1)
            found = train(other, its, range(3, 6) if seed == 1 else range(6, 9))
            assert found == (expected[:3] if seed == 1 else expected[3:])


def save_sharded(folder: Path) -> None:
    model, optimizer = sharded("torch", 0)
    train_sharded(model, optimizer, range(3))
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder / "old")


def sharded(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 31), nn.ReLU(), nn.Linear(31, 2))
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[kind](groups(model))


def train_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    return train(model, optimizer, steps)  # every rank takes the same rows, so that sizes of the world agree


def import_sharded(folder: Path) -> None:
    model, optimizer = sharded("torch", 1)
    import_dcp(folder / "old", model, optimizer)
    torch.testing.assert_close(train_sharded(model, optimizer, range(3, 9)), torch.load(folder / "expected.pt"))


def import_replicated(folder: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 31), nn.ReLU(), nn.Linear(31, 2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = OPTIMIZERS["ours"](groups(wrapped))
    import_dcp(folder / "old", wrapped, optimizer)
    torch.testing.assert_close(train(wrapped, optimizer, range(3, 9)), torch.load(folder / "expected.pt"))


def test_a_sharded_checkpoint_is_imported_at_other_world_sizes(pools: dict[int, RankPool], tmp_path: Path) -> None:
    pools[2].run(save_sharded, tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 31), nn.ReLU(), nn.Linear(31, 2))
    optimizer = OPTIMIZERS["torch"](groups(model))
    train(model, optimizer, range(3))
    expected = train(model, optimizer, range(3, 9))
    torch.save(expected, tmp_path / "expected.pt")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 31), nn.ReLU(), nn.Linear(31, 2))
    optimizer = OPTIMIZERS["torch"](groups(model))
    import_dcp(tmp_path / "old", model, optimizer)
    torch.testing.assert_close(train(model, optimizer, range(3, 9)), expected)
    pools[3].run(import_sharded, tmp_path)
    pools[2].run(import_replicated, tmp_path)


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = make("torch", 0)
    train(model, optimizer, range(2))
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "old")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    larger = nn.Linear(6, 40)
    with pytest.raises(ValueError, match=r"model has 'model.weight', which .* lacks"):
        import_dcp(tmp_path / "old", larger)
    wide, its = make("torch", 1)
    wide.last = nn.Linear(31, 3)
    with pytest.raises(ValueError, match=r"'model.last.weight' of shape \(3, 31\), expected \(2, 31\)"):
        import_dcp(tmp_path / "old", wide, its)
    with pytest.raises(ValueError, match="optimizer_key is 'adam', under which the checkpoint has nothing"):
        import_dcp(tmp_path / "old", model, optimizer, optimizer_key="adam")
    with pytest.raises(CheckpointError, match=r"is no checkpoint of torch\.distributed\.checkpoint"):
        import_dcp(tmp_path, model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, every=None):
        pass
    with pytest.raises(ValueError, match="which exists: choose a new folder"):
        export_dcp(complete_checkpoints(tmp_path / "run")[-1], tmp_path / "old")


def test_the_optimizer_may_be_left_out(tmp_path: Path) -> None:
    model, _ = make("torch", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "weights")
    other, _ = make("torch", 1)
    import_dcp(tmp_path / "weights", other, model_key="")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
