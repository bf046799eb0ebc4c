"""Checks the language rules of CONTRIBUTING.md that a program can check; `make lint` runs it.

It reads the full-line comments and string literals of C++ in csrc/, and of Python outside tests/. It also reads the
prose of the pages. A sentence has at most 25 words, and avoids some openings, words and spellings.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_WORDS = 25
FRAGMENT = re.compile(r"(Of|The same|What|Whether|Who)\s")
AVOIDED = re.compile(
    r"\b(?:somebody|nobody|someone|anew|beside|under\sway|(?:those|that)\sof|told)\b|,\stoo\b(?!\s\w)", re.IGNORECASE
)
BRITISH = re.compile(
    r"\b((?:synchron|normal|initial|serial|optim|vector|special|parallel|minim|maxim|general|real|recogn|summar|final|organ"
    r"|util|token|random|material|penal|custom|emphas|local|visual|character|author|factor|capital|stabil)"
    r"is(?:e|ed|es|er|ers|ing|ation|ations)"
    r"|(?:un)?(?:label|model|travel)l(?:ed|ing)|analys(?:e|ed|ing)|quantis\w+"
    r"|(?:behavi|col|neighb|fav|hon)our\w*|towards|centre[sd]?|artefacts?|whilst|amongst)\b",
    re.IGNORECASE,
)
EXCUSED = ("This error indicates that your training graph has changed in this iteration, e.g.",)  # torch's own text
NATIVE = {".h", ".cpp", ".cu", ".cuh"}
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|al|[Ee]q|[Ss]ec|[Ff]ig)|\.\.)\.$")
# The dot of a quoted ".", as in a path, ends no sentence.
END = re.compile(r"(?:(?<![\"'])[.!?][\"')*_\0]*|(?<=[\"'])[.!?][)*_\0]*)\s+")
SECTION = re.compile(r"\s*(Args|Attributes|Returns|Yields|Raises|Shape|Example|Examples|Note|Notes):\s*$")
ITEM = re.compile(r"\s*(?:\*{0,2}[\w.]+|`[^`]+`)(?:(?:, | and | or )(?:\*{0,2}[\w.]+|`[^`]+`))*(?: \([^)]*\))?: ")
# Lists in comments of C++ are indented and begin with a quoted name, or begin with a stage's name at the margin.
NAMED = re.compile(r'\s*"\w+": ')
LITERAL = r'"(?:\\.|[^"\\\n])*"'
# Literals of one call or of one initializer, with the values between them.
LITERALS = re.compile(rf"{LITERAL}(?:[^;{{}}\"]*{LITERAL})*")
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
# A heading, a directive of mkdocs, a quotation or an HTML tag stands alone.
ALONE = re.compile(r"\s*(?:#+ |!!!|\?\?\?|=== |::: |<|>>> |> )")

Lines = Iterable[tuple[int, str]]


class Finding(NamedTuple):
    """One sentence that breaks a rule."""

    file: Path
    line: int
    text: str


def blocks(lines: Lines) -> Iterator[list[tuple[int, str]]]:
    """Yields the lines of each paragraph and of each list item, without code blocks and tables."""
    block: list[tuple[int, str]] = []
    fence, section, literal = "", -1, -1
    for number, line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if fence or text.startswith(("```", "~~~")):
            fence = "" if fence and text == fence else fence or text[:3]
            text = ""
        if literal >= 0 and text:
            if indent > literal:
                continue
            literal = -1
        header = SECTION.match(line)
        if header or (text and indent <= section):
            section = indent if header else -1
        if header and header[1].startswith("Example"):
            literal = indent
        item = (
            LIST_ITEM.match(line)
            or NAMED.match(line)
            or (ITEM.match(line) if section >= 0 and indent == section + 4 else None)
        )
        alone = bool(ALONE.match(line))
        if (not text or header or item or alone or text.startswith("|")) and block:
            yield block
            block = []
        if text.endswith("::"):
            literal = indent
        if text and not header and not text.startswith(("|", "<", ">>>", ":::")):
            block.append((number, line[item.end() :] if item else line))
        if alone and block:
            yield block
            block = []
    if block:
        yield block


def sentences(block: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each sentence; a code span or an address becomes the one word `CODE`."""
    text, starts = "", []
    for number, line in block:
        starts.append((len(text), number))
        text += line.strip() + " "

    def blank(match: re.Match[str]) -> str:
        return "CODE".ljust(len(match[0]), "\0")

    text = re.sub(r"``.+?``|`[^`]+`|https?://[^\s)>]+", blank, text)
    text = re.sub(r"\]\([^)]*\)|!?\[", lambda match: "\0" * len(match[0]), text)
    start = 0
    for match in [*END.finditer(text), None]:
        end = match.end() if match else len(text)
        if match and match.end() < len(text) and ABBREVIATION.search(text[start : match.start() + 1]):
            continue
        sentence = text[start:end].replace("\0", "").strip()
        if sentence:
            begin = start + len(text[start:]) - len(text[start:].lstrip())
            yield max(number for at, number in starts if at <= begin), sentence
        start = end


