"""Checks offloaded values on a device whose streams run in a random order, with copies out, copies back and drops.

Usage: python order.py FOLDER, where FOLDER holds the built late_device.
"""

import importlib
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import _C

sys.path.insert(0, sys.argv[1])
late_device = importlib.import_module("late_device")  # needs torch's libraries, so torch is imported first

ACTIONS = st.one_of(
    st.tuples(st.just("begin"), st.integers(1, 2000)),
    st.tuples(st.just("begin and write"), st.integers(1, 2000)),
    st.tuples(st.sampled_from(["prefetch", "take", "take", "drop", "stream"]), st.integers(0, 20)),
    st.tuples(st.just("run"), st.integers(0, 1 << 30)),
)


@given(actions=st.lists(ACTIONS, min_size=1, max_size=40), seed=st.integers(0, 1 << 30))
@settings(max_examples=500, deadline=None, derandomize=True)
def check(actions: list[tuple[str, int]], seed: int) -> None:
    pool = _C.OffloadPool(1 << 20, 1 << 13)
    alive: list[Any] = []
    readings: list[Any] = []
    for value, (action, number) in enumerate(actions):
        if action.startswith("begin"):
            x = late_device.full(value, number)
            alive.append((pool.begin(x), value))
            if action == "begin and write":
                alive[-1][0].await_copy_out()
                late_device.fill(x, -1)
            del x
        elif action == "stream":
            late_device.set_stream(number % 2)
        elif action == "run":
            late_device.run(number)
        elif alive:
            offloaded, expected = alive[number % len(alive)]
            if action == "prefetch":
                offloaded.prefetch()
            elif action == "take":
                y = offloaded.take()
                readings.append((late_device.read(y), expected))
                del y
            else:
                del alive[number % len(alive)]
            del offloaded
    late_device.run(seed)
    wrong = [expected for reading, expected in readings if set(reading.values()) != {expected}]
    alive.clear()
    late_device.run(seed)
    late_device.set_stream(0)
    assert not wrong, wrong
    assert late_device.num_late() == 0
    assert pool.bytes_in_use == 0


def check_reuse(seed: int) -> None:
    """A stream copies a tensor back and drops it; another stream's next copy out reuses its host memory."""
    pool = _C.OffloadPool(1 << 12, 1 << 12)
    late_device.set_stream(1)
    offloaded = pool.begin(late_device.full(1, 1024))
    reading = late_device.read(offloaded.take())
    late_device.set_stream(0)
    offloaded = None
    offloaded = pool.begin(late_device.full(2, 1024))
    late_device.run(seed)
    assert set(reading.values()) == {1}
    reading = late_device.read(offloaded.take())
    late_device.run(seed)
    assert set(reading.values()) == {2}
    assert pool.num_slabs == 1


def check_dropped(seed: int) -> None:
    """Device memory that a copy back still writes must not belong to another tensor."""
    offloaded = _C.OffloadPool(1 << 12, 1 << 12).begin(late_device.full(1, 1024))
    offloaded.prefetch()
    del offloaded
    late_device.run(seed)
    assert late_device.num_late() == 0


check()
for seed in range(100):
    check_reuse(seed)
    check_dropped(seed)
assert late_device.num_streams() == 2, late_device.num_streams()  # one for copies out and one for copies back
print("all orders give what was there")
