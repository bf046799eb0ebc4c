"""Executes the Python blocks of pages, each page in its own namespace, as the only rank of a process group.

python run_blocks.py PAGE...    prints a JSON object: the traceback of each page that failed
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from pages import blocks

import drivetrain


def run(page: Path) -> str:
    """Runs the blocks of a page in order and returns the traceback of the first failure, or an empty string."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language != "python":
            continue
        # Leading newlines make the traceback show the page's line numbers.
        source = "\n" * (block.line - 1) + block.text
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, str(page), "exec"), namespace)
        except Exception:
            return traceback.format_exc()
    return ""


def main() -> None:
    pages = [Path(argument).resolve() for argument in sys.argv[1:]]
    torch.set_num_threads(1)
    failures = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for page in pages:
            failures[str(page)] = run(page)
            drivetrain.uninstall()
        dist.destroy_process_group()
        os.chdir("/")
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
