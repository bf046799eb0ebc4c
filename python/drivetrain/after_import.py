"""Calls functions right after a module has been imported, whenever that is. It imports no torch."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions with a module once it has been imported. It must be put into `sys.meta_path`.

    Args:
        by_module: The functions by the name of their module.
    """

    def __init__(self, by_module: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._by_module = by_module

    def apply_to_loaded(self) -> None:
        """Calls the functions of modules that have been imported before."""
        for name in list(self._by_module):
            if name in sys.modules:
                self._apply(name, sys.modules[name])

    def _apply(self, name: str, module: ModuleType) -> None:
        for function in self._by_module.pop(name, ()):
            function(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._by_module:
            return None
        functions = self._by_module.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            for function in functions:
                function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
