"""Plans an unedited training script: runs it with tensors that have no values, up to its second optimizer step."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ..main_script import load_script
from .trace import StepTrace
from .tracer import PlanError, Tracer

_STEPS = 2
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


class ScriptError(RuntimeError):
    """A script has failed by itself. The cause is the script's error."""


class _Enough(BaseException):
    """Ends the script after the last traced step. Handlers for Exception do not catch it."""


def trace_script(
    path: str, arguments: Sequence[str] = (), *, device_kind: str, batch: int | None = None, world_size: int = 1
) -> StepTrace:
    """Traces the first optimizer steps of a script.

    The script runs in this process, on the CPU. Large tensors, parameters among them, have no values, and names of CUDA
    devices mean the planned one. A process group, if it makes one, has one member that pretends to be rank 0 of all.
    Nothing of the process's earlier state is restored: run this in a process of its own.

    Args:
        path: The script.
        arguments: Its arguments.
        device_kind: "cpu" or "cuda".
        batch: The batch size of every DataLoader; None keeps the script's.
        world_size: Number of ranks that the script sees.

    Raises:
        PlanError: The script ends before its second optimizer step, or depends on values.
        ScriptError: The script cannot be compiled, or raises an error of its own.
        OSError: The script cannot be read.
    """
    tracer = Tracer(torch.device("cpu"), device_kind, is_script=True)
    batches = _BatchCounter()
    steps, exit_code = 0, None

    def after_step(*_: object) -> None:
        nonlocal steps
        steps += 1
        batches.end_step()
        if steps >= _STEPS:
            raise _Enough
        tracer.begin_step()

    try:
        main, code = load_script(path)
    except SyntaxError as error:
        raise ScriptError(f"{path} cannot be compiled") from error
    argv = sys.argv
    sys.argv = [path, *arguments]
    tracer.begin_step()
    try:
        with _stand_ins(tracer, device_kind, batch, world_size, batches), tracer:
            hook = register_optimizer_step_post_hook(after_step)
            try:
                exec(code, main.__dict__)
            except _Enough:
                pass
            except SystemExit as error:
                exit_code = error.code
            finally:
                hook.remove()
    except PlanError:
        raise
    except Exception as error:
        raise ScriptError(f"{path} raised {type(error).__name__} after {steps} optimizer steps") from error
    finally:
        sys.argv = argv
    if steps < _STEPS:
        how = "ended" if exit_code in (None, 0) else f"exited with {exit_code!r}"
        advice = "let it run longer" if exit_code in (None, 0) else "see what it has printed"
        raise PlanError(f"{path} {how} after {steps} optimizer steps, and a plan needs {_STEPS}: {advice}")
    trace = tracer.finish()
    trace.samples, trace.epoch_samples = batches.samples(), batches.epoch_samples()
    if batch is not None and not batches.is_batch_taken:
        trace.notes.append(
            f"--batch {batch} changes nothing: the script has made no DataLoader that takes a batch size"
        )
    return trace


class _BatchCounter:
    """Counts what the script takes from its DataLoaders."""

    def __init__(self) -> None:
        self.is_batch_taken = False
        self._loader: DataLoader[Any] | None = None  # from which the last step has taken its batches
        self._taken = self._of_last_step = 0

    def take(self, loader: DataLoader[Any]) -> None:
        """Notes that the script takes a batch."""
        if self._loader is not loader:
            self._loader, self._taken = loader, 0
        self._taken += 1

    def end_step(self) -> None:
        """Notes that the optimizer has stepped."""
        self._of_last_step, self._taken = self._taken, 0

    def samples(self) -> int:
        """Returns the samples of the last step; 0 if they are not known."""
        sampler = None if self._loader is None else self._loader.batch_sampler
        return self._of_last_step * int(getattr(sampler, "batch_size", None) or 0)

    def epoch_samples(self) -> int:
        """Returns the samples of the data set; 0 if they are not known."""
        if self._loader is None or not isinstance(self._loader.dataset, Sized):
            return 0
        return len(self._loader.dataset)


@contextlib.contextmanager
def _stand_ins(
    tracer: Tracer, device_kind: str, batch: int | None, world_size: int, batches: _BatchCounter
) -> Iterator[None]:
    """Replaces what a script may not do while it is planned, and restores it."""
    with contextlib.ExitStack() as stack:

        def put(holder: Any, name: str, value: object) -> None:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)

        if device_kind == "cuda":
            for name, answer in _CUDA_ANSWERS.items():
                put(torch.cuda, name, _answering(answer))
            for name in (*_CUDA_CALLS, "reset_peak_memory_stats"):
                put(torch.cuda, name, _answering(None))
        put(torch.amp.autocast_mode.autocast, "__init__", _autocast_init(torch.amp.autocast_mode.autocast.__init__))
        put(DataLoader, "__init__", _loader_init(DataLoader.__init__, batch, batches))
        put(DataLoader, "__iter__", _loader_iter(DataLoader.__iter__, batches))
        put(nn.Module, "_apply", _apply)
        put(dist, "init_process_group", _pretended_group(world_size))
        wrapper = _wrapper()
        put(nn.parallel, "DistributedDataParallel", wrapper)
        import drivetrain

        put(drivetrain, "DistributedDataParallel", wrapper)
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", world_size), ("LOCAL_WORLD_SIZE", 1)):
            stack.callback(_restore_variable, name, os.environ.get(name))
            os.environ[name] = str(value)
        stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        stack.enter_context(_OnTheCpu(tracer))
        yield


def _restore_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None) if value is None else os.environ.update({name: value})


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


def _loader_init(plain: Callable[..., None], batch: int | None, batches: _BatchCounter) -> Callable[..., None]:
    """Loads in this process, because tensors without values do not travel between processes."""

    def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory"):
            kwargs.pop(name, None)
        if batch is not None and batch_size is not None and kwargs.get("batch_sampler") is None:
            batch_size, batches.is_batch_taken = batch, True
        plain(self, dataset, batch_size, *args, **kwargs)

    return init


def _loader_iter(plain: Callable[..., Iterator[Any]], batches: _BatchCounter) -> Callable[..., Iterator[Any]]:
    def iterate(self: Any) -> Iterator[Any]:
        for batch in plain(self):
            batches.take(self)
            yield batch

    return iterate


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


def _pretended_group(world_size: int) -> Callable[..., None]:
    plain = dist.init_process_group

    def init(*_: object, **__: object) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        plain("fake", store=FakeStore(), rank=0, world_size=world_size)

    return init


def _wrapper() -> type[nn.Module]:
    class DistributedDataParallel(nn.Module):
        """Calls the wrapped module. The plan adds buffers and communication itself."""

        def __init__(self, module: nn.Module, *_: object, **__: object) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            yield

    return DistributedDataParallel


class _OnTheCpu(TorchFunctionMode):
    """Makes every function that gets a CUDA device use the CPU, and copy where it would move data."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            args, kwargs, func = (args[0], "cuda"), {}, Tensor.to
        if func is Tensor.pin_memory:
            return args[0]
        is_moved = False
        if _is_cuda(kwargs.get("device")):
            kwargs["device"], is_moved = torch.device("cpu"), True
        if any(map(_is_cuda, args)):
            args, is_moved = tuple(torch.device("cpu") if _is_cuda(arg) else arg for arg in args), True
        if is_moved and func is Tensor.to:
            kwargs["copy"] = True
        kwargs.pop("pin_memory", None)
        before = self._tracer.moving(is_moved)
        try:
            return func(*args, **kwargs)
        finally:
            self._tracer.moving(before)


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"
