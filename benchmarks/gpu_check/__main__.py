"""Builds, tests, sanitizes and measures on a GPU before a deadline, and always writes a report (`make gpu-check`)."""

import argparse
import datetime
import os
import signal
import sys
import time
from pathlib import Path

from . import jobs, machine, parts, report

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "build" / "gpu-check"
RESULTS = REPOSITORY / "benchmarks" / "results"
SECONDS_TO_SPARE = 3.0  # a job that would get less time is not started
CUDA_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    add = parser.add_argument
    add("--part", action="append", choices=parts.PARTS, help="run only this part after the build; may be repeated")
    add("--job", action="append", metavar="NAME", help="run only this job of the parts; may be repeated")
    add("--seconds", type=float, default=570, help="time limit of the whole check (default: %(default).0f)")
    add("--list", action="store_true", help="print the jobs and run none")
    add("--dry-run", action="store_true", help="run on the CPU with tiny sizes and the installed package")
    add("--results", type=Path, help="folder of the report (default: benchmarks/results; dry run: build/gpu-check)")
    add("--wheels", type=Path, default=REPOSITORY / ".wheels", help="output of `make gpu-wheels` (default: .wheels)")
    add("--commit", default="", help="commit to report if the checkout has no history")
    add("pytest", nargs="*", metavar="TESTS", help="arguments for pytest (after --) that replace the default tests")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    begin, deadline = time.monotonic(), jobs.Deadline(args.seconds)
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *CUDA_FOLDERS])
    facts = machine.facts(REPOSITORY, args.commit) if not args.list else {}
    if not (args.list or args.dry_run or facts.get("gpu")):
        print("gpu-check: torch sees no NVIDIA GPU here (ARGS=--dry-run tries the check on the CPU)")
        print("\n".join(f"  {key}: {value}" for key, value in facts.items()))
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    setting = parts.Setting(
        repository=REPOSITORY,
        folder=FOLDER,
        wheels=args.wheels.absolute(),
        capability=str(facts.get("capability", "")),
        num_cores=len(os.sched_getaffinity(0)),
        is_dry=args.dry_run,
        pytest_arguments=args.pytest,
    )
    every = parts.jobs(setting)
    names = args.job or [job.name for job in every]
    if unknown := set(names) - {job.name for job in every}:
        print(
            f"gpu-check: --job is {', '.join(sorted(unknown))}, expected one of {', '.join(job.name for job in every)}"
        )
        return 2
    chosen = [
        job
        for job in every
        if job.part == "build" or (job.part in (args.part or parts.DEFAULT_PARTS) and job.name in names)
    ]
    if args.list:
        print("\n".join(f"{job.part:9} {job.name:19} {job.what}" for job in chosen))
        return 0
    found: report.Report = {
        "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "dry_run": args.dry_run,
        "deadline_seconds": args.seconds,
        "machine": facts,
    }
    results = args.results or (FOLDER if args.dry_run else RESULTS)
    outcomes = {(job["part"], job["name"]): job for job in report.earlier_jobs(found, results)}
    outcomes |= {(job.part, job.name): _not_run(job, "") for job in chosen}
    for kind in (signal.SIGTERM, signal.SIGINT):  # a signal ends the check early but keeps its report
        signal.signal(kind, lambda *_: deadline.end_now())

    def write() -> Path:
        found["seconds"] = round(time.monotonic() - begin, 1)
        found["jobs"] = [outcomes[job.part, job.name] for job in every if (job.part, job.name) in outcomes]
        return report.write(found, results)

    page = write()
    for index, job in enumerate(chosen):
        outcomes[job.part, job.name] = _run(job, chosen[index + 1 :], list(outcomes.values()), deadline)
        write()
    status = report.worst([outcomes[job.part, job.name]["status"] for job in chosen])
    print(f"{status} after {found['seconds']:.0f} s; see {page}")
    return 0 if status in report.FINE else 1


def _run(job: jobs.Job, later: list[jobs.Job], so_far: list[jobs.Details], deadline: jobs.Deadline) -> jobs.Details:
    """Runs a job and prints its outcome. Skips it if the build failed or no time is left."""
    if job.part != "build" and any(each["part"] == "build" and each["status"] != "passed" for each in so_far):
        return _not_run(job, "the build did not pass")
    left = deadline.left_s()
    if left < SECONDS_TO_SPARE:
        return _not_run(job, "the time was over")
    print(f"{job.part:9} {job.name:19} ", end="", flush=True)
    # The job gets at least its own share, even if the later shares no longer fit, but never more than the time left.
    limit = min(left, max(left - sum(each.least_s for each in later), job.least_s))
    log = FOLDER / f"{job.part}-{job.name.replace(' ', '-')}.log"
    outcome = jobs.run(job, limit, deadline, log, REPOSITORY)
    print(f"{outcome['status']}, {outcome['seconds']:.0f} s  {outcome.get('note', '')}", flush=True)
    return outcome


def _not_run(job: jobs.Job, why: str) -> jobs.Details:
    return {"part": job.part, "name": job.name, "status": "not reached", "seconds": 0.0, "note": why}


if __name__ == "__main__":
    sys.exit(main())
