"""Tests of tools/sizes.py: each rule finds what breaks it, and nothing else."""

import subprocess
from pathlib import Path

import pytest

from file_module import file_module


@pytest.fixture(scope="module")
def sizes(repository: Path):  # type: ignore[no-untyped-def]
    return file_module(repository / "tools/sizes.py")


def checkout(root: Path, **files: str) -> Path:
    """Makes a git checkout; a name's double underscores are its slashes and its last one is the dot."""
    subprocess.run(["git", "init", "-q", root], check=True)
    for name, text in files.items():
        path = root / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_long_files_and_a_high_median_are_found(sizes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = checkout(
        tmp_path, csrc__base__long_cpp="\n" * 501, csrc__base__edge_cpp="\n" * 500, tests__any_py="\n" * 900
    )
    findings = list(sizes.line_findings(root, sizes.tracked_files(root)))
    assert findings == [
        "csrc/base/long.cpp: 501 lines, expected at most 500: split it",
        "the median file has 500.5 lines, expected fewer than 150",
    ]


def test_public_methods_are_counted(sizes) -> None:  # type: ignore[no-untyped-def]
    text = """
    class Forward;
    template <class T>
    class Box final : public Base<T> {  // a comment with { and (
     public:
      explicit Box(int size);
      ~Box() { release(); }
      Box& operator=(const Box&) = delete;
      int size() const { return size_; }
      void fill(const std::function<void(int)>& value, int first = 0);
      void fill(int value);
      template <class F> static Box made(F f);
      std::vector<int> values_;
     private:
      void release();
      int size_ = 0;
    };
    struct Open { int a; bool has(int b) const; private: void hidden(); };
    enum class Kind { kA };
    """
    assert dict(sizes.native_classes(text)) == {"Box": 3, "Open": 1}
    assert dict(sizes.python_classes("class A:\n  def a(self): ...\n  def _b(self): ...\n  x = 1\n")) == {"A": 1}


def test_circles_of_folders_are_found(sizes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = checkout(
        tmp_path,
        csrc__base__a_h="",
        csrc__ddp__b_h='#include "optim/c.h"\n#include "ddp/transport/e.h"\n#include "missing/f.h"',
        csrc__ddp__transport__e_h='#include "ddp/b.h"\n#include "base/a.h"',
        csrc__optim__c_h='#include "grad/d.h"\n#include "base/a.h"',
        csrc__grad__d_h='#include "optim/c.h"',
    )
    graph = sizes.included_folders(root, sizes.tracked_files(root))
    assert graph == {"base": set(), "ddp": {"optim", "base"}, "optim": {"grad", "base"}, "grad": {"optim"}}
    assert list(sizes.circle_findings(graph)) == ["csrc: optim includes grad includes optim: break the circle"]


def test_circles_of_imports_are_found(sizes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = checkout(
        tmp_path,
        python__drivetrain__swap_py="from .ddp import b",
        python__drivetrain__ddp__b_py="from ..optim.c import C\nfrom .. import swap\nimport torch",
        python__drivetrain__ddp__e_py="from .b import B\nfrom torch.nn import Linear\nfrom . import b",
        python__drivetrain__optim__c_py="def f():\n  from drivetrain import grad, swap\nfrom drivetrain.optim import c",
        python__drivetrain__grad__d_py="if TYPE_CHECKING:\n  from ..ddp.b import B\nfrom ..optim import c",
        python__drivetrain__monitor__sinks__f_py="from ...grad.d import D\nfrom ..stream import Sink",
    )
    graph = sizes.imported_folders(root, sizes.tracked_files(root))
    assert graph == {"ddp": {"optim"}, "optim": {"grad"}, "grad": {"optim"}, "monitor": {"grad"}}
    assert list(sizes.circle_findings(graph, "python", "imports")) == [
        "python: optim imports grad imports optim: break the circle"
    ]


def test_circles_of_subfolders_are_found(sizes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = checkout(
        tmp_path,
        python__drivetrain__ckpt__top_py="from .store.commit import Writer\nfrom .state import rng",
        python__drivetrain__ckpt__store__commit_py="from ..state.rng import seed\nfrom .. import top",
        python__drivetrain__ckpt__state__rng_py="from ..store import commit",
    )
    graph = sizes.imported_subfolders(root, sizes.tracked_files(root))
    assert graph == {"ckpt": set(), "ckpt/store": {"ckpt/state"}, "ckpt/state": {"ckpt/store"}}
    assert list(sizes.circle_findings(graph, "python", "imports")) == [
        "python: ckpt/state imports ckpt/store imports ckpt/state: break the circle"
    ]


def test_totals_are_held(sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sizes, "MAX_TOTALS", {("csrc", "python"): 5, ("tests",): 3})
    root = checkout(tmp_path, csrc__a_cpp="\n" * 3, python__b_py="\n" * 3, tests__c_py="\n" * 3, docs__d_py="\n" * 9)
    findings = list(sizes.total_findings(root, sizes.tracked_files(root)))
    assert findings == ["csrc and python: 6 lines, expected at most 5: delete before you add"]


def test_circles_of_files_are_found(sizes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = checkout(
        tmp_path,
        python__drivetrain__ddp__b_py="from .. import _C\nfrom . import e\nif TYPE_CHECKING:\n  from .g import G",
        python__drivetrain__ddp__e_py="def f():\n  from drivetrain.ddp.g import G",
        python__drivetrain__ddp__g_py="from . import B, e\nimport torch",
    )
    (root / "python/drivetrain/__init__.py").write_text("from .ddp.b import B")
    (root / "python/drivetrain/ddp/__init__.py").write_text("from .b import B")
    graph = sizes.imported_files(root, sizes.tracked_files(root))
    package, ddp = "python/drivetrain", "python/drivetrain/ddp"
    assert graph == {
        f"{package}/__init__.py": {f"{ddp}/b.py"},
        f"{ddp}/__init__.py": {f"{ddp}/b.py"},
        f"{ddp}/b.py": {f"{ddp}/e.py"},
        f"{ddp}/e.py": {f"{ddp}/g.py"},
        f"{ddp}/g.py": {f"{ddp}/__init__.py", f"{ddp}/e.py"},
    }
    assert len(list(sizes.circle_findings(graph, package, "imports"))) == 2


def test_classes_of_one_name_are_found(sizes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = checkout(
        tmp_path,
        python__drivetrain__ddp__a_py="class Part: ...\nclass MonitorCallback: ...",
        python__drivetrain__optim__b_py="class Part: ...\nclass Parts: ...\nclass MonitorCallback: ...",
        tests__c_py="class Part: ...\nclass Parts: ...",
    )
    assert list(sizes.duplicate_findings(root, sizes.tracked_files(root))) == [
        "Part is the name of 2 classes, in python/drivetrain/ddp/a.py, python/drivetrain/optim/b.py: rename all but one"
    ]
