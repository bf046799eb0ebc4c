"""Provides the shared fixtures: GPU skipping with its reason, instruction sets, and real ranks over gloo."""

import gc
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import _C
from effort import SEED
from ranks import RankPool
from shared_builds import built_once

# These files take longest and run first, longest first, so that all test processes (see Makefile) end together.
LONGEST = (
    *("test_nccl", "test_faults", "test_elastic", "test_torch_ddp", "test_logical_ranks", "test_crashes"),
    *("test_notebooks", "test_gpu_check", "test_tasks", "test_tags", "test_strangers_scripts", "test_compiled"),
    *("test_compute_check", "test_trial", "test_watch", "test_hang_kinds", "test_explain", "test_late_device"),
    *("test_example_scripts", "test_doctor_faults", "test_build", "test_resume", "test_lightning_callbacks"),
    *("test_sharded", "test_shard", "test_cli", "test_resumed_trainers", "test_docs", "test_rank0_saves"),
)


def pytest_report_header() -> str:
    return f"seed of the random scripts: SEED={SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    if not torch.cuda.is_available():
        _skip_gpu_tests(config, items)


def pytest_collection_finish() -> None:
    """Leaves what the collection made out of later garbage collections, each of which would take half a second."""
    gc.collect()
    gc.freeze()


def _skip_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the first GPU test of each file, skipped with the number of those that it stands for.

    A report for each of the thousands of tests would take longer than many files.
    """
    of_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if "gpu" in item.keywords:
            of_file.setdefault(item.path, []).append(item)
    left_out: set[pytest.Item] = set()
    for first, *others in of_file.values():
        also = f", nor for {len(others)} more tests of this file" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"no NVIDIA GPU here{also}"))
        left_out.update(others)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_threads_and_isa() -> Iterator[None]:
    """Takes back what a test sets for all of the process, which would change the bits of later tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    _C.force_isa("")


@pytest.fixture(params=_C.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Runs the test once for each instruction set of this processor."""
    _C.force_isa(request.param)
    return str(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for each kind of device, as torch's default device."""
    torch.set_default_device(None if request.param == "cpu" else request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def in_warm_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty folder the current one, in which `drivetrain try` and `explain` start scripts in milliseconds."""
    from warm_python import warm_python

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python())
    return tmp_path


@pytest.fixture(scope="session")
def late_device() -> Path:
    """Builds a module that registers a test device, and returns its folder.

    Use it in a separate process, because torch has only one such device.
    """
    sources = [path for path in (Path(__file__).parent / "late_device").iterdir() if path.suffix in (".cpp", ".h")]
    return built_once("late_device", [*sources, Path(__file__)], _build_late_device)


def _build_late_device(folder: Path) -> None:
    site, sources = Path(torch.__file__).parent, Path(__file__).parent / "late_device"
    together = folder / "late_device.cpp"  # one compilation, because torch's headers take most of its time
    together.write_text("".join(f'#include "{source}"\n' for source in sorted(sources.glob("*.cpp"))))
    include = [site / "include", site / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", together]
    command += [*(f"-I{path}" for path in include), "-o", folder / "late_device.so"]
    command += [f"-L{site / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stdout + built.stderr


@pytest.fixture(scope="session")
def _rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(world_size=2, folder=tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def on_ranks(_rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Runs a module-level function on two real ranks of a fresh gloo group and returns each rank's result."""
    return _rank_pool.run


@pytest.fixture(scope="module")
def _more_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(world_size=size, folder=tmp_path_factory.mktemp(f"{size}-ranks")) for size in (3, 4)}
    yield pools  # a pool starts with its first call
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_three_ranks(_more_ranks: dict[int, RankPool]) -> Callable[..., list[Any]]:
    """Does the work of `on_ranks` on three ranks."""
    return _more_ranks[3].run


@pytest.fixture
def on_four_ranks(_more_ranks: dict[int, RankPool]) -> Callable[..., list[Any]]:
    """Does the work of `on_ranks` on four ranks."""
    return _more_ranks[4].run


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent


@pytest.fixture
def process_group() -> Iterator[None]:
    """Makes this process the only rank of a gloo group."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
