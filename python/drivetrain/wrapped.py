"""Removes the wrappers that frameworks put around optimizers, schedulers and models."""

from typing import Any


def unwrapped(given: Any, name: str, kind: type[Any]) -> Any:
    """Removes a framework's wrappers, which hold the original in an attribute and step on their own schedule.

    Args:
        given: The object, wrapped or not.
        name: Name of the attribute that holds the original.
        kind: Class of the original.
    """
    while isinstance(inner := getattr(given, name, None), kind):
        given = inner
    return given
