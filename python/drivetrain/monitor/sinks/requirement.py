"""Checks for the packages that sinks need."""

import importlib.util


def require(package: str, user: str, module: str = "") -> None:
    """Raises ImportError, with what `user` needs, unless a package of pip can be imported. Does not import it.

    `module` is the name to import, where it differs from the package's.
    """
    try:
        is_there = importlib.util.find_spec(module or package) is not None
    except ModuleNotFoundError:  # a package around it is missing
        is_there = False
    if not is_there:
        raise ImportError(f"{user} needs the package {package}, which is not installed: pip install {package}")
