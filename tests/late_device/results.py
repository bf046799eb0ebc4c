"""Checks that backward sees the original value of an offloaded result that is overwritten after the forward pass.

Usage: python results.py FOLDER, where FOLDER holds the built late_device.
"""

import importlib
import math
import sys
import time

from drivetrain import _C
from drivetrain.budget.plan import PlannedOp
from drivetrain.budget.trace import STORAGE_FORMATS

sys.path.insert(0, sys.argv[1])
late_device = importlib.import_module("late_device")  # needs torch's libraries, so torch is imported first


def check(seed: int, num_elements: int) -> None:
    pool = _C.OffloadPool(1 << 20, 1 << 13)
    recorder = _C.ActivationRecorder()
    recorder.set_formats([], pool, 1 << 30)
    recorder.set_plans([[PlannedOp("aten::exp", [STORAGE_FORMATS["host"]], False)]])
    x = late_device.full_float(1.0, num_elements).requires_grad_()
    with _C.ActivationScope(recorder):
        y = x.exp()
    assert not recorder.divergence, recorder.divergence
    assert pool.num_copies == 1
    y.detach().zero_()
    y.backward(late_device.full_float(1.0, num_elements))
    assert pool.num_copies == 2
    reading = late_device.read_float(x.grad)
    late_device.run(seed)
    (found,) = set(reading.values())
    assert math.isclose(found, math.e, rel_tol=1e-6), (seed, found)


for seed in range(100):
    for num_elements in (1, 127, 2000):
        check(seed, num_elements)
time.sleep(0.1)  # autograd's thread of the device frees its last tensors, for which it needs a running Python
print("gradients of what the pass made")
