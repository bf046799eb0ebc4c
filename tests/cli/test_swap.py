"""Tests what install() and uninstall() rebind, and an unedited torch script on our classes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import parallel
from torch.nn.parallel import distributed

import drivetrain
from drivetrain.cli import children
from drivetrain.ddp import distributed as ddp
from drivetrain.optim import left_to_torch
from warm_python import warm_environ, warm_python

# A list holds the class, because install() would rebind a global of this module.
TORCH_DDP = [parallel.DistributedDataParallel]
TORCH_OPTIMIZERS = {name: getattr(torch.optim, name) for name in ("AdamW", "Adam", "SGD")}
OURS = drivetrain.DistributedDataParallel


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    drivetrain.uninstall()
    assert parallel.DistributedDataParallel is TORCH_DDP[0]
    assert distributed.DistributedDataParallel is TORCH_DDP[0]
    assert torch.optim.AdamW is TORCH_OPTIMIZERS["AdamW"]
    assert ddp.defaults == {}


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns a module, imported before install(), that has torch's class under two names."""
    module = ModuleType("framework.strategies")
    module.__dict__.update(DistributedDataParallel=TORCH_DDP[0], DDP=TORCH_DDP[0], other=torch.nn.Linear)
    monkeypatch.setitem(sys.modules, "framework.strategies", module)
    return module


def test_install_rebinds_torchs_names_and_every_alias_and_uninstall_restores_them(framework: ModuleType) -> None:
    names = drivetrain.install()
    assert parallel.DistributedDataParallel is OURS
    assert distributed.DistributedDataParallel is OURS
    assert framework.DDP is framework.DistributedDataParallel is OURS
    assert framework.other is torch.nn.Linear
    assert {"torch.nn.parallel.DistributedDataParallel", "framework.strategies.DDP"} <= set(names)

    drivetrain.uninstall()
    assert framework.DDP is framework.DistributedDataParallel is TORCH_DDP[0]


def test_main_module_is_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__dict__["DDP"] = TORCH_DDP[0]
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert "__main__.DDP" in drivetrain.install()
    assert main.DDP is OURS


def test_second_install_adds_defaults_and_keeps_the_originals(framework: ModuleType) -> None:
    drivetrain.install(bucket_cap_mb=1, static_graph=False)
    assert drivetrain.install(bucket_cap_mb=2) == []
    assert ddp.defaults == {"bucket_cap_mb": 2, "static_graph": False}
    drivetrain.uninstall()
    assert framework.DDP is TORCH_DDP[0]
    drivetrain.uninstall()
    assert framework.DDP is TORCH_DDP[0]


def test_uninstall_leaves_a_name_that_was_bound_again_since(framework: ModuleType) -> None:
    drivetrain.install()
    framework.DDP = torch.nn.Linear
    drivetrain.uninstall()
    assert framework.DDP is torch.nn.Linear
    assert framework.DistributedDataParallel is TORCH_DDP[0]


def test_import_of_ours_survives_install_and_uninstall(framework: ModuleType) -> None:
    framework.DDP = OURS
    drivetrain.install()
    drivetrain.uninstall()
    assert framework.DDP is OURS


def test_unknown_default_is_named_and_changes_nothing(framework: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"'bucket_cap'.*it takes: device_ids, .*bucket_cap_mb"):
        drivetrain.install(optim=True, init_sync=False, bucket_cap=25)
    assert framework.DDP is TORCH_DDP[0]
    assert ddp.defaults == {}


def test_the_module_itself_has_no_default() -> None:
    with pytest.raises(TypeError, match="'module'"):
        drivetrain.install(module=torch.nn.Linear(1, 1))