def faults(sentence: str) -> Iterator[str]:
    """Yields what is wrong with one sentence."""
    words = sum(any(char.isalnum() for char in word) for word in sentence.split())
    if words > MAX_WORDS and not sentence.startswith(EXCUSED):
        yield f"{words} words, expected at most {MAX_WORDS}"
    opening = FRAGMENT.match(sentence.lstrip("*_(\"'"))
    if opening and not sentence.rstrip("*_)\"'").endswith("?"):
        yield f'a sentence that begins with "{opening[1]}"'
    for match in AVOIDED.finditer(sentence):
        yield f'the word "{match[0]}"'
    for match in BRITISH.finditer(sentence):
        yield f'the British spelling "{match[0]}"'


def comments(text: str, sign: str) -> Iterator[list[tuple[int, str]]]:
    """Yields the lines of each run of full-line comments that `sign` starts."""
    run: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        match = re.match(rf"\s*{sign}[/:!]*(?: (.*))?$", line)
        if match and not re.match(r"(type|noqa|ruff|NOLINT|clang-format|SPDX)\b", match[1] or ""):
            run.append((number, match[1] or ""))
        elif run:
            yield run
            run = []


def apart(number: int, text: str) -> list[tuple[int, str]]:
    """Returns the lines of a text that begins at one line of a file, each as a paragraph of its own."""
    return [(number, line) for line in re.sub(r"\n|\\n", "\n\n", text).split("\n")]


def native_literals(text: str) -> Iterator[list[tuple[int, str]]]:
    """Yields the texts of string literals of C++, in which each value between two literals becomes `X`."""
    text = re.sub(r"^[ \t]*(//|#).*$|'\\?\"'", "", text, flags=re.MULTILINE)
    for match in LITERALS.finditer(text):
        joined = ""
        parts = re.split(rf"({LITERAL})", match[0])[1:-1]
        for part in parts:
            # The branches of a conditional expression and the members of a list are texts of their own.
            value = (
                "\n"
                if part.strip() == "," or " : " in f" {part} ".replace("\n", " ")
                else " X "
                if part.strip()
                else ""
            )
            joined += part[1:-1].replace('\\"', "'") if part.startswith('"') else value
        if any(part.count(" ") > 2 for part in parts[::2]):
            yield apart(text.count("\n", 0, match.start()) + 1, joined)


def literal_text(node: ast.expr) -> str:
    """Returns the text of a string expression, in which each value that is not constant becomes `X`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal_text(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal_text(node.left) + literal_text(node.right)
    if isinstance(node, ast.IfExp):
        return literal_text(node.body)
    return "X"


def python_literals(tree: ast.AST) -> Iterator[list[tuple[int, str]]]:
    """Yields the lines of docstrings and the texts of all other string expressions that have several words."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        is_docstring = isinstance(node, ast.Expr)
        value = node.value if isinstance(node, ast.Expr) else node
        text = literal_text(value) if isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp) else "X"
        if is_docstring and isinstance(value, ast.Constant):
            first, *others = text.expandtabs().splitlines() or [""]
            indent = min((len(line) - len(line.lstrip()) for line in others if line.strip()), default=0)
            yield list(enumerate([first, *(line[indent:] for line in others)], value.lineno))
        elif text.count(" ") > 2 and isinstance(value, ast.expr):
            yield apart(value.lineno, text)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def python_texts(text: str) -> Iterator[list[tuple[int, str]]]:
    """Yields the numbered lines of every comment, docstring and text of a Python module."""
    yield from comments(text, "#")
    yield from python_literals(ast.parse(text))


def texts(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Yields the numbered lines of every text of one file."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from python_texts(text)
    elif path.suffix in NATIVE:
        yield from comments(text, "//")
        yield from native_literals(text)
    else:
        yield list(
            enumerate(
                re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.S).splitlines(), 1
            )
        )


def checked_files(root: Path) -> list[Path]:
    """Returns the files that git tracks or would track and whose language is checked, relative to `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    files = sorted({Path(name) for name in names if (root / name).is_file()})
    return [
        file
        for file in files
        if (file.parts[0] in ("python", "tools", "examples", "benchmarks") and file.suffix == ".py")
        or (file.parts[0] == "csrc" and file.suffix in NATIVE)
        or (file.suffix == ".md" and (len(file.parts) == 1 or file.parts[0] == "docs"))
    ]


def findings(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Yields every sentence of `files` that breaks a rule."""
    for file in files:
        for text in texts(root / file):
            for block in blocks(text):
                for line, sentence in sentences(block):
                    for fault in faults(sentence):
                        yield Finding(file, line, f"{fault}: {sentence}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the checkout to look at (default: here)")
    parser.add_argument("--only", default="", help="a prefix of the files to look at, such as csrc/ddp (default: all)")
    arguments = parser.parse_args()
    files = [file for file in checked_files(arguments.root) if str(file).startswith(arguments.only)]
    found = sorted(findings(arguments.root, files))
    for finding in found:
        print(f"{finding.file}:{finding.line}: {finding.text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
