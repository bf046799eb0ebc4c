"""Tests wheels for several releases of torch: how tools/wheels.py merges them, and which module an import takes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import drivetrain
from drivetrain import _C, _build_info
from file_module import file_module

MINOR = "_".join(["torch", *torch.__version__.split(".")[:2]])


@pytest.fixture(scope="module")
def wheel(repository: Path) -> ModuleType:
    return file_module(repository / "tools/wheels.py")


def unpacked(folder: Path, release: str, version: str) -> Path:
    """Makes a small unpacked wheel for one release of torch."""
    package = folder / release / "drivetrain"
    package.mkdir(parents=True)
    (package / "_C.cpython-311.so").write_text(f"module for {release}")
    (package / "_build_info.py").write_text(f"TORCH_VERSION = {release!r}")
    (package / "__init__.py").write_text(version)
    (package / "optim").mkdir()
    (package / "optim/adam.py").write_text("rule")
    return folder / release


def test_a_merged_wheel_has_each_module_once(wheel: ModuleType, tmp_path: Path) -> None:
    parts = {release: unpacked(tmp_path, release, "0.1") for release in ("2.13.0", "2.14.1")}
    (parts["2.13.0"] / "drivetrain/libdrivetrain_kernels.so").write_text("kernels")
    wheel.merge(parts, tmp_path / "merged")
    files = {
        str(path.relative_to(tmp_path / "merged/drivetrain")): path.read_text()
        for path in (tmp_path / "merged").rglob("*")
        if path.is_file()
    }
    assert files == {
        "__init__.py": "0.1",
        "optim/adam.py": "rule",
        "libdrivetrain_kernels.so": "kernels",
        "torch_2_13/_C.cpython-311.so": "module for 2.13.0",
        "torch_2_13/_build_info.py": "TORCH_VERSION = '2.13.0'",
        "torch_2_14/_C.cpython-311.so": "module for 2.14.1",
        "torch_2_14/_build_info.py": "TORCH_VERSION = '2.14.1'",
    }


def test_wheels_of_different_sources_are_not_merged(wheel: ModuleType, tmp_path: Path) -> None:
    parts = {"2.13.0": unpacked(tmp_path, "2.13.0", "0.1"), "2.14.1": unpacked(tmp_path, "2.14.1", "0.2")}
    with pytest.raises(ValueError, match=r"__init__\.py of torch 2\.14\.1 differs from the first wheel's"):
        wheel.merge(parts, tmp_path / "merged")


@pytest.mark.parametrize(
    ("code", "options", "fault"),
    [
        ("int answer() { return 42; }", ["-Wl,-z,noexecstack"], None),
        ("int answer() { return 42; }", ["-Wl,-z,execstack"], "small.so asks for an executable stack"),
        ("int answer() { return 42; }", ["-g"], "small.so has debug information"),
        ("int answer() { return 42; }", ["-Wl,-rpath,/opt/lib"], "small.so looks for libraries in /opt/lib"),
        (
            "namespace at { int answer() { return 42; } }",
            [],
            "small.so defines 1 symbols of torch, such as at::answer()",
        ),
    ],
)
def test_what_a_published_wheel_must_not_have_is_named(
    wheel: ModuleType, tmp_path: Path, code: str, options: list[str], fault: str | None
) -> None:
    (tmp_path / "small.cpp").write_text(code)
    content = tmp_path / "content"
    content.mkdir()
    command = ["g++", "-shared", "-fPIC", *options, tmp_path / "small.cpp", "-o", content / "small.so"]
    subprocess.run(command, check=True, timeout=60)
    found = wheel.faults(Path(shutil.make_archive(str(tmp_path / "one"), "zip", content)))
    assert [each[: len(fault)] for each in found] == [fault] if fault else not found


def import_from_wheel(folder: Path, minor: str) -> subprocess.CompletedProcess[str]:
    """Imports drivetrain from a folder like an installed wheel, whose module for `minor` is this environment's."""
    package = folder / "drivetrain"
    source, ignored = Path(drivetrain.__file__).parent, shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    shutil.copytree(source, package, ignore=ignored)
    for name, original in ((minor, _C.__file__), ("torch_2_9", _C.__file__)):
        (package / name).mkdir()
        (package / name / Path(original).name).symlink_to(original)
        (package / name / "_build_info.py").symlink_to(_build_info.__file__)
    code = (
        "import sys; sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in type(one).__module__]\n"
        "import torch, drivetrain\n"
        "assert drivetrain.__file__.startswith(sys.argv[1]), drivetrain.__file__\n"
        "from drivetrain import _C; print(_C.__file__)\n"
        "param = torch.nn.Parameter(torch.ones(3)); param.grad = torch.ones(3)\n"
        "drivetrain.optim.SGD([param], lr=0.5).step(); assert param.tolist() == [0.5] * 3\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_import_takes_the_module_for_the_running_torch(tmp_path: Path) -> None:
    run = import_from_wheel(tmp_path, MINOR)
    assert run.returncode == 0, run.stderr
    assert f"/drivetrain/{MINOR}/_C." in run.stdout


def test_a_torch_without_a_module_gets_one_sentence(tmp_path: Path) -> None:
    run = import_from_wheel(tmp_path, "torch_2_8")
    assert run.returncode != 0
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("ImportError")]
    assert f"this wheel of drivetrain serves torch 2.8, 2.9, and torch {torch.__version__} is installed." in error
    assert '"pip install --no-build-isolation --no-deps --force-reinstall --no-binary drivetrain drivetrain"' in error


def test_builds_have_their_sources_at_one_place(
    wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc's kernels have the folder and the time of a source, so that two checkouts would give different wheels."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    places = []
    for name in ("one", "other"):
        (tmp_path / name / "build").mkdir(parents=True)
        (tmp_path / name / "file.cu").write_text(name)
        with wheel.at_one_place(tmp_path / name, 1_700_000_000) as place:
            (file,) = place.iterdir()
            assert (file.name, file.read_text(), file.stat().st_mtime) == ("file.cu", name, 1_700_000_000)
            places.append(place)
            with (
                pytest.raises(SystemExit, match="another build of wheels uses"),
                wheel.at_one_place(tmp_path / name, 1_700_000_000),
            ):
                pass
        assert not place.exists()
    assert places[0] == places[1]
