"""Plugin of pytest that writes each outcome at once, so that a crash loses none, and leaves out tests with an outcome.

Variables: RECORD names the file, of one JSON object per line. ONLY names a file with the ids to run. In a swapped run
STRANGERS_SWAP is set.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(os.environ["RECORD"])
LIBRARIES: list[Any] = []  # operators exist as long as these


def write(**line: Any) -> None:
    with RECORD.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_configure() -> None:
    _name_torchvisions_operators()
    if os.environ.get("STRANGERS_SWAP"):
        import torch

        import drivetrain

        if torch.optim.SGD is not drivetrain.optim.SGD:
            pytest.exit("torch.optim.SGD is torch's own class in a swapped run", returncode=3)


def _name_torchvisions_operators() -> None:
    """Lets torchvision's CUDA build, the one that every index has, be imported with a CPU build of torch."""
    missing = "operator torchvision::"
    while True:
        try:
            import torchvision  # noqa: F401
        except ImportError:
            return
        except RuntimeError as error:
            if not str(error).startswith(missing):
                raise
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(str(error).removeprefix(missing).split()[0] + "(Tensor input) -> Tensor")
            LIBRARIES.append(library)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            return


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    done = {line["id"] for line in lines if "outcome" in line}
    only = Path(os.environ["ONLY"]).read_text().splitlines() if os.environ.get("ONLY") else None
    chosen = [item for item in items if item.nodeid not in done and (only is None or item.nodeid in only)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
    write(total=len(items) + len(done))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        write(id=report.nodeid, outcome="failed", why=_why(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    write(started=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        write(id=report.nodeid, outcome=report.outcome, why="" if report.passed else _why(report))


def _why(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    return (lines[0 if crash else -1] if lines else "")[:300]
