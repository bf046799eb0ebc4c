"""Imports a Python file that lies in no package, such as those of tools/, for the tests of its functions."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def file_module(path: Path) -> Any:
    """Returns a new module made from the file, named by the file's stem."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and NamedTuples look their annotations up here
    spec.loader.exec_module(module)
    return module
