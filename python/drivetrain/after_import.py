"""Calls functions right after a module has been imported, whenever that is. It imports no torch."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_after_imports(by_module: dict[str, list[Callable[[ModuleType], None]]]) -> None:
    """Calls functions with a module: now if it has been imported, and otherwise once, right after its import.

    Args:
        by_module: The functions by the name of their module.
    """
    sys.meta_path.insert(0, _AfterImports(by_module))
    for name in list(by_module):
        if name in sys.modules:
            for function in by_module.pop(name, ()):
                function(sys.modules[name])


class _AfterImports(importlib.abc.MetaPathFinder):
    """Finds the modules as before, and adds the calls to their execution."""

    def __init__(self, by_module: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._by_module = by_module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._by_module:
            return None
        functions = self._by_module.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        self._by_module[fullname] = functions  # whoever asks may only look whether there is such a module
        if spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            for function in self._by_module.pop(fullname, ()):
                function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
