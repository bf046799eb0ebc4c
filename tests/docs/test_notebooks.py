"""Tests that the notebooks are committed with their outputs and run from top to bottom in a kernel of this Python."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from warm_python import warm_python

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 180

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of_outputs(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """Returns, for each cell of code, whether it prints, fails, draws or shows a value."""
    return [
        {kind for each in cell.outputs for kind in each.get("data", [each.output_type])}
        for cell in code_cells(notebook)
    ]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@each_notebook
def test_committed_with_outputs(path: Path) -> None:
    """`make notebooks` writes them: a repository page shows them without running anything."""
    notebook, kinds = read(path), kinds_of_outputs(read(path))
    assert "image/png" in set().union(*kinds)
    assert "error" not in set().union(*kinds)
    assert path.stat().st_size < 100_000
    assert not re.search(r"/(?:home|root|work|tmp)/", path.read_text())  # paths of the machine that ran it
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)  # cells have ids since 4.5
    assert notebook.metadata.kernelspec.name == "python3"
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, 1 + len(kinds)))
    assert [cell.id for cell in notebook.cells if cell.metadata] == []


@pytest.fixture
def kernel_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes "python3" mean a fork of this interpreter, without the user's Jupyter, IPython or matplotlib settings."""
    for variable in ("JUPYTER_PATH", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        folder = tmp_path / variable.lower()
        folder.mkdir()
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel then selects the inline backend
    command = [warm_python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    write_kernel_spec(tmp_path / "jupyter_path" / "kernels" / "python3", overrides={"argv": command})
    assert KernelSpecManager().get_kernel_spec("python3").argv == command
    # Workers of a DataLoader open sockets there, and the path of a socket has at most 107 bytes. Under a longer one a
    # worker's batches get lost, and the loop waits for them forever.
    with tempfile.TemporaryDirectory(prefix="nb-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


@each_notebook
@pytest.mark.usefixtures("kernel_of_this_python")
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    notebook, working_folder = read(path), tmp_path / "work"
    working_folder.mkdir()
    # If a cell raises, nbclient's CellExecutionError shows the cell and its traceback.
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(working_folder)}}).execute()
    assert kinds_of_outputs(notebook) == kinds_of_outputs(read(path))  # the committed outputs are of these cells
    assert list(working_folder.iterdir()) == []  # a notebook writes only into temporary folders
