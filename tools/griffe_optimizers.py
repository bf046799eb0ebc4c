"""Gives the documentation the constructors and docstrings that optimizer classes have once they are declared.

griffe reads sources without running them, and drivetrain/optim/declaration.py adds the common options at run time.
"""

import inspect
from typing import Any

import griffe


class DeclaredOptimizers(griffe.Extension):  # type: ignore[misc]  # griffe's types are not read
    """Reads optimizer classes from the package itself."""

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """Replaces the docstring of a class, and `**options` by the options."""
        init = cls.members.get("__init__")
        if not cls.path.startswith("drivetrain.optim.") or init is None or "options" not in init.parameters:
            return
        found = griffe.dynamic_import(cls.path, [])
        cls.docstring = griffe.Docstring(inspect.cleandoc(found.__doc__), parent=cls, parser="google")
        kept = [each for each in init.parameters if each.name != "options"]
        names = {each.name for each in kept}
        added = [each for each in inspect.signature(found).parameters.values() if each.name not in names]
        kind = griffe.ParameterKind.keyword_only
        init.parameters = griffe.Parameters(
            *kept,
            *(
                griffe.Parameter(
                    each.name,
                    annotation=inspect.formatannotation(each.annotation),
                    kind=kind,
                    default=repr(each.default),
                )
                for each in added
            ),
        )
