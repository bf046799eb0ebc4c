"""Prepares pyproject.toml for one wheel of many: its version and its requirement name the torch that it loads with.

A module loads only with the minor version of torch that it was built against. Wheels for several of them therefore need
names that differ and requirements that say so. CI runs this script on a checkout that it builds one wheel from.

python tools/pin_torch.py 2.13.0 cpu    makes 0.1.0 into 0.1.0+torch2.13.cpu, which requires torch==2.13.*
"""

import argparse
import re
from pathlib import Path


def pinned(text: str, torch: str, platform: str) -> str:
    """Returns the text of pyproject.toml with the version and the requirement of one wheel.

    Args:
        text: The text of pyproject.toml, which may have been changed by this function before.
        torch: The version of torch that the wheel is built against, such as "2.13.0".
        platform: The devices that the wheel has kernels for, such as "cpu" or "cuda".

    Raises:
        ValueError: The text has no line with the version, or none with the requirement.
    """
    minor = ".".join(torch.split(".")[:2])
    version = rf'\g<1>+torch{minor}.{platform}"'
    for pattern, replacement in (
        (r'^(version = "[^"+]+)[^"]*"', version),
        (r'^(dependencies = \["torch)[^"]*"', rf'\g<1>=={minor}.*"'),
    ):
        text, found = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if found != 1:
            raise ValueError(f"pyproject.toml has {found} lines that match {pattern}, expected 1")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="the version of torch that the wheel is built against")
    parser.add_argument("platform", choices=["cpu", "cuda"], help="what the wheel has kernels for")
    args = parser.parse_args()
    path = Path("pyproject.toml")
    path.write_text(pinned(path.read_text(), args.torch, args.platform))


if __name__ == "__main__":
    main()
