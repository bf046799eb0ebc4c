"""Runs the body of a test that was written for GPUs on the CPU: moves to a GPU have no effect."""

import functools
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def open_gpu_marks(common_distributed: ModuleType) -> None:
    """Replaces torch's decorators that skip a test without enough GPUs with ones that only record the requirement.

    Call it before the import of the module with the decorated tests.
    """

    def note(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        function.made_for = what  # type: ignore[attr-defined]
        return function

    common_distributed.skip_if_lt_x_gpu = lambda x, **_: lambda function: note(function, f"{x} GPUs")  # type: ignore[attr-defined]
    common_distributed.skip_if_no_gpu = lambda function: note(function, "a GPU per rank")  # type: ignore[attr-defined]
    common_distributed.skip_if_small_worldsize = lambda function: note(function, "8 ranks")  # type: ignore[attr-defined]


def opened(method: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Unwraps unittest's skips. Returns the test function, and True if it was marked for GPUs or skipped.

    torch skips a few tests everywhere on Linux because of its own issues; they run here too.
    """
    for_gpus = hasattr(method, "made_for") or getattr(method, "__unittest_skip__", False)
    while getattr(method, "__code__", None) in _SKIPS:
        method = method.__wrapped__  # type: ignore[attr-defined]
    return method, for_gpus


# Code of the wrapper that unittest.skip adds; decorators that a test needs have other code.
_SKIPS = (unittest.skip("")(lambda: None).__code__,)


def _on_cpu(device: Any) -> Any:
    """Returns the CPU for a GPU, and any other value unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


class _DevicesBecomeCpu(TorchFunctionMode):
    """Rewrites the device argument of every torch function that Python calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return func(*args, **kwargs)


class _Done:
    """Replaces CUDA streams and events on the CPU, where all work is complete when it is queried."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __enter__(self) -> "_Done":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    wait_stream = wait_event = record_event = record = wait = synchronize = _nothing


def _done() -> type[_Done]:
    """Returns a new class for each replaced name, because torch.compile keeps a table of these classes."""
    return type("Done", (_Done,), {})


class _CurrentDevice:
    """Holds the index that torch.cuda reports as the current device."""

    def __init__(self, rank: int) -> None:
        self._index = rank

    def get(self) -> int:
        return self._index

    def set(self, device: Any) -> None:
        self._index = device if isinstance(device, int) else (torch.device(device).index or 0)


def _without_devices(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps DistributedDataParallel's constructor to drop device arguments, which are an error on the CPU."""

    @functools.wraps(init)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        init(self, *args, **kwargs)

    return wrapper


def _smaller_images(test_input: type) -> Callable[..., Any]:
    """Shrinks the 1000 x 1000 images of test_ddp_uneven_inputs, whose convolutions take half an hour on a CPU."""

    def make(name: str, inp: Any, **rest: Any) -> Any:
        return test_input(name=name, inp=inp[..., :20, :20] if name == "large_conv_model" else inp, **rest)

    return make


@contextmanager
def on_cpu(tests: ModuleType, ddp_class: type[nn.Module], rank: int, world_size: int) -> Iterator[None]:
    """Makes code for one GPU per rank run on the CPU inside the block.

    Args:
        tests: torch's test module, in which bound helpers are replaced.
        ddp_class: The class under test.
        rank: This process's rank.
        world_size: Number of ranks.
    """
    from torch.distributed import device_mesh

    current = _CurrentDevice(rank)
    init_device_mesh = device_mesh.init_device_mesh
    module_to = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return module_to(self, *map(_on_cpu, args), **kwargs)

    def mesh(device_type: str, *args: Any, **kwargs: Any) -> device_mesh.DeviceMesh:
        return init_device_mesh(str(_on_cpu(device_type)), *args, **kwargs)

    with (
        mock.patch.object(nn.Module, "to", to),
        mock.patch.object(nn.Module, "cuda", lambda self, device=None: self),
        mock.patch.object(ddp_class, "__init__", _without_devices(ddp_class.__init__)),
        mock.patch.multiple(
            torch.cuda,
            set_device=current.set,
            current_device=current.get,
            synchronize=lambda device=None: None,
            manual_seed=torch.manual_seed,
            device=lambda device: nullcontext(),
            stream=lambda stream: nullcontext(),
            Stream=_done(),
            Event=_done(),
            current_stream=_done(),
        ),
        mock.patch.multiple(torch, Stream=_done(), Event=_done()),
        mock.patch.object(torch.accelerator, "current_stream", _done()),
        mock.patch.object(tests, "init_multigpu_helper", return_value={rank: [rank] for rank in range(world_size)}),
        mock.patch.object(tests, "DDPUnevenTestInput", _smaller_images(tests.DDPUnevenTestInput)),
        mock.patch.object(device_mesh, "init_device_mesh", mesh),
        _DevicesBecomeCpu(),
    ):
        yield
