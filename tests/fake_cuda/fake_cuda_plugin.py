"""A pytest plugin for runs on the stand-in: fails tests whose work raced, and skips by a list with reasons."""

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
    """Patterns of test ids with the reason that stands in brackets above them."""
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
    config.addinivalue_line("markers", "fake_cuda: a test of the stand-in itself")
    config.addinivalue_line("markers", "fake_cuda_errors: makes errors for the stand-in to find, and looks at them")
    if not fake_cuda.is_loaded():
        raise pytest.UsageError("tests/fake_cuda is not preloaded: run make test-fake-cuda")


def _matches(node: str, pattern: str) -> bool:
    # Brackets are part of a test's id and no class of characters.
    return fnmatch.fnmatchcase(node, re.sub(r"\[", "[[]", pattern))


@pytest.hookimpl(tryfirst=True)  # before -m asks for the marker
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
        except RuntimeError as error:  # the same failure as below, or one of a test that failed already
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
    """What the stand-in has found since the test began, once all enqueued work has run."""
    import torch

    before = fake_cuda.num_errors()

    def look() -> list[str]:
        torch.cuda.synchronize()
        return fake_cuda.errors(before)

    return look
