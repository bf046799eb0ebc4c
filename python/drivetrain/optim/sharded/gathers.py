"""Awaits the gathers of parameters that a step has begun, each at the first use of its bucket that can be seen."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo


class Pending(Protocol):
    """A gather in progress."""

    def wait(self) -> None:
        """Returns once the other ranks' rows are there; on CUDA, for later work of the current stream."""

    def is_done(self) -> bool:
        """Returns whether uses need not wait any more, after a wait."""


class OnStreams:
    """A gather on CUDA, for which each stream that uses its rows waits. The host waits for none.

    Args:
        work: The transport's gather.
        device: Its device.
    """

    def __init__(self, work: Pending, device: torch.device) -> None:
        self._work, self._device = work, device
        self._waited: set[int] = set()  # streams

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream in self._waited:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph captures a use of parameters that ranks still gather: call wait_for_parameters() before "
                "the capture."
            )
        self._work.wait()
        self._waited.add(stream.cuda_stream)

    def is_done(self) -> bool:
        return not torch.cuda.is_current_stream_capturing() and self._work.is_done()


class Gathers:
    """The gathers that a step has begun and no caller has awaited.

    Args:
        bucket_of: The bucket of each parameter, by id. It may grow.
    """

    def __init__(self, bucket_of: dict[int, int]) -> None:
        self._bucket_of = bucket_of
        self.pending: dict[int, Pending] = {}  # by bucket, in the order of their begin
        self._mutex = threading.RLock()  # a transport takes one call at a time

    def begin(self, bucket: int, start: Callable[[], Pending]) -> None:
        """Begins the gather of a bucket."""
        with self._mutex:
            self.pending[bucket] = start()

    @_disable_dynamo
    def wait(self) -> None:
        """Waits for all gathers."""
        for bucket in list(self.pending):
            self._wait_for(bucket)

    def end(self) -> None:
        """Waits for all gathers. On CUDA only the current stream does, and no other one from then on."""
        self.wait()
        self.pending.clear()

    @_disable_dynamo
    def wait_for(self, params: Iterable[Tensor | None]) -> None:
        """Waits for the gathers of these parameters."""
        for bucket in sorted({self._bucket_of.get(id(param), -1) for param in params}):
            self._wait_for(bucket)

    def _wait_for(self, bucket: int) -> None:
        with self._mutex:
            if (pending := self.pending.get(bucket)) is not None:
                pending.wait()  # after an error the rows are still missing
                if pending.is_done():
                    del self.pending[bucket]


class _Watched(dict[str, nn.Parameter | None]):
    """A module's parameters by name, which waits for their gathers before it gives them away.

    nn.Module finds attributes, parameters(), state_dict() and copies in it.
    """

    def __init__(self, params: dict[str, nn.Parameter | None], gathers: Sequence[Gathers]) -> None:
        super().__init__(params)
        self.gathers = gathers  # of all optimizers or wrappers that watch the module

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        for gathers in self.gathers:
            if gathers.pending:
                gathers.wait_for([param])
        return param

    def _wait(self) -> None:
        for gathers in self.gathers:
            if gathers.pending:
                gathers.wait_for(super().values())

    def __iter__(self) -> Iterator[str]:  # dict(), ** and | then take values from __getitem__
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        self._wait()
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._wait()
        return super().pop(name, *default)

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        self._wait()
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self._wait()
        return super().items()

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __reduce_ex__(self, _: Any) -> Any:  # copies and files of the module have a plain dict
        return dict, (self.copy(),)


def finish(gathers: Gathers, ends: Iterable[Callable[[], None]]) -> None:
    """Waits for the remaining gathers, as other ranks may still copy this rank's rows, and calls `ends`.

    A failure of the gathers is a warning.
    """
    try:
        gathers.wait()
        for end in ends:
            end()
    except RuntimeError as error:
        warnings.warn(f"drivetrain: parameters of a deleted wrapper were not gathered: {error}", stacklevel=2)


def watch(module: nn.Module, gathers: Gathers) -> list[Callable[[], None]]:
    """Makes the module's parts wait for gathers when something takes a parameter from them, or calls them.

    The call matters for modules that keep references, as nn.LSTM does.

    Returns:
        Calls that take the watches off again.
    """
    ends: list[Callable[[], None]] = []
    for part in module.modules():
        if part._parameters:
            _watch_for(part, [*_gathers_of(part), gathers])
            ends.append(part.register_forward_pre_hook(_Call(gathers)).remove)
            ends.append(functools.partial(_unwatch, weakref.ref(part), gathers))
    return ends


def _unwatch(of: weakref.ref[nn.Module], gathers: Gathers) -> None:
    if (part := of()) is not None and gathers in (known := _gathers_of(part)):
        _watch_for(part, [one for one in known if one is not gathers])


def _gathers_of(part: nn.Module) -> Sequence[Gathers]:
    return part._parameters.gathers if isinstance(part._parameters, _Watched) else ()


def _watch_for(part: nn.Module, gathers: Sequence[Gathers]) -> None:
    params = part._parameters.copy()
    part.__dict__["_parameters"] = _Watched(params, gathers) if gathers else params


class _Call:
    """Waits for the gathers of a module's own parameters before its forward."""

    def __init__(self, gathers: Gathers | None) -> None:
        self._of = None if gathers is None else weakref.ref(gathers)

    def __call__(self, part: nn.Module, _: Any) -> None:
        gathers = None if self._of is None else self._of()
        if gathers is not None and gathers.pending:
            gathers.wait_for(dict[str, Any].values(part._parameters))

    def __reduce_ex__(self, _: Any) -> Any:  # copies and files of the module have nothing to wait for
        return _Call, (None,)
