"""Refuses to load under another torch than the one this build was made for."""

import torch

from . import _build_info


def check_torch(running: str = torch.__version__, built: str = _build_info.TORCH_VERSION) -> None:
    """Raises ImportError, with the pip command that mends it, unless both are of the same minor version.

    Args:
        running: version of the torch that is imported, such as "2.13.0+cpu".
        built: version of the torch that the native module was compiled against.
    """
    if running.split(".")[:2] != built.split(".")[:2]:
        minor = ".".join(built.split(".")[:2])
        raise ImportError(
            f"drivetrain was built for torch {minor} but torch {running} is installed: "
            f'run "pip install --no-build-isolation --force-reinstall --no-deps drivetrain" (or "." in its source '
            f'folder) to build it for this torch, or "pip install torch=={built}" to go back.'
        )
