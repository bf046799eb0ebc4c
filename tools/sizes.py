"""Checks the sizes that keep the sources readable; `make lint` runs it.

No file outside tests/ has more than 500 lines, and their median is below 150. csrc/ and python/ together, and tests/,
do not grow beyond a total. No class has more than 25 public methods. The folders of csrc/ do not include each other in
a circle, and neither folders, subfolders nor files of python/drivetrain import each other in one. No two classes of
python/drivetrain share a name.
"""

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 500
MAX_MEDIAN_LINES = 150
MAX_PUBLIC_METHODS = 25
MAX_TOTALS = {("csrc", "python"): 73_133, ("tests",): 74_455}  # lines; lower them after a deletion
NATIVE = {".h", ".cpp", ".cu", ".cuh"}
SOURCES = {*NATIVE, ".py", ".cmake", ".sh"}  # a stub (.pyi) cannot be split, as its module is one
PACKAGE = Path("python/drivetrain")
# Frameworks and torch give these classes their names.
SHARED_NAMES = {"CheckpointCallback", "DistributedDataParallel", "MonitorCallback"}


def tracked_files(root: Path) -> list[Path]:
    """Returns the sources that git tracks or would track, relative to `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({Path(name) for name in names if Path(name).suffix in SOURCES and (root / name).is_file()})


def line_findings(root: Path, files: list[Path]) -> Iterator[str]:
    """Yields one line of text per file that is too long, and one if the median is too high."""
    lengths = {file: len((root / file).read_text().splitlines()) for file in files if file.parts[0] != "tests"}
    for file, length in lengths.items():
        if length > MAX_LINES:
            yield f"{file}: {length} lines, expected at most {MAX_LINES}: split it"
    median = statistics.median(lengths.values()) if lengths else 0
    if median >= MAX_MEDIAN_LINES:
        yield f"the median file has {median:g} lines, expected fewer than {MAX_MEDIAN_LINES}"


def total_findings(root: Path, files: list[Path]) -> Iterator[str]:
    """Yields one line of text per group of folders that together have too many lines."""
    for folders, most in MAX_TOTALS.items():
        total = sum(len((root / file).read_text().splitlines()) for file in files if file.parts[0] in folders)
        if total > most:
            yield f"{' and '.join(folders)}: {total} lines, expected at most {most}: delete before you add"


def python_classes(text: str) -> Iterator[tuple[str, int]]:
    """Yields the name and the number of public methods of every class of a Python module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
            yield node.name, sum(not name.startswith("_") for name in methods)


def without_comments(text: str) -> str:
    """Replaces comments and string literals of C++ with nothing, so that braces in them do not count."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    return re.sub(pattern, "", text, flags=re.DOTALL)


def native_classes(text: str) -> Iterator[tuple[str, int]]:
    """Yields the name and the number of public methods of every class and struct that a C++ file defines.

    The parser knows declarations as this project formats them, not the whole language. Constructors, destructors and
    operators do not count; overloads of one name count once.
    """
    text = without_comments(text)
    for match in re.finditer(r"(?<!enum )\b(class|struct)\s+(\w+)\b(?!\s*[>,=])[^;{}()=]*\{", text):
        kind, name = match.groups()
        public, depth, declaration, methods = kind == "struct", 1, "", set()
        position = match.end()
        while depth and position < len(text):
            char = text[position]
            position += 1
            if char in "{}":
                depth += 1 if char == "{" else -1
            if depth > 1:
                if char == "{" and depth == 2:
                    declaration += "{"
                continue
            declaration += char
            access = re.search(r"\b(public|protected|private)\s*:$", declaration)
            if access:
                public, declaration = access[1] == "public", ""
            elif char in ";}":
                found = re.search(r"([~\w]+)\s*\(", re.sub(r"<[^<>]*>", "", declaration))
                method = found[1] if found else ""
                if public and method and method not in (name, f"~{name}") and "operator" not in declaration:
                    methods.add(method)
                declaration = ""
        yield name, len(methods)


def class_findings(root: Path, files: list[Path]) -> Iterator[str]:
    """Yields one line of text per class with too many public methods."""
    for file in files:
        if file.parts[0] == "tests":
            continue
        read = python_classes if file.suffix == ".py" else native_classes if file.suffix in NATIVE else None
        for name, methods in read((root / file).read_text()) if read else ():
            if methods > MAX_PUBLIC_METHODS:
                yield f"{file}: {name} has {methods} public methods, expected at most {MAX_PUBLIC_METHODS}: split it"


def included_folders(root: Path, files: list[Path]) -> dict[str, set[str]]:
    """Returns, for each folder of csrc/, the other folders of csrc/ whose headers it includes.

    A folder includes its own subfolders freely and they include it: `budget` and `budget/solver` count as one.
    """
    graph: dict[str, set[str]] = {}
    for file in files:
        if file.parts[0] != "csrc" or len(file.parts) < 3 or file.suffix not in NATIVE:
            continue
        edges = graph.setdefault(file.parts[1], set())
        for included in re.findall(r'^#include "([^"]+)"', (root / file).read_text(), re.MULTILINE):
            folder = included.split("/")[0]
            if (root / "csrc" / included).is_file() and folder != file.parts[1]:
                edges.add(folder)
    return graph


def imports_at_run_time(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """Yields the `from ... import` statements below a node, also those in functions, but none for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from imports_at_run_time(child)


