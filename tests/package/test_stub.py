"""Tests that the stub of the native module has the names and arguments of the module."""

import ast
import re
from pathlib import Path

import drivetrain
from drivetrain import _C

STUB = Path(drivetrain.__file__).with_name("_C.pyi")


def arguments(function: ast.FunctionDef) -> list[str]:
    names = [a.arg for a in function.args.args + function.args.kwonlyargs]
    return [name for name in names if name != "self"]


def stub_names() -> dict[str, list[str] | None]:
    """Maps each dotted name to its argument names; None for classes, properties and constants."""
    names: dict[str, list[str] | None] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = arguments(node)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = None
            for member in node.body:
                if isinstance(member, ast.Expr) and node.body == [member]:  # `...`: the class adds no member
                    continue
                if isinstance(member, ast.AnnAssign):  # a constant of the class
                    names[f"{node.name}.{ast.unparse(member.target)}"] = None
                    continue
                assert isinstance(member, ast.FunctionDef)
                if member.name.startswith("__") and member.name != "__init__":  # special methods have fixed arguments
                    continue
                is_property = any(getattr(d, "id", "") == "property" for d in member.decorator_list)
                names[f"{node.name}.{member.name}"] = None if is_property else arguments(member)
    return names


def has_signature(member: str, attribute: object) -> bool:
    """Returns True for an `__init__` that pybind11 defines: other slots document no types."""
    return member == "__init__" and (attribute.__doc__ or "").startswith("__init__(self: ")


def native_arguments(function: object) -> list[str]:
    """Parses argument names from the signature that pybind11 puts first in a docstring."""
    signature = re.match(r"\w+\((.*)\) -> ", function.__doc__ or "")
    assert signature, function
    flat = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", signature[1])))
    names = [part.split(":")[0].strip() for part in flat.split(",") if ":" in part]
    return [name for name in names if name != "self" and not re.fullmatch(r"arg\d+", name)]


def native_names() -> dict[str, list[str] | None]:
    names: dict[str, list[str] | None] = {}
    for name, value in vars(_C).items():
        if name.startswith("__"):
            continue
        if not isinstance(value, type):
            names[name] = native_arguments(value)
            continue
        names[name] = None
        for member, attribute in vars(value).items():
            if member.startswith(("__", "_pybind11")) and not has_signature(member, attribute):
                continue
            is_value = isinstance(attribute, property) or not callable(attribute)
            names[f"{name}.{member}"] = None if is_value else native_arguments(attribute)
    return names


def test_stub_and_module_agree() -> None:
    assert stub_names() == native_names()
