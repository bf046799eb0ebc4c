"""Tests of tools/language.py: each rule finds what breaks it, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from file_module import file_module


@pytest.fixture(scope="module")
def language(repository: Path):  # type: ignore[no-untyped-def]
    return file_module(repository / "tools/language.py")


def found(language, root: Path, name: str, text: str) -> list[str]:  # type: ignore[no-untyped-def]
    """Returns the findings in one file as "line: fault", without the sentences."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return [f"{each.line}: {each.text.partition(': ')[0]}" for each in sorted(language.findings(root, [Path(name)]))]


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen " * 2
LONG_FAULT = "26 words, expected at most 25"


@pytest.mark.parametrize(
    ("sentence", "faults"),
    [
        ("Bytes per element, excluding `extra`.", []),
        ("Of one value.", ['a sentence that begins with "Of"']),
        ("The same for rows.", ['a sentence that begins with "The same"']),
        ("The same rows are read.", ['a sentence that begins with "The same"']),
        ("What others have.", ['a sentence that begins with "What"']),
        ("What do others have?", []),
        ("Whether it fits.", ['a sentence that begins with "Whether"']),
        ("Who waits for whom.", ['a sentence that begins with "Who"']),
        ("Whole rows count, and often those behind them.", []),
        (
            "Too few, too many, too: those of one, and that of two.",
            [f'the word "{one}"' for one in (", too", "those of", "that of")],
        ),
        ("Nobody starts anew.", ['the word "Nobody"', 'the word "anew"']),
        (
            "It synchronises labelled colours.",
            [f'the British spelling "{word}"' for word in ("synchronises", "labelled", "colours")],
        ),
        ("It synchronizes the precise promise of a specialist, and analyses differ.", []),
        ("Its behaviour moves towards it.", [f'the British spelling "{word}"' for word in ("behaviour", "towards")]),
        (LONG, [LONG_FAULT]),
        (LONG.replace("one two", "one", 1), []),
        (LONG.replace("three", "three;").replace("nine", "nine:"), [LONG_FAULT]),
    ],
)
def test_faults_of_a_sentence(language, sentence: str, faults: list[str]) -> None:  # type: ignore[no-untyped-def]
    assert list(language.faults(sentence)) == faults


def test_sentences_are_told_apart(language) -> None:  # type: ignore[no-untyped-def]
    block = [
        (3, "It reads 3.5 files, e.g. `a b c`, of"),
        (4, "https://a.b/c. d. Then"),
        (5, 'it runs "." in 0, 1, ... 9 steps.'),
    ]
    assert list(language.sentences(block)) == [
        (3, "It reads 3.5 files, e.g. CODE, of CODE d."),
        (4, 'Then it runs "." in 0, 1, ... 9 steps.'),
    ]


def test_python(language, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = f'''"""Does it."""

# Of one value,
# without the others.
KEPT = 1  # Of a comment behind code.
WHY = "What is left is too long"


def one(value: int) -> int:
    """Returns it.

    Args:
        value: What it was, unlike
            value: This.

    Returns:
        Whether it is.

    Example:
        What = "Nobody reads code"
    """
    if value:
        raise ValueError(
            f"value is {{value}}: {LONG}"
        )
    return what("of")
'''
    assert found(language, tmp_path, "python/a.py", text) == [
        '3: a sentence that begins with "Of"',
        '6: a sentence that begins with "What"',
        '13: a sentence that begins with "What"',
        '17: a sentence that begins with "Whether"',
        "24: 29 words, expected at most 25",
    ]


def test_native_sources(language, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = f"""#include "of/what.h"
// Of one value.

// Stages:
// "one": The same stage
// "two": Another stage
int a = 1;  // Of a comment behind code.
void fail() {{
  throw Error(text("value is ", a, ". What is left? Nobody ", a == 1 ? "knows it well" : "says it at all", '"'));
  check(a, "{LONG[:60]}"
           "{LONG[60:]}");
}}
"""
    assert found(language, tmp_path, "csrc/a.cpp", text) == [
        '2: a sentence that begins with "Of"',
        '5: a sentence that begins with "The same"',
        '9: the word "Nobody"',
        f"10: {LONG_FAULT}",
    ]


def test_pages(language, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = f"""# What it does

Reads [what is said](of/what.md), and nobody <!-- Of a comment. --> else does.

| Of a table | What |
| --- | --- |

- {LONG[:70]}
- {LONG[70:]}

```python
# Of code
```

1. Of a list
"""
    assert found(language, tmp_path, "docs/a.md", text) == [
        '3: the word "nobody"',
        '15: a sentence that begins with "Of"',
    ]


def test_files_and_status(repository: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("python/a.py", "tests/a.py", "docs/a.md", "README.md", "csrc/a.h", "examples/a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text({"md": "", "py": "# "}.get(name[-2:], "// ") + "Of one.\n")
    command = [sys.executable, str(repository / "tools/language.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert [line.split(":")[0] for line in run.stderr.splitlines()] == [
        "README.md",
        "csrc/a.h",
        "docs/a.md",
        "python/a.py",
    ]
    only = subprocess.run([*command, "--only", "nothing"], capture_output=True, text=True, check=False)
    assert (only.returncode, only.stderr) == (0, "")
