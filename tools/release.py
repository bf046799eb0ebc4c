"""Says what an upload to the package index needs, what is there, and what is missing.

python tools/release.py    reads dist/, the repository and its metadata; status 1 if something is missing

`make wheel` writes the sdist and the wheel for one Python and one processor. CI's job "wheels" builds the others for a
tag, in the container whose glibc is 2.28; put its files into dist/.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from wheels import REPOSITORY, TORCHES, faults

PYTHONS = ("cp310", "cp311", "cp312", "cp313", "cp314")
PROCESSORS = ("x86_64", "aarch64")
GLIBC = (2, 28)
Finding = tuple[str, str, str]  # PASS or LACKS, what, and what was found or what to do


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", REPOSITORY, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def finding(what: str, is_there: bool, found: str, to_do: str) -> Finding:
    return ("PASS", what, found) if is_there else ("LACKS", what, to_do)


def of_repository(version: str) -> Iterator[Finding]:
    """Yields what the repository must have before its tag is pushed."""
    changes = git("status", "--porcelain")
    yield finding(
        "clean tree",
        not changes,
        git("rev-parse", "--short", "HEAD"),
        "commit or remove the changes that git status shows",
    )
    tag = f"v{version}"
    yield finding("tag", tag in git("tag", "--points-at", "HEAD").split(), tag, f"run: git tag {tag}")
    heading = re.search(rf"^## {re.escape(version)}.*$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    is_dated = bool(heading and re.search(r"\d{4}-\d{2}-\d{2}", heading[0]))
    yield finding(
        "changelog", is_dated, heading[0] if heading else "", f"give CHANGELOG.md a heading with {version} and the date"
    )


def of_files(dist: Path, version: str) -> Iterator[Finding]:
    """Yields what the files in `dist` must be."""
    sdist = dist / f"drivetrain-{version}.tar.gz"
    yield finding("sdist", sdist.exists(), sdist.name, "run: make wheel")
    wheels = {path: parse_wheel_filename(path.name) for path in sorted(dist.glob("*.whl"))}
    for python in PYTHONS:
        for processor in PROCESSORS:
            what = f"wheel {python} {processor}"
            fitting = [
                (path, tag.platform)
                for path, (_, number, _, tags) in wheels.items()
                for tag in tags
                if tag.interpreter == python and tag.platform.endswith(processor) and str(number) == version
            ]
            if not fitting:
                yield ("LACKS", what, "take it from CI's job wheels")
                continue
            path, platform = fitting[0]
            yield from of_wheel(what, path, platform)


def of_wheel(what: str, path: Path, platform: str) -> Iterator[Finding]:
    """Yields what one wheel must be."""
    glibc = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    is_old_enough = glibc is not None and (int(glibc[1]), int(glibc[2])) <= GLIBC
    wanted = "glibc {}.{}".format(*GLIBC)
    yield finding(
        what, is_old_enough, platform, f"{path.name} needs more than {wanted}: build it in the manylinux container"
    )
    found = faults(path)
    with zipfile.ZipFile(path) as archive:
        modules = {
            match[1] for name in archive.namelist() if (match := re.match(r"drivetrain/torch_(\d+_\d+)/_C\.", name))
        }
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = Parser().parsestr(archive.read(metadata).decode())
    served = {"_".join(release.split(".")[:2]) for release in TORCHES}
    found += [f"it has no module for torch {each.replace('_', '.')}" for each in sorted(served - modules)]
    (torch,) = [each for line in headers.get_all("Requires-Dist", []) if (each := Requirement(line)).name == "torch"]
    found += [f"{torch} excludes torch {release}" for release in TORCHES if not torch.specifier.contains(release)]
    yield finding(
        "  its contents",
        not found,
        f"modules for torch {', '.join(sorted(modules))}".replace("_", "."),
        "; ".join(found),
    )
    yield finding("  its links", "Project-URL" in headers, "[project.urls]", "add [project.urls] to pyproject.toml")


def of_descriptions(dist: Path) -> Finding:
    """Returns whether the index would show the description of each file."""
    command: list[str | Path] = [sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.glob("drivetrain-*"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return finding("description", done.returncode == 0, "twine check", done.stdout.strip() + done.stderr.strip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=REPOSITORY / "dist", help="folder of the files; default: dist")
    args = parser.parse_args()
    version = re.search(r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert version, "pyproject.toml has no version"
    findings = [*of_repository(version[1]), *of_files(args.dist, version[1]), of_descriptions(args.dist)]
    for mark, what, text in findings:
        print(f"{mark:5}  {what:22}  {text}")
    print("--     by hand                 the right to upload under the name drivetrain, of CI or by a token")
    lacking = sum(mark == "LACKS" for mark, _, _ in findings)
    print(f"{lacking} of {len(findings)} are missing" if lacking else "everything is there: run twine upload dist/*")
    return int(lacking > 0)


if __name__ == "__main__":
    sys.exit(main())
