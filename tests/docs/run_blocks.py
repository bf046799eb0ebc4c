"""Executes the Python blocks of pages, each page in its own namespace and folder, as the only rank of a launcher.

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

os.environ |= {"HF_HUB_OFFLINE": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

import torch
import torch.distributed as dist
from pages import HIDDEN, blocks

import drivetrain


def run(page: Path) -> str:
    """Runs the blocks of a page in order and returns the traceback of the first failure, or an empty string."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language not in ("python", HIDDEN):
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
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            failures[str(page)] = run(page)
            os.chdir("/")
        drivetrain.uninstall()
        if dist.is_initialized():
            dist.destroy_process_group()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
