"""Provides DistributedDataParallel and fused optimizers that drop into existing PyTorch training scripts."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ._torch_version import check_torch

check_torch()  # must run first: with another torch, the native module would fail with an undefined symbol

from . import amp, data, optim  # noqa: E402
from .budget import activation_budget  # noqa: E402
from .ddp import DistributedDataParallel  # noqa: E402
from .ddp.accumulate import accumulate  # noqa: E402
from .grad.fuse_wgrad import fuse_wgrad  # noqa: E402
from .grad.main_grads import float32_grad, main_grads  # noqa: E402
from .optim.clip_grad import clip_grad_norm_  # noqa: E402
from .planner import plan  # noqa: E402
from .recompute import checkpoint  # noqa: E402
from .swap import install, uninstall  # noqa: E402

if TYPE_CHECKING:
    from .monitor import Monitor

__version__ = version("drivetrain")
__all__ = [
    "DistributedDataParallel",
    "Monitor",
    "__version__",
    "accumulate",
    "activation_budget",
    "amp",
    "checkpoint",
    "clip_grad_norm_",
    "data",
    "float32_grad",
    "fuse_wgrad",
    "install",
    "main_grads",
    "optim",
    "plan",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Imports Monitor when it is first used."""
    if name == "Monitor":
        from .monitor import Monitor

        return Monitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
