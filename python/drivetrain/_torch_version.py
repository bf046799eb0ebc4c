"""Rejects a torch whose minor version differs from the one that the native module was built for."""

import torch

from . import _build_info


def check_torch(running: str = torch.__version__, built: str = _build_info.TORCH_VERSION) -> None:
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
