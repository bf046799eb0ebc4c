"""Finds the code blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HIDDEN = "test-setup"  # the language of Python that readers do not see
_SETUP = re.compile(r"^<!-- test-setup\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Holds a fenced block: its language, its text, and the number of its first line in the page."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """Lists the pages whose blocks are tested."""
    first = [REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
    return [
        *first,
        *sorted((REPOSITORY / "docs").rglob("*.md")),
        *sorted((REPOSITORY / "examples").rglob("README.md")),
        REPOSITORY / "benchmarks" / "tasks" / "README.md",
    ]


def blocks(page: Path) -> list[Block]:
    """Reads the blocks of a page, in order. A hidden comment `test-setup` counts as a block of that language."""
    text = page.read_text()
    found = [(match, HIDDEN) for match in _SETUP.finditer(text)]
    found += [(match, match.group(1)) for match in _FENCE.finditer(text)]
    found.sort(key=lambda each: each[0].start())
    groups = [(match, language, match.lastindex or 0) for match, language in found]
    return [
        Block(language, match.group(last), text.count("\n", 0, match.start(last)) + 1)
        for match, language, last in groups
    ]