def imported_paths(root: Path, file: Path) -> Iterator[Path]:
    """Yields each name that a file of the package imports at run time, as a path: its module's, and the name."""
    for found in imports_at_run_time(ast.parse((root / file).read_text())):
        base = file.parents[found.level - 1] if found.level else PACKAGE.parent
        for alias in found.names:
            yield base.joinpath(*(found.module or "").split("."), alias.name)


def imported_folders(root: Path, files: list[Path]) -> dict[str, set[str]]:
    """Returns, for each folder of the package, its other folders that it imports. Subfolders count as their folder.

    The modules next to the folders do not count: some of them are below all folders, and some above.
    """
    graph: dict[str, set[str]] = {}
    for file in files:
        folders = file.parent.parts[len(PACKAGE.parts) :]
        if not file.is_relative_to(PACKAGE) or file.suffix != ".py" or not folders:
            continue
        paths = [path for path in imported_paths(root, file) if path.is_relative_to(PACKAGE)]
        names = {path.parts[len(PACKAGE.parts)] for path in paths}
        edges = {name for name in names if (root / PACKAGE / name).is_dir() and name != folders[0]}
        graph.setdefault(folders[0], set()).update(edges)
    return graph


def imported_subfolders(root: Path, files: list[Path]) -> dict[str, set[str]]:
    """Returns, for each folder and subfolder of the package, the others that it imports.

    A folder and its own subfolders import each other freely.
    """
    graph: dict[str, set[str]] = {}
    for file in files:
        folder = file.parent
        if not folder.is_relative_to(PACKAGE) or folder == PACKAGE or file.suffix != ".py":
            continue
        edges = graph.setdefault(str(folder.relative_to(PACKAGE)), set())
        for path in imported_paths(root, file):
            other = next(one for one in path.parents if (root / one).is_dir())
            contains = other.is_relative_to(folder) or folder.is_relative_to(other)
            if other.is_relative_to(PACKAGE) and not contains:
                edges.add(str(other.relative_to(PACKAGE)))
    return graph


def imported_files(root: Path, files: list[Path]) -> dict[str, set[str]]:
    """Returns, for each file of the package, the other files that it imports, also within functions.

    The package's own __init__.py does not count as imported: every file may take the native module from it.
    """
    modules = {file for file in files if file.is_relative_to(PACKAGE) and file.suffix == ".py"}
    graph: dict[str, set[str]] = {}
    for file in sorted(modules):
        edges = graph.setdefault(str(file), set())
        for path in imported_paths(root, file):
            # The name is a module or a package itself, or is in one.
            places = (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py"))
            target = next((one for one in (*places, path.parent / "__init__.py") if one in modules), file)
            if target not in (file, PACKAGE / "__init__.py"):
                edges.add(str(target))
    return graph


def duplicate_findings(root: Path, files: list[Path]) -> Iterator[str]:
    """Yields one line of text per name that several classes of the package have."""
    places: dict[str, list[str]] = {}
    for file in files:
        if file.is_relative_to(PACKAGE) and file.suffix == ".py":
            for name, _ in python_classes((root / file).read_text()):
                places.setdefault(name, []).append(str(file))
    for name, where in sorted(places.items()):
        if len(where) > 1 and name not in SHARED_NAMES:
            yield f"{name} is the name of {len(where)} classes, in {', '.join(where)}: rename all but one"


def circle_findings(graph: dict[str, set[str]], top: str = "csrc", verb: str = "includes") -> Iterator[str]:
    """Yields one line of text per circle of folders or files, found by depth-first search."""
    done: set[str] = set()

    def visit(one: str, path: tuple[str, ...]) -> Iterator[str]:
        if one in path:
            yield f"{top}: {f' {verb} '.join((*path[path.index(one) :], one))}: break the circle"
        elif one not in done:
            for other in sorted(graph.get(one, ())):
                yield from visit(other, (*path, one))
            done.add(one)

    for one in sorted(graph):
        yield from visit(one, ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the checkout to look at (default: here)")
    root = parser.parse_args().root
    files = tracked_files(root)
    findings = [
        *line_findings(root, files),
        *total_findings(root, files),
        *class_findings(root, files),
        *circle_findings(included_folders(root, files)),
        *circle_findings(imported_folders(root, files), str(PACKAGE), "imports"),
        *circle_findings(imported_subfolders(root, files), str(PACKAGE), "imports"),
        *circle_findings(imported_files(root, files), str(PACKAGE), "imports"),
        *duplicate_findings(root, files),
    ]
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
