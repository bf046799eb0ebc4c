"""Writes the report as JSON and as Markdown. Both files are complete at any time."""

import json
import re
from pathlib import Path
from typing import Any

Report = dict[str, Any]
# The statuses are ordered from the worst. The status of a report is the worst of its jobs' statuses.
STATUSES = ("failed", "timed out", "not reached", "missed", "not possible here", "passed")
FINE = ("passed", "not possible here")


def worst(statuses: list[str]) -> str:
    return min(statuses, key=STATUSES.index) if statuses else "not reached"


def file_stem(report: Report) -> str:
    """Builds a file name from the GPU and the date, such as `nvidia-h100-80gb-hbm3-2026-11-22`."""
    gpu: str = "dry-run" if report["dry_run"] else report["machine"].get("gpu", "no-gpu")
    return "-".join([*re.findall(r"[a-z0-9]+", gpu.lower()), report["begun"][:10]])


def earlier_jobs(report: Report, folder: Path) -> list[Report]:
    """Returns the jobs of an earlier report of that day for that commit, so that separate parts make one report."""
    file = folder / f"{file_stem(report)}.json"
    if not file.exists():
        return []
    earlier: Report = json.loads(file.read_text())
    commits = {earlier["machine"]["commit"], report["machine"]["commit"]}
    is_known = len(commits) == 1 and "unknown" not in commits and not report["machine"]["dirty"]
    jobs: list[Report] = earlier["jobs"] if is_known else []
    return jobs


def write(report: Report, folder: Path) -> Path:
    """Writes both files into `folder` and returns the path of the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{file_stem(report)}.md"
    for path, text in ((page, markdown(report)), (page.with_suffix(".json"), json.dumps(report, indent=1) + "\n")):
        part = path.with_name(path.name + ".part")
        part.write_text(text)
        part.replace(path)
    return page


def markdown(report: Report) -> str:
    machine, all_jobs = report["machine"], report["jobs"]
    title = machine.get("gpu", "a machine without a GPU") if not report["dry_run"] else "dry run"
    lines = [f"# GPU check: {title}, {report['begun'][:10]}", ""]
    if report["dry_run"]:
        lines += [
            "This dry run on the CPU with tiny sizes only shows that the check runs. **Its figures mean nothing.**",
            "",
        ]
    dirty = {True: " with changes", False: "", None: " (as the caller says)"}[machine.get("dirty")]
    lines += [
        f"**{worst([job['status'] for job in all_jobs])}** after {report['seconds']:.0f} s,"
        f" of {report['deadline_seconds']:.0f}; commit `{machine.get('commit', 'unknown')}`{dirty}.",
        "",
        "| machine | |",
        "| --- | --- |",
        *(f"| {key.replace('_', ' ')} | {value} |" for key, value in machine.items() if key not in ("commit", "dirty")),
        "",
        "| part | job | outcome | seconds | |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for job in all_jobs:
        cells = (job["part"], job["name"], job["status"], f"{job['seconds']:.0f}", _cell(job.get("note", "")))
        lines.append("| " + " | ".join(cells) + " |")
    for job in all_jobs:
        lines += ["", *_details(job)] if _details(job) else []
    return "\n".join(lines) + "\n"


def _details(job: Report) -> list[str]:
    lines = []
    if job.get("gates"):
        lines += [f"## Required figures of {job['name']}", "", *gates(job["gates"]), ""]
    if job.get("findings"):
        lines += [f"## {job['name']}: {job['part']}", "", *findings(job["findings"]), ""]
    for title, rows in job.get("tables", {}).items():
        lines += [f"## {title}", "", *table(rows), ""]
    for key, title in (("failures", "Failed"), ("xfailed", "Failed, as expected")):
        for name, why in job.get(key, {}).items():
            lines += [f"## {title}: {name}", "", "```", why, "```", ""]
    if job.get("unfinished"):
        lines += ["## Did not end", "", *(f"* {name}" for name in job["unfinished"]), ""]
    if job.get("skips"):
        lines += ["## Skipped", "", *(f"* {count} x {why}" for why, count in job["skips"].items()), ""]
    if job["status"] not in FINE and job.get("log") and not job.get("failures"):
        lines += [f"## End of the output of {job['part']}, {job['name']}", "", "```", job["log"], "```", ""]
    return lines[:-1]


def table(rows: list[Report]) -> list[str]:
    """Formats rows of a benchmark as Markdown."""
    lines = ["| | torch | drivetrain | ratio |", "| --- | ---: | ---: | --- |"]
    for row in rows:
        sides = ["" if row.get(side) is None else f"{_number(row[side])} {row['unit']}" for side in ("torch", "ours")]
        ratio = "" if row.get("ratio") is None else f"{row['ratio']:.2f}"
        if ratio and row.get("low") is not None:
            ratio += f" [{row['low']:.2f}, {row['high']:.2f}]"
        if row.get("met") is False:
            ratio += f", target {row['target']}"
        lines.append("| " + " | ".join((_cell(row["what"].strip()), *sides, ratio)) + " |")
    return lines


def gates(verdicts: list[Report]) -> list[str]:
    """Formats required and measured figures as Markdown."""
    lines = ["| | required | measured | |", "| --- | ---: | ---: | --- |"]
    for each in verdicts:
        measured = "" if each["measured"] is None else f"{_number(each['measured'])} {each['unit']}".strip()
        lines.append(f"| {_cell(each['what'])} | {each['required']} | {measured} | {each['verdict']} |")
    return lines


def findings(found: list[Report]) -> list[str]:
    """Formats the findings of a check as Markdown."""
    words = {True: "holds", False: "**fails**", None: "not possible here"}
    lines = ["| | | seen |", "| --- | --- | --- |"]
    return lines + [f"| {_cell(each['what'])} | {words[each['holds']]} | {_cell(each['seen'])} |" for each in found]


def _number(value: float) -> str:
    """Formats a number with at least three digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 4}f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
