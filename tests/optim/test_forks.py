"""Tests that optimizers step in a forked child, whose parent has used threads that the child does not have."""

import subprocess
from typing import Any

import pytest

from warm_python import warm_python

LIMIT_S = 60.0
SCRIPT = """
import os, sys
import torch
import drivetrain
from drivetrain.optim import clip_grad_norm_

torch.set_num_threads(2)
kind, options = sys.argv[1], eval(sys.argv[2])
shapes = [(64,)] * 2000 + [(150, 200)]  # no tensor is large enough for threads of torch, which a fork lacks


def trained(steps):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=options.get("dtype", torch.float32))) for shape in shapes]
    rest = {name: value for name, value in options.items() if name != "dtype"}
    optimizer = getattr(drivetrain.optim, kind)(params, lr=0.01, **rest)
    for step in range(steps):
        for param in params:
            param.grad = torch.full_like(param, 0.1 * (step + 1))
        clip_grad_norm_(params, 1.0)
        optimizer.step()
    optimizer.torch_state_dict()
    return params


expected = trained(3)  # starts the threads of this process
child = os.fork()
if child == 0:
    found = trained(3)
    os._exit(0 if all(map(torch.equal, found, expected)) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"max_grad_norm": 1.0}),
        ("AdamW", {"state_bits": 8}),
        ("SGD", {"momentum": 0.9}),
        ("LAMB", {}),
        ("Adafactor", {}),
    ],
)
def test_a_forked_child_steps_as_its_parent(kind: str, options: dict[str, Any]) -> None:
    child = subprocess.run(
        [warm_python(has_whole_end=True), "-c", SCRIPT, kind, repr(options)],
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
