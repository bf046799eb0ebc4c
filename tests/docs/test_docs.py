"""Tests the pages of the project: their Python blocks run, their shell commands exist, and the quick ones run."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from pages import HIDDEN, REPOSITORY, Block, blocks, pages

from drivetrain.checkpointing import Store
from drivetrain.cli import whole_parser
from warm_python import warm_environ, warm_python

NAMES = {page: str(page.relative_to(REPOSITORY)) for page in pages()}
ALL_BLOCKS = [pytest.param(page, block, id=f"{NAMES[page]}-{block.line}") for page in NAMES for block in blocks(page)]
each_page = pytest.mark.parametrize("page", NAMES, ids=NAMES.get)
LANGUAGES = {HIDDEN, "python", "bash", "diff", "text"}
# These commands are not drivetrain's, so their arguments are not checked.
OTHERS = {"cd", "docker", "eval", "git", "pkill", "pre-commit"}
# These commands of drivetrain take a moment, and need at most a checkpoint in runs/gpt.
QUICK = re.compile(r"env|doctor|ckpt (?!.*--key-file|.*--format)\w+ runs/gpt.*")


def lines_of(block: Block) -> list[list[str]]:
    """Splits the commands of a shell block into words, without comments and variables before them."""
    commands = []
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words:
            commands.append(words)
    return commands


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Runs every Python block; returns the traceback of each page that failed."""
    command = [sys.executable, str(Path(__file__).parent / "run_blocks.py"), *map(str, pages())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return found


@each_page
def test_python_blocks_run(failures: dict[str, str], page: Path) -> None:
    assert not failures[str(page)], failures[str(page)]


@pytest.mark.parametrize("page", [page for page in NAMES if "```python\n" in page.read_text()], ids=NAMES.get)
def test_first_python_block_runs_alone(page: Path, tmp_path: Path) -> None:
    """A reader pastes what the page shows into a new Python, or saves it if the next block starts it with torchrun."""
    shown = [block for block in blocks(page) if block.language != HIDDEN]
    first, following = next(pair for pair in pairwise([*shown, shown[-1]]) if pair[0].language == "python")
    (tmp_path / "train.py").write_text(first.text)
    words = lines_of(following)[0] if following.text.startswith("torchrun") else ["", "train.py"]
    command = [warm_python(), *(["-m", "torch.distributed.run", "--standalone"] if words[0] else []), *words[1:]]
    run = subprocess.run(command, env=warm_environ(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(("page", "block"), ALL_BLOCKS)
def test_language_is_known(page: Path, block: Block) -> None:
    """No test checks a block in an unknown language."""
    assert block.language in LANGUAGES


@pytest.mark.parametrize(("page", "block"), [each for each in ALL_BLOCKS if each.values[1].language == "bash"])
def test_shell_commands_exist(page: Path, block: Block) -> None:
    for words in lines_of(block):
        check_command(words)


def test_quick_commands_run(tmp_path: Path) -> None:
    """Runs the commands that take a moment, in the order of the pages next to a small checkpoint."""
    store = Store(tmp_path / "runs" / "gpt")
    store.save(100, {"weight": torch.ones(4)}, {"epoch": 1}).result()
    store.close()
    lines = [line for page in pages() for block in blocks(page) if block.language == "bash" for line in lines_of(block)]
    quick = [words for words in lines if words[:1] == ["drivetrain"] and QUICK.fullmatch(" ".join(words[1:]))]
    assert {words[1] for words in quick} == {"ckpt", "doctor", "env"}
    for words in dict.fromkeys(map(tuple, quick)):
        command = [warm_python(), "-m", *words]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, f"{' '.join(words)}\n{run.stdout}{run.stderr}"


def check_command(words: list[str]) -> None:
    """Raises AssertionError or SystemExit for a command that does not exist or does not take these arguments."""
    program, *arguments = words
    if program == "make":
        command = ["env", "--unset=VIRTUAL_ENV", "make", "--dry-run", *arguments]  # it would import torch to look there
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    elif program == "torchrun":
        assert (
            "-m" in arguments
            or (REPOSITORY / next(each for each in arguments if each.endswith(".py"))).exists()
            or arguments[-1] == "train.py"  # stands for the reader's script
        )
        if "-m" in arguments:
            module = arguments.index("-m")
            assert arguments[module + 1] == "drivetrain"
            whole_parser().parse_args(arguments[module + 2 :])
    elif program == "drivetrain":
        whole_parser().parse_args(arguments)
    elif program in ("python", "python3"):
        assert arguments[:2] == ["-m", "drivetrain"] or (REPOSITORY / arguments[0]).exists()
        if arguments[0] == "-m":
            whole_parser().parse_args(arguments[2:])
    elif program == "pip":
        assert arguments[0] == "install"
        requirements = [each for each in arguments[1:] if not each.startswith("-")]
        assert requirements
        for requirement in requirements:
            if requirement != ".":
                assert re.fullmatch(r"[\w-]+(\[[\w,]+\])?([=<>~!]=?=?[\w.]+)?(,[=<>~!]=?[\w.]+)*", requirement)
    else:
        assert program in OTHERS, f"{program} is not a command that this test knows"


@pytest.mark.parametrize(("page", "block"), [each for each in ALL_BLOCKS if each.values[1].language == "diff"])
def test_both_sides_of_a_diff_run(page: Path, block: Block) -> None:
    sides = {sign: [line[1:] for line in block.text.splitlines() if line[:1] in (sign, " ")] for sign in "-+"}
    for lines in sides.values():
        assert lines
        exec("\n".join(lines), {})


@pytest.mark.parametrize("package", ["", ".checkpointing", ".data", ".monitor", ".optim", ".planner"])
def test_reference_has_every_public_name(package: str) -> None:
    text = "\n".join(page.read_text() for page in (REPOSITORY / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: [\w.]*\.(\w+)$", text, re.MULTILINE))
    module = importlib.import_module(f"drivetrain{package}")
    objects = {name: getattr(module, name) for name in module.__all__}
    names = {name for name, each in objects.items() if getattr(each, "__module__", "").startswith("drivetrain")}
    assert names
    assert names <= shown


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("", "does not load iframe-worker.js"),
        ('<script src="iframe-worker.js"></script>', "loads iframe-worker.js, which is missing"),
        ('<img src="https://a.org/b.png">', "loads https://a.org/b.png from the network"),
        ('<pre class="mermaid">', "has a mermaid block"),
        ("<p>:class:<code>Adam</code> with decay.</p>", "shows markup: :class:Adam"),
        ("<p>x the parameter::</p>", "shows markup: x the parameter::"),
        ("<p>Raises: TypeError: It is a list.</p>", "shows a section of a docstring as text"),
        ('<div class="doc-md-description">if it is set.</div>', "begins within a sentence: if it"),
        ('<div class="doc-md-description">The rank and</div>', "stops within a sentence: The rank and"),
        ('<div class="doc-md-description">folder.</div>', "is one name: folder."),
    ],
)
def test_site_is_checked(tmp_path: Path, body: str, finding: str) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.js").touch()
    (tmp_path / "index.html").write_text(f"<body>{body}<p>With <code>**kwargs</code> of <code>std::</code>.</p></body>")
    command = [sys.executable, REPOSITORY / "tools" / "check_site.py", tmp_path]
    assert finding in subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
