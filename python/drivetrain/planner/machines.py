"""Stands in for the devices, ranks and workers of a planned script, none of which the planning machine needs."""

import contextlib
import copy
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ..data.prefetch import Prefetcher, moved
from .period import Period
from .recorder import Recorder, plausible

_CUDA_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "is_bf16_supported": True,
    "is_initialized": False,
    "get_device_name": "a planned device",
    "get_device_capability": (9, 0),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
}
_CUDA_CALLS = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "init", "ipc_collect")
_READERS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
_LAUNCHER = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"  # the module of its loader
_ALONE = {"num_workers": 0, "timeout": 0, "pin_memory": False}  # what an iterator in this process needs


class BatchSize:
    """Holds the batch size of all DataLoaders; None keeps the script's. `is_taken` tells whether one has taken it."""

    def __init__(self, size: int | None) -> None:
        self.size, self.is_taken = size, False


@contextlib.contextmanager
def stand_ins(recorder: Recorder, period: Period, kind: str, batch: BatchSize, world_size: int) -> Iterator[None]:
    """Replaces devices, ranks, workers and the batch size of a script, and restores them.

    `period` learns of optimizers and batches. With one rank, the script has no variables of a launcher.
    """
    with contextlib.ExitStack() as stack:

        def put(holder: Any, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(holder, name, value))

        if kind == "cuda":
            for name, answer in _CUDA_ANSWERS.items():
                put(torch.cuda, name, _answering(answer))
        for name in (*_CUDA_CALLS, "reset_peak_memory_stats"):
            put(torch.cuda, name, _answering(None))
        put(torch.amp.autocast_mode.autocast, "__init__", _autocast_init(torch.amp.autocast_mode.autocast.__init__))
        put(DataLoader, "__iter__", lambda loader: loader._get_iterator())  # without persistent workers
        load_in_process(put, DataLoader, _SingleProcessDataLoaderIter, period, batch)
        put(torch.optim.Optimizer, "__init__", _optimizer_init(torch.optim.Optimizer.__init__, period))
        put(nn.Module, "_apply", _apply)
        for name in ("from_numpy", "frombuffer", "as_tensor", "asarray", "from_dlpack"):
            put(torch, name, _noting_others(getattr(torch, name)))
        put(torch.UntypedStorage, "data_ptr", _address(torch.UntypedStorage.data_ptr))
        put(dist, "init_process_group", _pretended_group(world_size))
        put(dist, "TCPStore", lambda *_, **__: torch._C._distributed_c10d.HashStore())
        # The first of the processes that a script starts runs in this one.
        put(torch.multiprocessing, "spawn", lambda fn, args=(), *_, **__: fn(0, *args))
        put(nn.parallel, "DistributedDataParallel", DistributedDataParallel)
        import drivetrain

        put(drivetrain, "DistributedDataParallel", DistributedDataParallel)
        put(Prefetcher, "__iter__", loaded_ahead)
        if world_size > 1:
            stack.enter_context(mock.patch.dict(os.environ, _LAUNCHER, WORLD_SIZE=str(world_size)))
        stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        stack.enter_context(_OnTheCpu(recorder))
        yield


def _optimizer_init(plain: Callable[..., None], period: Period) -> Callable[..., None]:
    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        period.make(self)

    return init


def _answering(answer: object) -> Callable[..., object]:
    return lambda *_, **__: answer


