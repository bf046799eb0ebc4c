"""Provides DistributedDataParallel and fused optimizers that drop into existing PyTorch training scripts."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch


def _check_system(system: str = platform.system()) -> None:
    """Checks that drivetrain runs on this operating system.

    Args:
        system: Name of the operating system, such as "Linux".

    Raises:
        ImportError: It is not Linux. The message says what to use.
    """
    if system != "Linux":
        raise ImportError(
            f"drivetrain runs on Linux, and this is {system}. On Windows, use WSL 2; on macOS, a container."
        )


def _add_module_for(running: str = torch.__version__, folder: Path = Path(__file__).parent) -> None:
    """Makes the native module for the running torch importable, if this package comes from a wheel.

    A wheel has one module for each release of torch that it serves, in folders such as torch_2_13. A package that was
    built here has one module, which lies in the package itself.

    Args:
        running: Version of the imported torch, such as "2.13.0+cpu".
        folder: The folder of the package.

    Raises:
        ImportError: The wheel has no module for this torch. The message names the releases that it serves.
    """
    served = sorted(path.name for path in folder.glob("torch_*"))
    if not served or any(folder.glob("_C.*.so")):
        return
    wanted = "_".join(["torch", *running.split(".")[:2]])
    if wanted not in served:
        releases = ", ".join(name.removeprefix("torch_").replace("_", ".") for name in served)
        raise ImportError(
            f"this wheel of drivetrain serves torch {releases}, and torch {running} is installed. Install one of "
            "these, or build drivetrain for a newer torch, with a C++ compiler: "
            '"pip install --no-build-isolation --no-deps --force-reinstall --no-binary drivetrain drivetrain".'
        )
    __path__.append(str(folder / wanted))


_check_system()
_add_module_for()
from . import _build_info  # noqa: E402


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
