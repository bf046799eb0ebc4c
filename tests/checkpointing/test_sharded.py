"""Tests checkpoints of sharded states, and their exchange with torch.distributed.checkpoint (DCP).

States are sharded by FSDP2, DistributedDataParallel(shard=...) and ZeroRedundancyOptimizer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import drivetrain
from drivetrain.checkpointing import Checkpointer, CheckpointError
from drivetrain.checkpointing.frameworks.dcp import export_dcp, import_dcp
from drivetrain.checkpointing.state.training_state import state_dicts
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.cli import main
from ranks import RankPool

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls

OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "ours": lambda params: drivetrain.optim.AdamW(params, lr=1e-2),
    "ours 8-bit": lambda params: drivetrain.optim.AdamW(params, lr=1e-2, state_bits=8, min_8bit_size=64),
    "ours 24-bit master": lambda params: drivetrain.optim.AdamW(params, lr=1e-2, master_bits=24),
    "factored": lambda params: drivetrain.optim.Adafactor(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}
DDP = [
    "torch/ddp optimizer",
    "torch/ddp gradients",
    "ours/ddp gradients",
    "ours 8-bit/ddp optimizer",
    "factored/ddp optimizer",
]
Saved = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    found = {size: RankPool(size, tmp_path_factory.mktemp(f"ranks-{size}")) for size in (2, 4)}
    yield found
    for pool in found.values():
        pool.close()


def net(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 31), nn.ReLU(), nn.Linear(31, 3))
    return model.bfloat16() if "master" in kind else model


def zero_class() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    return ZeroRedundancyOptimizer


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(kind, seed)
    if dist.is_initialized():
        meshes = {"hsdp": (2, dist.get_world_size() // 2)}
        name, _, how = kind.partition("/")
        shape = meshes.get(how, (dist.get_world_size(),))
        names = ("replicate", "shard")[-len(shape) :]
        if how == "zero":
            model = nn.parallel.DistributedDataParallel(model)
            options: dict[str, Any] = {"state_bits": 8, "min_8bit_size": 64} if "8-bit" in name else {}
            inner = torch.optim.AdamW if name == "torch" else drivetrain.optim.AdamW
            return model, zero_class()(model.parameters(), inner, lr=1e-2, **options)
        if how.startswith("ddp "):
            model = drivetrain.DistributedDataParallel(model, shard=how.removeprefix("ddp "))
        else:
            fully_shard(model, mesh=dist.init_device_mesh("cpu", shape, mesh_dim_names=names))
        kind = name
    return model, OPTIMIZERS[kind](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, by_rank: bool = False) -> list[float]:
    """Takes the same rows on every rank, so that sizes of the world agree, or other ones."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step + (1000 * dist.get_rank() if by_rank else 0))
        rows = torch.randn(8, 6, generator=draw).to(dtype)
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    """Returns all parameters and states as whole tensors, by name; of a ZeroRedundancyOptimizer those of this rank."""
    found = [(name, whole(value)) for name, value in model.state_dict().items()]
    if hasattr(optimizer, "_param_to_index"):
        states = {optimizer._param_to_index[param]: values for param, values in optimizer.optim.state.items()}
    else:
        states = optimizer.state_dict()["state"]
    for number, values in sorted(states.items()):
        found += [(f"{number}/{name}", whole(value)) for name, value in values.items() if isinstance(value, Tensor)]
    return found


