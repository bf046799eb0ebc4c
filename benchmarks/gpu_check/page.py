"""Writes the GPU figures of docs/benchmarks.md from the newest report, or that no GPU has been measured."""

import argparse
import json
import sys
from pathlib import Path

from . import parts, report

REPOSITORY = Path(__file__).parents[2]
BEGIN = "<!-- GPU figures: written by `make gpu-table` -->"
END = "<!-- end of GPU figures -->"


def newest(results: Path) -> report.Report | None:
    """Returns the report that was started last, without dry runs."""
    found: list[report.Report] = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    return max((each for each in found if not each["dry_run"]), key=lambda each: each["begun"], default=None)


def section(found: report.Report | None) -> str:
    """Formats the section between BEGIN and END."""
    if found is None:
        measured = [what for what, _ in parts.MEASUREMENTS.values()]
        lines = [
            "**No report of `make gpu-check` exists yet, so that no figure for a GPU is claimed.** It will measure:",
            "",
            *(f"* {what}" for what in measured),
        ]
        return "\n".join(lines)
    machine, jobs = found["machine"], found["jobs"]
    commit = str(machine.get("commit", "unknown"))[:10] + (" with changes" if machine.get("dirty") else "")
    lines = [
        f"Measured on {machine['gpu']} with torch {machine['torch']} at commit {commit} on {found['begun'][:10]} by"
        f" `make gpu-check`; all of it is in `benchmarks/results/{report.file_stem(found)}.md`.",
        "",
        *(f"* {job['part']}, {job['name']}: {job['status']}. {job.get('note', '')}".rstrip() for job in jobs),
        "",
        *report.table([row for job in jobs for rows in job.get("tables", {}).values() for row in rows if _stands(row)]),
    ]
    return "\n".join(lines)


def _stands(row: report.Report) -> bool:
    """Selects the rows of the page: rows that are not indented, and indented rows with shares or memory."""
    return not row["what"].startswith(" ") or row["unit"] in ("%", "MiB")


def rewritten(page: str, found: report.Report | None) -> str:
    """Returns the page with the current section replaced.

    Raises:
        ValueError: The page lacks BEGIN or END.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/benchmarks.md needs the lines {BEGIN!r} and {END!r}, in this order")
    return f"{before}{BEGIN}\n{section(found)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu-table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    args = parser.parse_args()
    path = REPOSITORY / "docs" / "benchmarks.md"
    text = path.read_text()
    new = rewritten(text, newest(REPOSITORY / "benchmarks" / "results"))
    if args.check and new != text:
        print("docs/benchmarks.md does not match benchmarks/results: run `make gpu-table`", file=sys.stderr)
        return 1
    if not args.check:
        path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
