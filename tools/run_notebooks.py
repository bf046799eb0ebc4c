"""Runs notebooks and keeps their outputs, with small pictures, for repository pages; `make notebooks` calls it.

python tools/run_notebooks.py [NOTEBOOK ...]    (default: all of notebooks/)
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
MAX_WIDTH, COLORS, TIMEOUT_S = 800, 64, 600
TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/[\w./-]*?(?=[\w.-]*(?:\s|$))", re.MULTILINE)


def shrunk(png: str) -> str:
    """Returns a picture in base64 with at most MAX_WIDTH columns and COLORS colors."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    if picture.width > MAX_WIDTH:
        size = (MAX_WIDTH, round(picture.height * MAX_WIDTH / picture.width))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    written = io.BytesIO()
    picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def run(path: Path) -> None:
    """Executes a notebook in a temporary folder and writes its outputs into it, without what differs by accident."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    with tempfile.TemporaryDirectory(prefix="nb-") as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, timeout=TIMEOUT_S, resources=resources, record_timing=False, coalesce_streams=True
        )
        client.execute()
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = TEMPORARY.sub("", output.text)
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = shrunk(output.data["image/png"])
    nbformat.write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(NOTEBOOKS.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        print(path.name, flush=True)
        run(path)


if __name__ == "__main__":
    main()
