"""Tests of tools/pin_torch.py: the metadata of a wheel names the torch that its module loads with."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from file_module import file_module

tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer have it


@pytest.fixture(scope="module")
def pinned(repository: Path):  # type: ignore[no-untyped-def]
    return file_module(repository / "tools/pin_torch.py").pinned


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_wheel_requires_the_torch_that_it_was_built_against(pinned, repository: Path, platform: str) -> None:  # type: ignore[no-untyped-def]
    text = (repository / "pyproject.toml").read_text()
    once = pinned(text, "2.13.0", platform)
    project = tomllib.loads(once)["project"]
    assert Version(project["version"]).local == f"torch2.13.{platform}"
    assert Version(project["version"]).public == Version(tomllib.loads(text)["project"]["version"]).public
    torch = next(each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    assert [
        version for version in ("2.12.0", "2.13.0+cpu", "2.13.1", "2.14.0") if torch.specifier.contains(version)
    ] == ["2.13.0+cpu", "2.13.1"]
    assert pinned(once, "2.13.0", platform) == once
    assert pinned(pinned(text, "2.14.1", "cuda"), "2.13.0", platform) == once


def test_a_file_without_the_requirement_is_refused(pinned) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"0 lines that match .*dependencies"):
        pinned('version = "1.0"\n', "2.13.0", "cpu")
