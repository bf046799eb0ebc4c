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


WORKS: list[Callable[[Any], Any]] = [native_work, FutureWork, WaitsWithTimeout]
COPIES_ONLY = [WaitsWithoutTimeout]  # torch's own broadcasts pass a timeout


class PythonGroup(dist.ProcessGroup):
    """Passes collectives on to another group, or answers as a single rank. It has no name and torch does not know it.

    Args:
        inner: The group that communicates; None: there is one rank.
        work: Makes the works that it returns.
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
        return self.work(outputs)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self.calls.append("broadcast")
        if self.inner is not None:
            self.inner.broadcast(tensors, options).wait()
        return self.work(tensors)


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


def compare(make_group: Callable[[], Any], options: dict[str, Any]) -> list[Any]:
    """Trains with both classes. Returns our group, for what was called on it."""
    groups = [make_group(), make_group()]
    theirs, ours = train(TorchDDP, groups[0], options), train(DistributedDataParallel, groups[1], options)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=0, msg=f"{name} with {options}")
    return groups


def compare_all() -> None:
    world = dist.group.WORLD
    for options in OPTIONS:
        for work in WORKS:
            for in_place in (True, False):
                compare(lambda work=work, in_place=in_place: PythonGroup(world, work, in_place), options)
                theirs, ours = compare(lambda work=work, in_place=in_place: PythonGroup(None, work, in_place), options)
                assert ours.calls.count("allreduce") >= 4  # also of a single rank, as torch calls it
                assert ours.calls.count("allgather") == theirs.calls.count("allgather")
                assert ours.calls.count("broadcast") <= theirs.calls.count("broadcast")
    dist.barrier()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_equals_torchs(on_ranks: Callable[..., list[Any]]) -> None:
    on_ranks(compare_all)


def wait_without_timeout() -> None:
    group = PythonGroup(dist.group.WORLD, WaitsWithoutTimeout)
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, 0.5)
    ddp = DistributedDataParallel(module, process_group=group, init_sync=False, find_unused_parameters=True)
    for _ in range(3):
        module.zero_grad()
        ddp(torch.full((1, 3), float(dist.get_rank() + 1))).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.eq(1.5).all()


def test_works_need_no_timeout(on_ranks: Callable[..., list[Any]]) -> None:
    on_ranks(wait_without_timeout)


def use_registered_backend() -> None:
    made: list[PythonGroup] = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> PythonGroup:
        made.append(PythonGroup(dist.group.WORLD, FutureWork))
        return made[-1]

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    else:  # an earlier call in this process has registered it
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(create, False)
    group = dist.new_group(backend=BACKEND)
    compare(lambda: group, {})
    assert made == [group]


def test_registered_backends_equal_torchs(on_ranks: Callable[..., list[Any]]) -> None:
    on_ranks(use_registered_backend)


class Refused(Exception):
    pass


def fail_in_allreduce() -> list[str]:
    class Failing(PythonGroup):
        def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
            raise Refused("no more")

    class FailingLater(PythonGroup):
        def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
            work = FutureWork.__new__(FutureWork)
            dist._Work.__init__(work)
            work._future = Future()
            work._future.set_exception(Refused("no more"))
            return work

    found = []
    for group_type in (Failing, FailingLater):
        for wrapper in (TorchDDP, DistributedDataParallel):
            ddp = wrapper(nn.Linear(3, 2), process_group=group_type(None, FutureWork))
            with pytest.raises(Exception) as raised:  # noqa: B017 - the types are compared
                ddp(torch.ones(1, 3)).sum().backward()
            found.append(raised.type.__name__)
    return found


def test_errors_of_the_group_are_torchs(on_ranks: Callable[..., list[Any]]) -> None:
    for found in on_ranks(fail_in_allreduce):
        assert found[0] == found[1]
        assert found[2] == found[3]
