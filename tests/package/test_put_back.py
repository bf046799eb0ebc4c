"""Tests that each defect of tests/fake_cuda/put_back.py still has its source text and its tests."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from file_module import file_module

FILE = Path(__file__).parents[1] / "fake_cuda/put_back.py"
PUT_BACK = file_module(FILE)


@pytest.mark.parametrize("defect", PUT_BACK.DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_has_its_place_and_its_tests(defect: Any, repository: Path) -> None:
    assert PUT_BACK.put_back(defect) != (repository / defect.path).read_text()
    for test in defect.tests:
        path, name = re.fullmatch(r"([^:]+)::(\w+)(?:\[.*\])?", test).groups()  # type: ignore[union-attr]
        functions = [
            node for node in ast.parse((repository / path).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert name in [function.name for function in functions]


def test_the_part_of_ci_shows_every_defect() -> None:
    part = [line for line in FILE.with_name("ci_part.txt").read_text().splitlines() if not line.startswith("#")]
    for defect in PUT_BACK.DEFECTS:
        for test in defect.tests:  # every part contains the tests in tests/fake_cuda
            names = {test, test.split("[")[0], test.split("::")[0]}
            assert test.startswith("tests/fake_cuda/") or names & set(part), test


def test_every_defect_of_the_list_is_there() -> None:
    numbers = {re.match(r"\d+", defect.name)[0] for defect in PUT_BACK.DEFECTS}  # type: ignore[index]
    assert numbers == {"2", "3", "4", "5", "7", "8", "13", "14"}
    assert len({defect.name for defect in PUT_BACK.DEFECTS}) == len(PUT_BACK.DEFECTS)


def test_a_place_that_is_gone_or_there_twice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PUT_BACK, "REPOSITORY", tmp_path)
    defect = PUT_BACK.DEFECTS[0]
    for count in (0, 2):
        path = tmp_path / defect.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(count * defect.old)
        with pytest.raises(ValueError, match=f"defect {defect.name}: .* has {count} places"):
            PUT_BACK.put_back(defect)


def test_a_defect_is_shown_by_failing_tests_with_every_message() -> None:
    defect = PUT_BACK.DEFECTS[0]
    output = "the all-reduce of the buckets' checksums failed in synchronized step 2; the transport reports: "
    output += "No backend type associated with device type cpu"
    assert "synchronized step 2`; `No backend" in PUT_BACK.shown(defect, 1, output)
    assert not PUT_BACK.shown(defect, 0, output)  # the tests passed
    assert not PUT_BACK.shown(defect, 2, output)  # the run was interrupted, or the build failed
    assert not PUT_BACK.shown(defect, 1, output[:100])
