"""Gives the documentation the constructors and docstrings that optimizer classes have once they are declared.

griffe reads sources without running them, and drivetrain/optim/declaration.py adds the common options at run time.
"""

import inspect
from typing import Any

import griffe


class DeclaredOptimizers(griffe.Extension):  # type: ignore[misc]  # griffe's types are not read
    """Reads optimizer classes from the package itself."""

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """Replaces the docstring of a class, and gives it the constructor with all arguments."""
        if not cls.path.startswith("drivetrain.optim.") or not any(
            "follows" in str(each.value) for each in cls.decorators
        ):
            return
        found = griffe.dynamic_import(cls.path, [])
        cls.docstring = griffe.Docstring(inspect.cleandoc(found.__doc__), parent=cls, parser="google")
        kinds = {each.value: each for each in griffe.ParameterKind}
        init = cls.members.setdefault("__init__", griffe.Function("__init__", parent=cls))
        init.parameters = griffe.Parameters(
            griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword),
            *(
                griffe.Parameter(
                    each.name,
                    annotation=inspect.formatannotation(each.annotation),
                    kind=kinds[each.kind.description],
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(found).parameters.values()
            ),
        )
