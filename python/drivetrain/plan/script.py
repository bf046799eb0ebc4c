"""Plans an unedited training script: runs it with tensors that have no values, up to its second optimizer step."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

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
        OSError: The script cannot be read.
    """
    from ..cli.run import load_script

    tracer = Tracer(torch.device("cpu"), device_kind, is_script=True)
    steps = 0

    def after_step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps >= _STEPS:
            raise _Enough
        tracer.begin_step()

    main, code = load_script(path)
    argv = sys.argv
    sys.argv = [path, *arguments]
    tracer.begin_step()
    try:
        with _stand_ins(tracer, device_kind, batch, world_size), tracer:
            hook = register_optimizer_step_post_hook(after_step)
            try:
                exec(code, main.__dict__)
            except (_Enough, SystemExit):
                pass
            finally:
                hook.remove()
    finally:
        sys.argv = argv
    if steps < _STEPS:
        raise PlanError(f"{path} ended after {steps} optimizer steps, and a plan needs {_STEPS}: let it run longer")
    return tracer.finish()


@contextlib.contextmanager
def _stand_ins(tracer: Tracer, device_kind: str, batch: int | None, world_size: int) -> Iterator[None]:
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
        put(DataLoader, "__init__", _loader_init(DataLoader.__init__, batch))
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


def _loader_init(plain: Callable[..., None], batch: int | None) -> Callable[..., None]:
    """Loads in this process, because tensors without values do not travel between processes."""

    def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory"):
            kwargs.pop(name, None)
        if batch is not None and batch_size is not None and kwargs.get("batch_sampler") is None:
            batch_size = batch
        plain(self, dataset, batch_size, *args, **kwargs)

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
