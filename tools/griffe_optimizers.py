"""Gives the documentation the constructors and docstrings that classes have when Python runs them, as Markdown.

griffe reads sources without running them, and drivetrain/optim/declaration.py adds the common options at run time.
"""

import inspect
import re
from typing import Any

import griffe


def as_markdown(docstring: str) -> str:
    """Takes the `::` off that announces code in docstrings, because Markdown shows it as text."""
    return re.sub(r"::$", ":", re.sub(r"^\s*::\n", "", docstring, flags=re.MULTILINE), flags=re.MULTILINE)


class DeclaredOptimizers(griffe.Extension):  # type: ignore[misc]  # griffe's types are not read
    """Reads optimizer classes from the package itself."""

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """Replaces the docstring of a class, and `**options` by the options."""
        init = cls.members.get("__init__")
        if not cls.path.startswith("drivetrain.optim.") or init is None or "options" not in init.parameters:
            return
        found = griffe.dynamic_import(cls.path, [])
        cls.docstring = griffe.Docstring(as_markdown(inspect.cleandoc(found.__doc__)), parent=cls, parser="google")
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


class LiteralBlocks(griffe.Extension):  # type: ignore[misc]
    """Rewrites all docstrings."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
