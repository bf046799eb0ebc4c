"""Prints a summary after the tests: how many of torch's own tests ran, passed and were skipped, with reasons."""

from collections import Counter

from _pytest.terminal import TerminalReporter

from . import baseline


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    def named(category: str) -> list[str]:
        reports = terminalreporter.stats.get(category, [])
        return [r for r in reports if "test_passes_what_torchs_class_passes[" in getattr(r, "nodeid", "")]

    passed, failed, exceptions, skipped = (named(c) for c in ("passed", "failed", "xfailed", "skipped"))
    ran = [*passed, *failed, *exceptions]
    if not ran:
        return
    terminalreporter.section(f"torch {baseline.torch_version()}'s own DDP tests with our class")
    terminalreporter.line(
        f"{len(ran) + len(skipped)} selected, {len(ran)} ran: {len(passed)} passed, {len(failed)} failed, "
        f"{len(exceptions)} listed exceptions; {len(skipped)} skipped, which torch's class does not pass on a CPU"
    )
    for why, number in Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped).most_common():
        terminalreporter.line(f"  {number} skipped: {why}")
    for report in exceptions:
        terminalreporter.line(f"  exception {report.nodeid.partition('[')[2][:-1]}: {report.wasxfail}")
