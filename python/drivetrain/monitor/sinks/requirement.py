"""Checks for the packages that sinks need."""

import importlib.util


def require(package: str, user: str, module: str = "") -> None:
    """Checks that a package can be imported, without importing it.

    Args:
        package: The name for pip.
        user: The feature that needs it, for the message.
        module: The name to import, where it differs from the package's.

    Raises:
        ImportError: It is missing. The message says how to install it.
    """
    try:
        is_there = importlib.util.find_spec(module or package) is not None
    except ModuleNotFoundError:  # a package around it is missing
        is_there = False
    if not is_there:
        raise ImportError(f"{user} needs the package {package}, which is not installed: pip install {package}")
