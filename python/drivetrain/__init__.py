"""Provides DistributedDataParallel and fused optimizers that drop into existing PyTorch training scripts."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from . import _build_info


def _check_torch(running: str = torch.__version__, built: str = _build_info.TORCH_VERSION) -> None:
    """Checks that both versions have the same major and minor numbers.

    Args:
        running: Version of the imported torch, such as "2.13.0+cpu".
        built: Version of the torch that the native module was compiled against.

    Raises:
        ImportError: The versions differ. The message contains the pip command that repairs the installation.
    """
    if running.split(".")[:2] != built.split(".")[:2]:
        minor = ".".join(built.split(".")[:2])
        raise ImportError(
            f"drivetrain was built for torch {minor} but torch {running} is installed. To build it for this torch, "
            'run "pip install --no-build-isolation --force-reinstall --no-deps drivetrain" (or "." in its source '
            f'folder). To go back, run "pip install torch=={built}".'
        )


_check_torch()  # must run first: with another torch, the native module would fail with an undefined symbol

from . import amp, data, optim  # noqa: E402
from .budget import activation_budget  # noqa: E402
from .ddp import DistributedDataParallel  # noqa: E402
from .ddp.accumulate import accumulate  # noqa: E402
from .grad.fuse_wgrad import fuse_wgrad  # noqa: E402
from .grad.main_grads import float32_grad, main_grads  # noqa: E402
from .optim import clip_grad_norm_  # noqa: E402
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
