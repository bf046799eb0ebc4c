"""Reads the errors and host waits that the stand-in for CUDA has seen. It works only where the library is preloaded."""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def is_loaded() -> bool:
    """Returns whether the stand-in replaces libcudart in this process."""
    return "libcudart.so.13" in os.environ.get("LD_PRELOAD", "") and hasattr(ctypes.CDLL(None), "fake_cuda_num_errors")


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    for name in (
        "fake_cuda_num_errors",
        "fake_cuda_num_host_waits",
        "fake_cuda_pinned_bytes",
        "fake_cuda_peak_pinned_bytes",
    ):
        getattr(library, name).restype = ctypes.c_uint64
    library.fake_cuda_error_text.restype = ctypes.c_size_t
    library.fake_cuda_error_text.argtypes = (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)
    library.fake_cuda_record.argtypes = (ctypes.c_char_p,)
    library.fake_cuda_context_of.restype = ctypes.c_size_t
    library.fake_cuda_context_of.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    library.fake_cuda_seed.argtypes = (ctypes.c_uint64,)
    library.fake_cuda_set_delay.argtypes = (ctypes.c_uint64,)
    return library


def num_host_waits() -> int:
    """Returns the number of calls so far that waited for a stream, an event, a device or a copy."""
    return int(_library().fake_cuda_num_host_waits())


def num_errors() -> int:
    """Returns the number of races, host accesses and failed operations so far."""
    return int(_library().fake_cuda_num_errors())


def errors(since: int = 0) -> list[str]:
    """Returns the texts of the errors from number `since` on, oldest first."""
    return [_text(_library().fake_cuda_error_text, index) for index in range(since, num_errors())]


def context_of(device: int) -> str | None:
    """Returns which call of which thread made the device's context, with the thread's stacks; None if it has none."""
    if not _library().fake_cuda_context_of(device, None, 0):
        return None
    return _text(_library().fake_cuda_context_of, device)


def pinned_bytes() -> int:
    """Returns the bytes of host memory that are page-locked, in whole pages."""
    return int(_library().fake_cuda_pinned_bytes())


def peak_pinned_bytes() -> int:
    """Returns the most bytes that were page-locked since the last call."""
    return int(_library().fake_cuda_peak_pinned_bytes())


def _text(function: Callable[[int, ctypes.Array[ctypes.c_char] | None, int], int], index: int) -> str:
    text = ctypes.create_string_buffer(function(index, None, 0))
    function(index, text, len(text))
    return text.value.decode(errors="replace")


@dataclass(frozen=True)
class Ran:
    """Work that a stream ran: a kernel, a copy or a fill, and the bytes of device memory that it read and wrote."""

    name: str
    bytes_read: int
    bytes_written: int


@contextmanager
def recording() -> Iterator[list[Ran]]:
    """Yields a list that has, after the block, the work that all streams ran in it. Synchronizes before and after."""
    import torch

    found: list[Ran] = []
    with tempfile.NamedTemporaryFile() as file:
        torch.cuda.synchronize()
        _library().fake_cuda_record(os.fsencode(file.name))
        try:
            yield found
            torch.cuda.synchronize()
        finally:
            _library().fake_cuda_record(None)
        for line in Path(file.name).read_text().splitlines():
            name, bytes_read, bytes_written = line.split("\t")
            found.append(Ran(name, int(bytes_read), int(bytes_written)))


def seed(number: int) -> None:
    """Seeds all later delays and orders of streams."""
    _library().fake_cuda_seed(number)


def set_delay(microseconds: int) -> None:
    """Sets the longest delay of a stream's work, in microseconds."""
    _library().fake_cuda_set_delay(microseconds)
