"""Loads a training script as Python loads its main module, for `drivetrain run` and plans."""

import io
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


def load_script(name: str) -> tuple[ModuleType, CodeType]:
    """Builds the `__main__` module of `python name`, and compiles its code."""
    path = Path(name).absolute()
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    module.__dict__.update(__file__=str(path), __loader__=loader, __package__=None, __cached__=None)
    set_first_path(os.path.realpath(path.parent))
    return module, code


def set_first_path(folder: str) -> None:
    """Replaces the first entry of `sys.path`, which belongs to drivetrain's own command (absent under -P)."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 lacks the flag
        sys.path[0] = folder
