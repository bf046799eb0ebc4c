"""Fails tests in which the stand-in found an error, and skips the tests in cannot_run.txt. This is a pytest plugin."""

import fnmatch
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_cuda

LIST = Path(__file__).with_name("cannot_run.txt")


def read_list(path: Path) -> list[tuple[str, str]]:
    """Returns pairs of a test id pattern and its reason, which the file gives in brackets above the patterns."""
    entries, reason = [], ""
    for line in path.read_text().splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]") and "::" not in line:
            reason = line[1:-1]
        else:
            assert reason, f"{path}: {line} has no reason above it"
            entries.append((line, reason))
    return entries


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fake_cuda: tests the stand-in itself")
    config.addinivalue_line(
        "markers", "fake_cuda_errors: causes errors on purpose and checks that the stand-in finds them"
    )
    if not fake_cuda.is_loaded():
        raise pytest.UsageError("tests/fake_cuda is not preloaded: run make test-fake-cuda")


def _matches(node: str, pattern: str) -> bool:
    # Brackets in a pattern belong to the test's id; they are not a character class.
    return fnmatch.fnmatchcase(node, re.sub(r"\[", "[[]", pattern))


@pytest.hookimpl(tryfirst=True)  # adds the marker before pytest evaluates -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    entries = read_list(LIST)
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("fake_cuda")
        node = item.nodeid.removeprefix("tests/")
        for pattern, reason in entries:
            if _matches(node, pattern):
                item.add_marker(pytest.mark.skip(reason=f"not on the stand-in: {reason}"))
                break


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = fake_cuda.num_errors()
    outcome = yield
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        try:
            sys.modules["torch"].cuda.synchronize()
        except RuntimeError as error:  # reported below, or by the test itself
            print(f"torch.cuda.synchronize after the test: {error}", file=sys.stderr)
    found = fake_cuda.errors(before)
    expected = item.get_closest_marker("fake_cuda_errors")
    if found and not expected and not outcome.excinfo:
        outcome.force_exception(AssertionError("the stand-in for CUDA found:\n" + "\n".join(found[:5])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    ran = sum(len(terminalreporter.getreports(kind)) for kind in ("passed", "failed"))
    terminalreporter.section(f"stand-in for CUDA, seed {os.environ.get('FAKE_CUDA_SEED', '1')}")
    terminalreporter.line(f"{ran} tests ran, {sum(reasons.values())} did not:")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6} {reason}")


@pytest.fixture
def new_errors() -> Callable[[], list[str]]:
    """Returns a function that waits for all enqueued work and returns the errors found since the test began."""
    import torch

    before = fake_cuda.num_errors()

    def look() -> list[str]:
        torch.cuda.synchronize()
        return fake_cuda.errors(before)

    return look
