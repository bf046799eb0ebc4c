"""Provides DistributedDataParallel and fused optimizers that drop into existing PyTorch training scripts.

Every public name is imported when it is first used. `import drivetrain` checks the system and torch's version, and does
not import torch, so that the command line answers at once.
"""

import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _torch_version() -> str:
    """Returns the version of torch, without an import of torch where its metadata is installed."""
    if "torch" not in sys.modules:
        try:
            return version("torch")
        except PackageNotFoundError:
            pass  # a build of torch may come without metadata
    return str(import_module("torch").__version__)


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


def _add_module_for(running: str, folder: Path = Path(__file__).parent) -> None:
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


def _check_torch(running: str, built: str) -> None:
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


_check_system()
_add_module_for(_torch_version())
from . import _build_info  # noqa: E402

_check_torch(_torch_version(), _build_info.TORCH_VERSION)

if TYPE_CHECKING:
    from . import amp, checkpointing, data, monitor, optim, planner
    from .budget import activation_budget
    from .compute_check import check_compute
    from .ddp import DistributedDataParallel
    from .ddp.accumulate import accumulate
    from .grad.fuse_wgrad import fuse_wgrad
    from .grad.main_grads import float32_grad, main_grads
    from .monitor import Monitor
    from .optim import clip_grad_norm_
    from .planner import plan
    from .recompute import checkpoint
    from .swap import install, uninstall

__version__ = version("drivetrain")
_MODULE_OF = {
    "DistributedDataParallel": "ddp",
    "Monitor": "monitor",
    "accumulate": "ddp.accumulate",
    "activation_budget": "budget",
    "check_compute": "compute_check",
    "checkpoint": "recompute",
    "clip_grad_norm_": "optim",
    "float32_grad": "grad.main_grads",
    "fuse_wgrad": "grad.fuse_wgrad",
    "install": "swap",
    "main_grads": "grad.main_grads",
    "plan": "planner",
    "uninstall": "swap",
}
_PACKAGES = ("amp", "checkpointing", "data", "monitor", "optim", "planner")
__all__ = [
    "DistributedDataParallel",
    "Monitor",
    "__version__",
    "accumulate",
    "activation_budget",
    "amp",
    "check_compute",
    "checkpoint",
    "checkpointing",
    "clip_grad_norm_",
    "data",
    "float32_grad",
    "fuse_wgrad",
    "install",
    "main_grads",
    "monitor",
    "optim",
    "plan",
    "planner",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Imports what has the name."""
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in _PACKAGES:
        value = import_module(f"{__name__}.{name}")
    elif name == "_C":
        torch = import_module("torch")  # loads the libraries that the module needs
        _check_torch(torch.__version__, _build_info.TORCH_VERSION)
        value = import_module(f"{__name__}._C")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
