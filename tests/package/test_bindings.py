"""Tests of the native module's bindings: constructors, casts and destructors of bound classes hold the GIL.

pybind11 keeps one table of all bound objects, which only the GIL protects.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import _C
from warm_python import warm_context

ROUNDS = 6_000
SLOW = {"Snapshot", "Segment", "TagBoard"}  # run in every SLOW_ROUNDS-th round
SLOW_ROUNDS = 200
LIMIT_S = 60
DEFINITION = re.compile(r"\.def\(\s*py::init\b")
GUARD = re.compile(r"\bno_gil\(\)|\bcall_guard\b")


def constructors_in(source: str) -> Iterator[str]:
    """Yields the text of each `.def(py::init...)`, up to its closing parenthesis."""
    for found in DEFINITION.finditer(source):
        begin = source.index("(", found.start())
        depth = 0
        for place in range(begin, len(source)):
            depth += {"(": 1, ")": -1}.get(source[place], 0)
            if depth == 0:
                yield source[found.start() : place + 1]
                break


def test_no_constructor_is_bound_without_the_gil(repository: Path) -> None:
    definitions = [
        (path.name, text) for path in repository.glob("csrc/**/*.cpp") for text in constructors_in(path.read_text())
    ]
    assert len(definitions) == len(constructed_classes())  # each one has been found
    assert [(name, text) for name, text in definitions if GUARD.search(text)] == []


def test_a_guarded_constructor_is_found() -> None:
    source = 'm.def("f", &f, no_gil());\n.def(py::init(&make), py::arg("a") = g(), no_gil())\n.def("g", &g, no_gil())'
    assert [bool(GUARD.search(text)) for text in constructors_in(source)] == [True]


def constructed_classes() -> set[str]:
    """Returns the names of the bound classes that have a constructor."""
    bound = {name: vars(value).get("__init__") for name, value in vars(_C).items() if isinstance(value, type)}
    return {name for name, init in bound.items() if type(init).__name__ == "instancemethod"}


def makers(comm: _C.Comm) -> dict[str, Callable[[], object]]:
    """Returns, by the name of each class with a constructor, how to make an object of it."""
    model, recorder = nn.Linear(2, 2), _C.ActivationRecorder()
    weight = nn.Parameter(torch.ones(2))
    return {
        "ActivationCall": lambda: _C.ActivationCall(recorder, model),
        "ActivationRecorder": lambda: _C.ActivationRecorder(is_profile=True),
        "ActivationScope": lambda: _C.ActivationScope(recorder),
        "Conversions": _C.Conversions,
        "HostPages": lambda: _C.HostPages(4096),
        "MatrixRanks": lambda: _C.MatrixRanks(
            dist.distributed_c10d._get_default_group().group_name, backend="gloo", ranks=[0], device="cpu"
        ),
        "MainGrads": lambda: _C.MainGrads([weight], [torch.zeros(2)], lambda index: True),
        "OffloadPool": lambda: _C.OffloadPool(1 << 20),
        "Precision": lambda: _C.Precision(
            state_bits=32, float8=False, master_bits=32, min_8bit_size=4096, rounding="nearest"
        ),
        "RankRanges": lambda: _C.RankRanges([(0, 4, [0])]),
        "Reducer": lambda: make_reducer(model, comm),
        "Slab": _C.Slab,
        "Snapshot": lambda: _C.Snapshot(_C.Slab(), bytes(4096), [torch.zeros(2)]),
        "StepOptions": lambda: _C.StepOptions(grad_scale=2.0),
        "StepReader": _C.StepReader,
        "TraceReader": read_trace,
    }


def read_trace() -> None:
    reader = _C.TraceReader(sees_forwards=False)  # one at a time
    reader.standing()
    reader.stop()


def make_reducer(model: nn.Module, comm: _C.Comm) -> _C.Reducer:
    params = list(model.parameters())
    return _C.Reducer(
        params=params,
        names=[name for name, _ in model.named_parameters()],
        comm=comm,
        bucket_caps=[1 << 20],
        find_unused_parameters=False,
        skip_unused_buckets=False,
        sparse=[False] * len(params),
        check_replicas_every=0,
        frozen=[],
        plan_from_measurement=False,
        wrapper="stress",
        gradients_stay_views=False,
        logical_ranks=0,
    )


def results(comm: _C.Comm) -> dict[str, Callable[[], object]]:
    """Returns, by name, calls without the GIL that return objects of bound classes."""
    group, memory = dist.distributed_c10d._get_default_group().group_name, torch.zeros(64, dtype=torch.uint8)
    reducer = make_reducer(nn.Linear(2, 2), comm)
    pool, packed = _C.OffloadPool(1 << 20), _C.pack(torch.ones(256), "bits")
    return {
        "Comm": lambda: _C.torch_comm(process_group=group, backend="gloo"),
        "CarriedErrors": lambda: comm.carry_errors(memory),
        "BucketInfo": reducer.buckets,
        "Offloaded": lambda: pool.begin(torch.ones(256)),
        "Packed": lambda: _C.pack(torch.ones(256), "bits"),
        "Tensor": lambda: _C.unpack(packed),
        "PlanReport": reducer.plan_report,
        "PendingReduce": lambda: reducer.reduce_zeros(0, True),
        "Progress": lambda: reducer.progress().snapshot(),
        "Segment": _C.tag_line,
        "TagBoard": lambda: _C.tag_board(
            own=_C.tag_line(),
            addresses=[b""],
            rank=0,
            ranks=[0],
            rank_names=["rank 0"],
            between="",
            hosts=[],
            timeout_s=1,
        ),
        "Times": reducer.times,
    }


def construct_beside_users() -> None:
    """Runs every constructor and result, while a thread makes, casts and frees bound objects without a pause."""
    sys.setswitchinterval(1e-6)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm = _C.torch_comm(process_group=dist.distributed_c10d._get_default_group().group_name, backend="gloo")
    made = makers(comm)
    assert made.keys() == constructed_classes()
    progress = make_reducer(nn.Linear(2, 2), comm).progress()
    is_done = threading.Event()

    def use() -> None:
        while not is_done.is_set():
            progress.snapshot()

    thread = threading.Thread(target=use)
    thread.start()
    try:
        calls = {**made, **results(comm)}
        fast = [call for name, call in calls.items() if name not in SLOW]
        for number in range(ROUNDS):
            for call in fast if number % SLOW_ROUNDS else calls.values():
                call()
    finally:
        is_done.set()
        thread.join()
    dist.destroy_process_group()


def test_constructors_and_casts_hold_the_gil() -> None:
    process = warm_context().Process(target=construct_beside_users)
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"the constructors did not end within {LIMIT_S} s")
    assert process.exitcode == 0
