"""Checks that saves of tensors on a device whose streams run late have the values of the step that was saved.

Usage: python saves.py FOLDER, where FOLDER holds the built late_device.
"""

import importlib
import sys
import tempfile
import threading
from types import SimpleNamespace
from typing import Any

import torch

from drivetrain.checkpointing import Store
from drivetrain.checkpointing.preemption.interval import Interval
from drivetrain.checkpointing.saver import Saver
from drivetrain.checkpointing.store.device_copies import DeviceCopies

sys.path.insert(0, sys.argv[1])
late_device: Any = importlib.import_module("late_device")  # needs torch's libraries, so torch is imported first
torch._register_device_module("late", SimpleNamespace(_lazy_init=lambda: None))  # torch.accelerator asks for it

LIMIT_S = 60.0
gate = threading.Event()
wait = DeviceCopies.wait


def gated_wait(self: DeviceCopies, timeout: float) -> None:
    """Waits only once the main thread has done all that must not wait on the host."""
    assert gate.wait(LIMIT_S)
    wait(self, timeout)


DeviceCopies.wait = gated_wait  # type: ignore[method-assign]


class State:
    """Stands for a TrainingState with parameters, and a buffer that each forward pass changes."""

    optimizers: tuple[()] = ()

    def __init__(self) -> None:
        self.tensors = {f"weight{i}": late_device.full(i, 1000 + i) for i in range(4)}
        self.tensors |= {"buffer": late_device.full(9, 77), "count": torch.tensor(5)}

    def capture(self, header: Any) -> Any:
        return SimpleNamespace(tensors=self.tensors, state={})


def check(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Store(folder, timeout=LIMIT_S) as store:
        late_device.set_stream(0)
        state = State()
        saver = Saver(store, state, LIMIT_S, Interval(None, None), LIMIT_S, logs_errors=False)  # type: ignore[arg-type]
        for step in range(2):  # the second save uses the memory of the first again
            gate.clear()
            late_device.set_stream(step % 2)
            late_device.seed(seed)
            before = late_device.num_waits()
            late_device.let_host_wait(False)
            saver.begin(step, {})
            state.tensors["count"].fill_(-1)
            for tensor in state.tensors.values():  # a script may write anything right after the save has begun
                if tensor.device.type != "cpu":
                    late_device.fill(tensor, -1)
            assert late_device.num_waits() == before
            late_device.let_host_wait(True)
            late_device.run(seed)
            gate.set()
            saver.wait()
            assert saver.error is None, saver.error
            found = store.checkpoints()[-1].load()
            expected = {"weight0": 0, "weight1": 1, "weight2": 2, "weight3": 3, "buffer": 9, "count": 5}
            values = {name: sorted(set(found[name].reshape(-1).tolist())) for name in found}
            assert values == {name: [value + 10 * step] for name, value in expected.items()}, values
            assert found["weight3"].shape == (1003,)
            for name, value in expected.items():
                (late_device.fill if name != "count" else torch.Tensor.fill_)(state.tensors[name], value + 10)
            late_device.run(seed)
    assert late_device.num_late() == 0


for seed in range(10):
    check(seed)
late_device.set_stream(0)
assert late_device.num_streams() >= 1
print("each save has the values of its step")
