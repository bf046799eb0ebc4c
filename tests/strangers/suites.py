"""The suites of other projects that packages of the index bring along, and those in a folder of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """Names a suite and says how its tests run.

    Args:
        name: Name on the package index, or of a folder.
        version: Version whose sdist has the tests; empty for a folder.
        paths: Test files and folders, from the root of the sdist.
        requirements: What the tests import besides the package itself.
        skips: Expression of pytest's -k; tests need another machine, a network or many minutes.
        source: Folder that has the tests, if the index does not.
    """

    name: str
    version: str = ""
    paths: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    skips: str = ""
    source: Path | None = None


ACCELERATE = ("optimizer", "scheduler", "accelerator", "grad_sync", "kwargs_handlers", "state_checkpointing", "hooks")
SKORCH = ("net", "classifier", "regressor", "setter", "toy")
IGNITE = ("param_scheduler", "lr_finder", "ema_handler", "checkpoint", "state_param_scheduler", "time_limit")
OPACUS = ("gradient_accumulation", "privacy_engine_validation", "mixed_precision", "batch_memory_manager")
OPACUS += ("per_sample_gradients_utils", "privacy_engine", "randomness", "module_validator")

PACKAGED = (
    Suite(
        "accelerate",
        "1.15.0",
        tuple(f"tests/test_{name}.py" for name in ACCELERATE),
        ("parameterized", "datasets", "evaluate", "torchdata", "transformers"),
    ),
    Suite("gpytorch", "1.15.2", ("test/examples", "test/optim"), skips="not keops and not pyro"),
    Suite("opacus", "1.6.0", tuple(f"opacus/tests/{name}_test.py" for name in OPACUS), ("torchvision", "hypothesis")),
    Suite(
        "pytorch-ignite", "0.5.5", tuple(f"tests/ignite/handlers/test_{name}.py" for name in IGNITE), ("torchvision",)
    ),
    Suite("pytorch_optimizer", "4.1.0", ("tests",)),
    Suite("schedulefree", "1.4.1", ("schedulefree/test_schedulefree.py",)),
    Suite("skorch", "1.4.0", tuple(f"skorch/tests/test_{name}.py" for name in SKORCH), ("pandas", "flaky")),
    Suite("timm", "1.0.31", ("tests/test_optim.py", "tests/test_scheduler.py"), ("torchvision",)),
    Suite("torch_optimizer", "0.3.0", ("tests",)),
)


def in_folder(folder: Path) -> tuple[Suite, ...]:
    """Returns a suite for each direct subfolder that has tests."""
    found = sorted(path for path in folder.iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
    return tuple(Suite(path.name, source=path.resolve(), paths=(".",)) for path in found)
