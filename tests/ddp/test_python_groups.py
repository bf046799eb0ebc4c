"""Tests of process groups that a script writes in Python: the wrapper uses what torch's reducer uses of them."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from drivetrain import DistributedDataParallel
from ranks import run_on

BACKEND = "written-in-python"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"init_sync": False, "bucket_cap_mb": 0.0001},
]


class FutureWork(dist._Work):
    """A work with a future and nothing else."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def get_future(self) -> Any:
        return self._future


class WaitsWithoutTimeout(FutureWork):
    def wait(self) -> bool:
        return True


class WaitsWithTimeout(FutureWork):
    def wait(self, timeout: timedelta) -> bool:
        return True


def native_work(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


WORKS: list[Callable[[Any], Any]] = [native_work, FutureWork, WaitsWithTimeout, WaitsWithoutTimeout]


class PythonGroup(dist.ProcessGroup):
    """Passes collectives on to another group, or answers as a single rank. It has no name and torch does not know it.

    Args:
        inner: The group that communicates; None: there is one rank.
        work: Makes the works of its sums.
        in_place: Leaves sums in the caller's tensors; else only the futures hold them.
    """

    def __init__(self, inner: dist.ProcessGroup | None, work: Callable[[Any], Any], in_place: bool = True) -> None:
        self.inner, self.work, self.in_place = inner, work, in_place
        self.calls: list[str] = []
        super().__init__(*((0, 1) if inner is None else (inner.rank(), inner.size())))

    def getSize(self) -> int:
        return 1 if self.inner is None else self.inner.size()

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        self.calls.append("allreduce")
        results = tensors if self.in_place else [tensor.clone() for tensor in tensors]
        if self.inner is not None:
            self.inner.allreduce(results).wait()
        return self.work(results)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        self.calls.append("allgather")
        if self.inner is None:
            outputs[0][0].copy_(inputs[0])
        else:
            self.inner.allgather(outputs, inputs).wait()
        return self.waitable(outputs)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self.calls.append("broadcast")
        if self.inner is not None:
            self.inner.broadcast(tensors, options).wait()
        return self.waitable(tensors)

    def waitable(self, result: Any) -> Any:
        """Returns a work for what torch's class waits for with a timeout. Of sums it takes the future only."""
        return (self.work if self.work is WaitsWithTimeout else native_work)(result)


def train(wrapper: type, group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank() if options.get("init_sync", True) else 0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    ddp = wrapper(module, process_group=group, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + dist.get_rank())
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            with ddp.no_sync():
                ddp(torch.randn(6, 4)).square().sum().backward()
        ddp(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
    return module.state_dict()


def compare(expected: dict[str, Tensor], found: dict[str, Tensor], options: dict[str, Any]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{name} with {options}")


@pytest.mark.filterwarnings("ignore::UserWarning")
@run_on(2)
def test_training_equals_torchs() -> None:
    for options in OPTIONS:
        for inner in (dist.group.WORLD, None):
            theirs = PythonGroup(inner, native_work)  # torch's class waits for some works for ever
            expected = train(TorchDDP, theirs, options)
            for work in WORKS:
                for in_place in (True, False):
                    ours = PythonGroup(inner, work, in_place)
                    compare(expected, train(DistributedDataParallel, ours, options), options)
                    assert ours.calls.count("allreduce") >= 4  # also of a single rank, as torch calls it
                    assert ours.calls.count("allgather") == theirs.calls.count("allgather")
                    assert ours.calls.count("broadcast") <= theirs.calls.count("broadcast")
    dist.barrier()


@run_on(2)
def test_registered_backends_equal_torchs() -> None:
    made: list[PythonGroup] = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> PythonGroup:
        made.append(PythonGroup(dist.group.WORLD, FutureWork))
        return made[-1]

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    else:  # an earlier call in this process has registered it
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(create, False)
    group = dist.new_group(backend=BACKEND)
    compare(train(TorchDDP, group, {}), train(DistributedDataParallel, group, {}), {})
    assert made == [group]


class Refused(Exception):
    pass


def refuse(_: Any) -> None:
    raise Refused("no more")


class FailingGroup(PythonGroup):
    """Fails in each sum: at once, in its future, or in its future where only Python sees it."""

    def __init__(self, how: str) -> None:
        super().__init__(None, native_work)
        self.how = how

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        if self.how == "at once":
            refuse(tensors)
        work = FutureWork(tensors)
        if self.how == "in the future":
            work._future = work._future.then(refuse)
        else:
            work._future = Future()
            work._future.set_exception(Refused("no more"))
        return work


def error_in_allreduce(wrapper: type, how: str) -> tuple[str, str]:
    ddp = wrapper(nn.Linear(3, 2), process_group=FailingGroup(how))
    with pytest.raises((Refused, RuntimeError)) as raised:
        ddp(torch.ones(1, 3)).sum().backward()
    return raised.type.__name__, str(raised.value)


@run_on(2)
def test_errors_of_the_group_are_torchs() -> None:
    for how in ("at once", "in the future"):
        errors = [error_in_allreduce(wrapper, how) for wrapper in (TorchDDP, DistributedDataParallel)]
        assert errors[0][0] == errors[1][0]
        assert all("no more" in message for _, message in errors)
    with pytest.raises(NotImplementedError, match="shard= is for process groups"):
        DistributedDataParallel(nn.Linear(3, 2), process_group=FailingGroup("at once"), shard="optimizer")
    _, message = error_in_allreduce(DistributedDataParallel, "for Python only")  # torch's class ends the process
    assert "allreduce() holds no tensor" in message
