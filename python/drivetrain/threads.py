"""Starts the package's threads on a GPU that the process uses, as CUDA starts each thread on the first GPU."""

import threading
from collections.abc import Callable
from typing import Any, cast

import torch

from . import _C


class Thread(threading.Thread):
    """A daemon thread that disturbs no other GPU, and no capture of another thread; see `settle_on_device`."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def run(self) -> None:
        settle_on_device()
        super().run()


def settle_on_device() -> None:
    """Moves the calling thread to a GPU with a context, and lets it query while another thread captures a CUDA graph.

    A context takes 500 MB of a GPU. CUDA makes one on the thread's device when the thread asks about any event. torch's
    calls about another GPU end on the thread's device too, even those that free an event in garbage collection. A
    thread that may be older than the process's first context calls this again before each piece of work on a device.
    """
    if not torch.cuda.is_initialized():
        return
    has_context = cast(Any, torch._C)._cuda_hasPrimaryContext
    own = torch.cuda.current_device()
    used = next((device for device in (own, *range(torch.cuda.device_count())) if has_context(device)), None)
    if used is None:
        return
    if used != own:
        torch.cuda.set_device(used)
    _C.leave_captures()
