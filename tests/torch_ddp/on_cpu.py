"""Lets the body of a test that was written for GPUs run on the CPU: what would go to a GPU stays where it is."""

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
    """Replaces torch's decorators that end a test without enough GPUs by ones that only note what it asked for.

    Has to come before the import of the module whose tests are decorated.
    """

    def note(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        function.made_for = what  # type: ignore[attr-defined]
        return function

    common_distributed.skip_if_lt_x_gpu = lambda x, **_: lambda function: note(function, f"{x} GPUs")  # type: ignore[attr-defined]
    common_distributed.skip_if_no_gpu = lambda function: note(function, "a GPU per rank")  # type: ignore[attr-defined]
    common_distributed.skip_if_small_worldsize = lambda function: note(function, "8 ranks")  # type: ignore[attr-defined]


def opened(method: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """The test function under unittest's skips, and whether it was marked as one for GPUs or not to be run here.

    torch skips a handful everywhere on Linux because of an issue of its own; they are tried like the rest.
    """
    for_gpus = hasattr(method, "made_for") or getattr(method, "__unittest_skip__", False)
    while getattr(method, "__code__", None) in _SKIPS:
        method = method.__wrapped__  # type: ignore[attr-defined]
    return method, for_gpus


# What unittest.skip puts around a function, as opposed to a decorator of torch's that the test needs.
_SKIPS = (unittest.skip("")(lambda: None).__code__,)


def _on_cpu(device: Any) -> Any:
    """The device to use instead of `device`; what is no GPU comes back as it is."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


class _DevicesBecomeCpu(TorchFunctionMode):
    """Rewrites the device of every torch function called from Python."""

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
    """Stands for a CUDA stream or event where everything is done by the time it is asked for."""

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
    """A class of its own for every name that is replaced: torch.compile keeps a table of them."""
    return type("Done", (_Done,), {})


class _CurrentDevice:
    """torch.cuda's notion of the current device, kept as a plain number."""

    def __init__(self, rank: int) -> None:
        self._index = rank

    def get(self) -> int:
        return self._index

    def set(self, device: Any) -> None:
        self._index = device if isinstance(device, int) else (torch.device(device).index or 0)


def _without_devices(init: Callable[..., None]) -> Callable[..., None]:
    """DistributedDataParallel's constructor for modules on the CPU, where naming devices is an error."""

    @functools.wraps(init)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        init(self, *args, **kwargs)

    return wrapper


def _smaller_images(test_input: type) -> Callable[..., Any]:
    """Makes test_ddp_uneven_inputs' 1000 x 1000 images small: on a CPU its convolutions would take half an hour."""

    def make(name: str, inp: Any, **rest: Any) -> Any:
        return test_input(name=name, inp=inp[..., :20, :20] if name == "large_conv_model" else inp, **rest)

    return make


@contextmanager
def on_cpu(tests: ModuleType, ddp_class: type[nn.Module], rank: int, world_size: int) -> Iterator[None]:
    """While it is open, code that was written for one GPU per rank runs on the CPU.

    `tests` is the module under test: helpers that it has bound by name are replaced there.
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