class _Lazy(ModuleType):
    """Loads on any attribute access, as modules of importlib.util.LazyLoader and transformers do."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"woken by {name}")


class _Slotted:
    __slots__ = ()


def test_lazy_and_odd_modules_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = _Lazy("lazy")
    object.__getattribute__(lazy, "__dict__")["DDP"] = TORCH_DDP[0]
    for name, module in {"odd.lazy": lazy, "odd.none": None, "odd.slots": _Slotted(), "odd.type": dict}.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert "odd.lazy.DDP" in drivetrain.install()
    assert object.__getattribute__(lazy, "__dict__")["DDP"] is OURS


def test_torchs_internals_keep_torchs_class_and_isinstance_holds() -> None:
    from torch.distributed.checkpoint import state_dict

    drivetrain.install()
    assert vars(state_dict)["DDP"] is TORCH_DDP[0]
    assert issubclass(parallel.DistributedDataParallel, TORCH_DDP[0])


def test_torch_module_first_imported_while_installed_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    drivetrain.install()
    late, mine = ModuleType("torch.late"), ModuleType("mine")
    late.__dict__["DDP"] = mine.__dict__["DDP"] = OURS
    monkeypatch.setitem(sys.modules, "torch.late", late)
    monkeypatch.setitem(sys.modules, "mine", mine)
    drivetrain.uninstall()
    assert late.DDP is TORCH_DDP[0]
    assert mine.DDP is OURS


@pytest.mark.usefixtures("process_group")
def test_torch_compile_finds_the_active_module() -> None:
    """If only distributed.py's name were rebound, torch.compile would see no DDP and not split its graph."""
    from torch._dynamo import convert_frame

    active = []

    class Net(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            active.append(vars(convert_frame)["DistributedDataParallel"]._get_active_ddp_module())
            return super().forward(input)

    drivetrain.install()
    model = parallel.DistributedDataParallel(Net(2, 2))
    model(torch.ones(1, 2))
    assert active == [model]


def test_optimizers_are_rebound_only_when_asked(framework: ModuleType) -> None:
    framework.AdamW = TORCH_OPTIMIZERS["AdamW"]
    drivetrain.install()
    assert torch.optim.AdamW is framework.AdamW is TORCH_OPTIMIZERS["AdamW"]

    names = drivetrain.install(optim=True)
    assert "torch.optim.adamw.AdamW" in names
    assert framework.AdamW is drivetrain.optim.AdamW
    for name, original in TORCH_OPTIMIZERS.items():
        ours = getattr(torch.optim, name)
        assert ours is getattr(drivetrain.optim, name)
        assert vars(sys.modules[original.__module__])[name] is ours
    assert vars(sys.modules["torch.optim.adamw"])["Adam"] is TORCH_OPTIMIZERS["Adam"]

    drivetrain.uninstall()
    assert framework.AdamW is TORCH_OPTIMIZERS["AdamW"]


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_swapped_optimizer_steps_as_torchs(name: str) -> None:
    def stepped(kind: type[torch.optim.Optimizer]) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = kind([weight], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        for _ in range(2):
            weight.grad = weight.detach().cos()
            optimizer.step()
            scheduler.step()
        return weight.detach()

    drivetrain.install(optim=True)
    swapped = getattr(torch.optim, name)
    assert issubclass(swapped, TORCH_OPTIMIZERS[name])
    torch.testing.assert_close(stepped(swapped), stepped(TORCH_OPTIMIZERS[name]), rtol=1e-6, atol=1e-7)


TORCH_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    torch.save({"parameters": model.module.state_dict(), "class": type(model).__module__}, sys.argv[1])
dist.barrier()  # a rank that leaves alone may end in "terminate called without an active exception"
dist.destroy_process_group()
"""


def _torchrun(*arguments: str, tries: int = 1) -> str:
    """Runs on two ranks and returns their stderr. tries: attempts, as some scripts die while their interpreter ends."""
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environ = {**warm_environ(), "OMP_NUM_THREADS": "1"}
    for left in reversed(range(tries)):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0 or not left or "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_unedited_script_trains_the_same_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCH_SCRIPT)
    _torchrun(str(script), str(tmp_path / "torch.pt"), tries=3)  # torch alone, none of ours
    said = _torchrun("-m", "drivetrain", "run", "--optim", str(script), str(tmp_path / "ours.pt"))

    torchs, ours = (torch.load(tmp_path / name, weights_only=True) for name in ("torch.pt", "ours.pt"))
    assert torchs["class"] == "torch.nn.parallel.distributed"
    assert ours["class"] == "drivetrain.ddp.distributed"
    torch.testing.assert_close(ours["parameters"], torchs["parameters"], rtol=1e-6, atol=1e-7)

    wrapped, optimizers = [line for line in said.splitlines() if line.startswith("drivetrain run: ")]  # of rank 0 alone
    assert "wrapped: Sequential (" in wrapped
    assert "optimizers: AdamW (" in optimizers


def test_alike_objects_are_counted_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Attacks on images and inner loops construct an optimizer per batch."""
    tensor = torch.zeros(3).requires_grad_()
    before = len(left_to_torch.constructed)
    for cls in (drivetrain.optim.Adam, drivetrain.optim.SGD, drivetrain.optim.Adam):
        cls([tensor], lr=0.1)
    children.of_child(0, before)
    of_adam, of_sgd = (f"{name} (1 parameters in 1 group)" for name in ("Adam", "SGD"))
    assert f"optimizers: 2 x {of_adam}; {of_sgd}\n" in capsys.readouterr().err
    assert left_to_torch.constructed[before] is left_to_torch.constructed[-1]