def _autocast_init(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float16
        plain(self, device_type, *args, **kwargs)

    return init


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Casts a module. torch would swap the contents of parameters, which tensors without values do not allow.

    Moves change nothing, so that parameters stay the same objects. A cast makes new ones.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                applied = fn(parameter)
            if applied.dtype != parameter.dtype:
                new = made.setdefault(id(parameter), nn.Parameter(applied, parameter.requires_grad))
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fn(buffer)
    return module


def _noting_others(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function that marks memory which is not torch's, such as NumPy's, so that no plan counts it."""

    @functools.wraps(plain)
    def made(source: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(source, Tensor) or kwargs.get("device") is not None:
            return plain(source, *args, **kwargs)
        with _disable_current_modes():  # otherwise the tensor is recorded before its mark
            tensor = plain(source, *args, **kwargs)
            if not tensor.untyped_storage().resizable():
                tensor.untyped_storage().is_of_others = True  # type: ignore[attr-defined]
        return tensor

    return made


def _address(plain: Callable[[Any], int]) -> Callable[[Any], int]:
    """Returns `data_ptr` with a number for memory without values, by which libraries find tensors that share it."""
    return lambda storage: storage._cdata if storage.device.type == "meta" else plain(storage)


def _pretended_group(world_size: int) -> Callable[..., None]:
    plain = dist.init_process_group

    def init(*_: object, **__: object) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        plain("fake", store=FakeStore(), rank=0, world_size=world_size)

    return init


class DistributedDataParallel(nn.Module):
    """Calls the wrapped module. The plan adds buffers and communication itself."""

    def __init__(self, module: nn.Module, *_: object, **__: object) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


class _OnTheCpu(TorchFunctionMode):
    """Makes every function that gets a CUDA device use the CPU, and copy where it would move data."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            args, kwargs, func = (args[0], "cuda"), {}, Tensor.to
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            tensor = args[0]
            return tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        if func in _READERS and isinstance(args[0], FakeTensor):
            values = _values(args[0])
            return values.tolist() if func is Tensor.tolist else values.astype(args[1]) if args[1:] else values
        is_moved = False
        if _is_cuda(kwargs.get("device")):
            kwargs["device"], is_moved = torch.device("cpu"), True
        if any(map(_is_cuda, args)):
            args, is_moved = tuple(torch.device("cpu") if _is_cuda(arg) else arg for arg in args), True
        if is_moved and func is Tensor.to:
            kwargs["copy"] = True
        kwargs.pop("pin_memory", None)
        before, self._recorder.is_moving = self._recorder.is_moving, is_moved
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.is_moving = before


def _values(tensor: Tensor) -> Any:
    """Returns an array of NumPy's for a script that reads a tensor without values."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.full(tensor.shape, plausible(tensor.dtype), dtype=tensor.dtype).numpy()


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


# ---- Workers of DataLoaders, because tensors without values stay in their process.


def load_in_process(
    put: Callable[[Any, str, object], None], loaders: Any, iterators: Any, period: Period, batch: BatchSize
) -> None:
    """Lets a class of loaders load in this process, as the one worker of a loader that has some.

    `put` replaces an attribute. `iterators` is the class of iterators without workers.
    """
    put(loaders, "__init__", taking_batch(loaders.__init__, batch))
    put(loaders, "_get_iterator", _iterator_of(loaders._get_iterator))
    put(iterators, "_next_data", _noted(iterators._next_data, period))


def _iterator_of(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_iterator(loader: Any) -> Any:
        worker, before = None, {name: getattr(loader, name) for name in (*_ALONE, "dataset")}
        vars(loader).update(_ALONE)
        if before["num_workers"]:
            vars(loader)["dataset"] = copy.copy(loader.dataset)
            worker = torch_worker.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=loader.dataset)
            if "_num_yielded" not in (getattr(loader, "next_iter_state", None) or ()):
                vars(loader)["next_iter_state"] = None  # of workers, which a plan does not read
        try:
            with _found_by_data_sets(worker):
                if worker is not None and loader.worker_init_fn is not None:
                    loader.worker_init_fn(0)
                batches = plain(loader)
        finally:
            vars(loader).update(before)
        fetcher = batches._dataset_fetcher
        collate = fetcher.collate_fn

        def collated(samples: Any) -> Any:
            """Collates as outside of a worker, where no batch goes into shared memory."""
            with _found_by_data_sets(None):
                return collate(samples)

        fetcher.collate_fn = collated
        batches._of_plan = loader, worker
        return batches

    return get_iterator


@contextlib.contextmanager
def _found_by_data_sets(worker: Any) -> Iterator[None]:
    """Lets data sets find themselves in a worker; None: in none."""
    before, torch_worker._worker_info = torch_worker._worker_info, worker
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _noted(plain: Callable[[Any], Any], period: Period) -> Callable[[Any], Any]:
    """Returns what takes the place of `_next_data`, and lets the period learn of batches."""

    def next_data(batches: Any) -> Any:
        if not hasattr(batches, "_of_plan"):  # torchdata's loader skips the batches of an earlier run
            return plain(batches)
        loader, worker = batches._of_plan
        period.ask(loader)
        try:
            with _found_by_data_sets(worker):
                batch = plain(batches)
        except StopIteration:
            period.pause()
            raise
        period.take(loader)
        return batch

    return next_data


def loaded_ahead(prefetcher: Prefetcher) -> Iterator[Any]:
    """Yields the batches of `prefetch` without its thread, which a plan does not follow, and keeps as many as it."""
    waiting: deque[Any] = deque()
    for batch in prefetcher.loader:
        device = prefetcher.device
        waiting.append(batch if device is None else moved(batch, device, is_pinned=False))
        if len(waiting) > prefetcher.depth + 1:  # the buffer's, and the one that waits for a place there
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def taking_batch(plain: Callable[..., None], batch: BatchSize) -> Callable[..., None]:
    """Returns what takes the place of `DataLoader.__init__`, with another batch size."""

    def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        batch_sampler = args[2] if len(args) > 2 else kwargs.get("batch_sampler")
        if batch.size is not None and batch_size is not None and batch_sampler is None:
            batch_size, batch.is_taken = batch.size, True
        plain(self, dataset, batch_size, *args, **kwargs)

    return init
