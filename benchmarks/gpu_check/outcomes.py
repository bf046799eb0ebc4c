"""Provides a pytest plugin that writes each test's start and end as a line of JSON, so that a kill loses none."""

import json
import os
from pathlib import Path

import pytest
import torch

LOST_CONTEXT = 70  # exit code of a worker whose CUDA context is lost


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist; its controller receives the reports of all workers
        config.pluginmanager.register(LostContext())
    else:
        config.pluginmanager.register(Lines(Path(os.environ["GPU_CHECK_OUTCOMES"])))


class Lines:
    """Appends lines to a file, which `_read_outcomes` in parts.py reads."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")

    def _write(self, **values: object) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = "failed, as expected" if hasattr(report, "wasxfail") else report.outcome
            self._write(test=report.nodeid, outcome=outcome, seconds=round(report.duration, 2), why=_why(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=f"{report.nodeid} (collecting it)", outcome="failed", seconds=0, why=_why(report))


class LostContext:
    """Ends a worker whose CUDA context is lost, because all later tests would fail. pytest-xdist starts another one."""

    def __init__(self) -> None:
        self._has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed = self._has_failed or report.failed

    def pytest_runtest_logfinish(self) -> None:
        if not self._has_failed or not torch.cuda.is_available():
            return
        self._has_failed = False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(LOST_CONTEXT)


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the reason of a skip, or the end of a failure's text."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    return "" if report.passed else str(report.longreprtext)[-1500:]