def assert_same_bits(found: Saved, expected: Saved) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, a), (_, b) in zip(found, expected, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def save(kind: str, folder: Path) -> Saved:
    """Trains and saves, then trains on to see what an uninterrupted run does. Returns the saved state."""
    model, optimizer = make(kind, 0)
    with Checkpointer(folder / "run", model=model, optimizer=optimizer, every=None, signals=()) as ckpt:
        train(model, optimizer, range(3))
        ckpt.step()
    saved = everything(model, optimizer)
    torch.save(train(model, optimizer, range(3, 7)), folder / f"expected-{dist.get_rank()}.pt")
    return saved


def resume(kind: str, folder: Path, is_same_world: bool) -> Saved:
    """Restores into another model, compares what it restores, and goes on."""
    model, optimizer = make(kind, 1)
    if not kind.startswith("torch") and is_same_world:
        train(model, optimizer, range(1))  # states of another run must be replaced
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with Checkpointer(folder / "run", model=model, optimizer=optimizer, every=None, signals=()) as ckpt:
            assert ckpt.restored is not None
            assert ckpt.steps in (1, 2)
            restored = everything(model, optimizer)
            if is_same_world:
                expected = torch.load(folder / f"expected-{dist.get_rank()}.pt")
                assert train(model, optimizer, range(3, 7)) == expected
            else:
                ckpt.step()
                if kind.endswith("/zero"):
                    expected = torch.load(folder / "expected-0.pt")
                    torch.testing.assert_close(train(model, optimizer, range(3, 7)), expected, rtol=1e-3, atol=1e-5)
    has_warned = any("losses will differ from an uninterrupted run" in str(one.message) for one in found)
    assert has_warned == (not is_same_world and dist.get_rank() == 0)
    return restored


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "ours/hsdp", *DDP])
def test_a_sharded_state_continues_with_the_same_bits(kind: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    size = 4 if "hsdp" in kind else 2
    saved = pools[size].run(save, kind, tmp_path)[0]
    for found in pools[size].run(resume, kind, tmp_path, True):
        assert_same_bits(found, saved)


@pytest.mark.parametrize("kind", ["torch", "ours 8-bit", "ours 24-bit master", "factored", *DDP])
def test_a_sharded_state_goes_to_other_numbers_of_ranks_and_back(
    kind: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """The values stay the same bits from 2 ranks to 4 and back, as no step changes them in between."""
    saved = pools[2].run(save, kind, tmp_path)[0]
    for found in pools[4].run(resume, kind, tmp_path, False):
        assert_same_bits(found, saved)
    for found in pools[2].run(resume, kind, tmp_path, False):
        assert_same_bits(found, saved)


def test_each_rank_writes_its_part_and_says_where_it_belongs(pools: dict[int, RankPool], tmp_path: Path) -> None:
    saved = dict(pools[2].run(save, "torch", tmp_path)[0])
    (checkpoint,) = complete_checkpoints(tmp_path / "run")
    parts = []
    for rank in range(2):
        name = f"rank{rank}/model/0.weight"
        parts.append(load_file(checkpoint.path / f"rank-{rank:05d}-of-00002.safetensors")[name])
        state = checkpoint.state(rank)
        described = state["model"]["0.weight"]["$shard"]
        assert described["offset"] == [16 * rank, 0]
        assert described["shape"] == [31, 6]
        assert len(described["placements"]) == 1
        assert state["meshes"][described["mesh"]]["ranks"] == [0, 1]
        json.dumps(state)
    assert [tuple(part.shape) for part in parts] == [(16, 6), (15, 6)]
    assert torch.equal(torch.cat(parts), saved["0.weight"])


def save_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)


def load_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def load_with_torch(folder: Path, saved: Saved, kind: str = "torch") -> None:
    model, optimizer = make(kind, 2)
    load_by_torch(model, optimizer, folder)
    assert_same_bits(everything(model, optimizer), saved)


def test_a_sharded_checkpoint_is_exported_and_continues_unsharded(pools: dict[int, RankPool], tmp_path: Path) -> None:
    saved = pools[2].run(save, "torch", tmp_path)[0]
    (checkpoint,) = complete_checkpoints(tmp_path / "run")
    export_dcp(checkpoint, tmp_path / "dcp")
    pools[4].run(load_with_torch, tmp_path / "dcp", saved)
    found = state_dicts(checkpoint)
    assert_same_bits(list(found["model"].items()), saved[:4])

    model, optimizer = make("torch", 1)
    import_dcp(tmp_path / "dcp", model, optimizer)
    assert_same_bits(everything(model, optimizer), saved)
    model, optimizer = make("torch", 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, every=None) as ckpt:
            assert_same_bits(everything(model, optimizer), saved)
            ckpt.step()
    assert any("losses will differ from an uninterrupted run" in str(each.message) for each in said)
    pools[2].run(resume, "torch", tmp_path, False)  # a plain checkpoint is split again


def save_with_torch(kind: str, folder: Path) -> tuple[Saved, Saved]:
    """Saves by torch.distributed.checkpoint. Returns the parameters and states, and those of the whole state dict."""
    model, optimizer = make(kind, 0)
    train(model, optimizer, range(3))
    save_by_torch(model, optimizer, folder)
    full = drivetrain.optim.full_state_dict(optimizer)
    assert bool(full) == (dist.get_rank() == 0)
    states = sorted(full["state"].items()) if full else []
    return everything(model, optimizer), [(f"{n}/{name}", value) for n, s in states for name, value in s.items()]


def load_whole(kind: str, saved: Saved, full: dict[str, Any]) -> None:
    """Loads a state dict of whole tensors into a new sharded optimizer, and one that has stepped."""
    for steps in (0, 1):
        model, optimizer = make(kind, 3)
        train(model, optimizer, range(steps))
        optimizer.load_state_dict(full)
        assert_same_bits(everything(model, optimizer)[4:], saved[4:])
        train(model, optimizer, range(1))
        for values in optimizer.state_dict()["state"].values():
            assert isinstance(values["exp_avg"], DTensor)


@pytest.mark.parametrize("kind", ["torch/ddp optimizer", "ours/ddp gradients"])
def test_torchs_checkpoint_and_whole_states_go_to_other_numbers_of_ranks(
    kind: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    (saved, full), *_ = pools[2].run(save_with_torch, kind, tmp_path / "dcp")
    assert_same_bits(full, saved[4:])
    pools[4].run(load_with_torch, tmp_path / "dcp", saved, kind)
    name, _, _ = kind.partition("/")
    model = net(kind, 0)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(1))
    plain = optimizer.state_dict()
    named = {"module." + name: value for name, value in model.state_dict().items()}
    states = [(f"{n}/{k}", v) for n, s in sorted(plain["state"].items()) for k, v in s.items()]
    pools[4].run(load_whole, kind, [*named.items(), *states], plain)


@pytest.mark.parametrize("kind", ["torch/zero", "ours 8-bit/zero"])
def test_zero_redundancy_states_are_saved_by_their_ranks(kind: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    parts = [dict(part) for part in pools[2].run(save, kind, tmp_path)]
    saved = parts[0] | parts[1]
    assert all(any(name not in part for name in saved) for part in parts)
    for size in (2, 4):
        found: dict[str, Tensor] = {}
        for one in pools[size].run(resume, kind, tmp_path, size == 2):
            found |= dict(one)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def overlap() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = zero_class()(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    if dist.get_rank() != 0:
        return  # A refusal needs no other rank: with a group half made, the ranks that connect would fail instead.
    with pytest.raises(NotImplementedError, match=r"overlap_with_ddp=True.*expected overlap_with_ddp=False"):
        Checkpointer("unused", model=model, optimizer=optimizer, signals=())


def accumulate_unreduced(folder: Path) -> None:
    model, optimizer = make("torch", 0)
    with Checkpointer(folder, model=model, optimizer=optimizer, every=None, signals=()) as ckpt:
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(NotImplementedError, match="that FSDP has not reduced"):
            ckpt.save()
        model.set_requires_gradient_sync(True)
        train(model, optimizer, range(1))


def test_what_cannot_be_saved_says_what_to_do(pools: dict[int, RankPool], tmp_path: Path) -> None:
    pools[2].run(overlap)
    pools[2].run(accumulate_unreduced, tmp_path)


def train_fsdp1(folder: Path, use_orig_params: bool) -> None:
    """docs/migration.md says so: torch's losses, and the same bits after a restart."""

    def made(optimizer: type[torch.optim.Optimizer], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
        device = torch.device("cpu")
        model = FullyShardedDataParallel(net("", seed), use_orig_params=use_orig_params, device_id=device)
        return model, optimizer(model.parameters(), lr=1e-2)

    theirs = train(*made(torch.optim.AdamW), range(6), by_rank=True)
    whole = train(*made(drivetrain.optim.AdamW), range(6), by_rank=True)
    assert whole == pytest.approx(theirs, rel=1e-5)
    model, optimizer = made(drivetrain.optim.AdamW)
    with Checkpointer(folder, model=model, optimizer=optimizer, every=None, signals=()) as ckpt:
        train(model, optimizer, range(3), by_rank=True)
        ckpt.save()
    model, optimizer = made(drivetrain.optim.AdamW, seed=1)
    with Checkpointer(folder, model=model, optimizer=optimizer, every=None, signals=()):
        assert train(model, optimizer, range(3, 6), by_rank=True) == whole[3:]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_continues_with_the_same_bits(pools: dict[int, RankPool], tmp_path: Path, use_orig_params: bool) -> None:
    pools[2].run(train_fsdp1, tmp_path, use_orig_params)


# ---- What torch.distributed.checkpoint reads and writes, for plain models as well.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 31), nn.BatchNorm1d(31), nn.Linear(31, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.norm(self.first(rows)).relu())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns two groups, in another order than the model's."""
    params = list(model.parameters())
    return [{"params": params[2:], "lr": 0.02}, {"params": params[:2]}]


def make_net(kind: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, OPTIMIZERS[kind](groups(model))


@pytest.mark.parametrize("kind", ["torch", "ours", "ours 8-bit", "momentum"])
def test_what_is_exported_continues_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    model, optimizer = make_net(kind, 0)
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, every=None):
        train(model, optimizer, range(3))
    expected = train(model, optimizer, range(3, 9))
    out = tmp_path / "dcp"
    assert main(["ckpt", "export", str(tmp_path / "run"), "--format", "dcp", "--out", str(out)]) == 0

    other, its = make_net(kind, 1)
    import_dcp(out, other, its)
    assert train(other, its, range(3, 9)) == expected

    if kind in ("torch", "momentum"):  # torch's own way in
        other, its = make_net(kind, 2)
        load_by_torch(other, its, out)
        assert train(other, its, range(3, 9)) == expected


@pytest.mark.parametrize("keys", ["names", "numbers"])
def test_what_torch_saved_is_imported_through_the_checkpointer(keys: str, tmp_path: Path) -> None:
    model, optimizer = make_net("torch", 0)
    train(model, optimizer, range(3))
    if keys == "names":
        save_by_torch(model, optimizer, tmp_path / "old")
    else:
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / "old")
    expected = train(model, optimizer, range(3, 9))
    for seed in (1, 2):  # the second run continues from the checkpoint of the first
        other, its = make_net("torch", seed)
        import_dcp(tmp_path / "old", other, its)
        with Checkpointer(tmp_path / "run", model=other, optimizer=its, every=1) as ckpt:
            assert (ckpt.restored is None) == (seed == 1)
            found = train(other, its, range(3, 6) if seed == 1 else range(6, 9))
            assert found == (expected[:3] if seed == 1 else expected[3:])


def two_layers(how: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 31), nn.ReLU(), nn.Linear(31, 2))
    if how == "sharded":
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    elif how == "replicated":
        model = nn.parallel.DistributedDataParallel(model)
    return model, OPTIMIZERS["ours" if how == "replicated" else "torch"](groups(model))


def save_sharded(folder: Path) -> None:
    model, optimizer = two_layers("sharded", 0)
    train(model, optimizer, range(3))
    save_by_torch(model, optimizer, folder / "old")


def import_and_train(how: str, folder: Path) -> None:
    model, optimizer = two_layers(how, 1)
    import_dcp(folder / "old", model, optimizer)
    torch.testing.assert_close(train(model, optimizer, range(3, 9)), torch.load(folder / "expected.pt"))


def test_a_sharded_checkpoint_is_imported_at_other_world_sizes(pools: dict[int, RankPool], tmp_path: Path) -> None:
    pools[2].run(save_sharded, tmp_path)
    model, optimizer = two_layers("plain", 0)
    train(model, optimizer, range(3))
    torch.save(train(model, optimizer, range(3, 9)), tmp_path / "expected.pt")
    import_and_train("plain", tmp_path)
    pools[4].run(import_and_train, "sharded", tmp_path)
    pools[2].run(import_and_train, "replicated", tmp_path)


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = make_net("torch", 0)
    train(model, optimizer, range(2))
    save_by_torch(model, optimizer, tmp_path / "old")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    larger = nn.Linear(6, 40)
    with pytest.raises(ValueError, match=r"model has 'model.weight', which .* lacks"):
        import_dcp(tmp_path / "old", larger)
    wide, its = make_net("torch", 1)
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
    model, _ = make_net("torch", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "weights")
    other, _ = make_net("torch", 1)
    import_dcp(tmp_path / "weights", other, model_key="")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
