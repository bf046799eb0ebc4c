"""Reads Python frames for messages: the user's line, and the object whose method runs."""

import functools
import gc
import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch

from . import _C

_NOT_THE_USERS = (
    *(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__)),
    "<frozen",
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


_reading = threading.Lock()  # one thread at a time pauses garbage collection
os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)


def stack_of(innermost: FrameType) -> list[FrameType]:
    """Returns a frame of this thread and its callers, innermost first."""
    return [frame for frame, _ in traceback.walk_stack(innermost)]


def stack_of_thread(ident: int) -> list[FrameType]:
    """Returns the frames that a thread runs, innermost first; none if it has ended.

    Garbage collection pauses meanwhile: Python 3.11 allocates an object for another thread's frame, and reads that
    frame afterwards. A collection in between may run a destructor that gives up the GIL, and the other thread may
    return from the frame.
    """
    with _reading:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            innermost = sys._current_frames().get(ident)
            return [] if innermost is None else stack_of(innermost)
        finally:
            if was_enabled:
                gc.enable()


def users_line(stack: list[FrameType]) -> str:
    """Returns the innermost line outside of torch, drivetrain and the standard library.

    It reads "gpt/train.py:88 in forward". Where there is no such line, it is the innermost one.
    """
    users = next((frame for frame in stack if _is_users(frame)), stack[0])
    return f"{_short(users.f_code.co_filename)}:{users.f_lineno} in {users.f_code.co_name}"


@functools.lru_cache(1024)
def _short(path: str) -> str:
    """Returns the file and its folder. The monitor asks several times a second, where a Path takes long."""
    return str(Path(*Path(path).parts[-2:]))


def place_of(thread: threading.Thread) -> str:
    """Returns the line that another thread runs, outside of the standard library; it reads "store.py:88 in close"."""
    stack = stack_of_thread(thread.ident or 0)
    if not stack:
        return "its end"
    inner = next((one for one in stack if not _is_in_standard_library(one.f_code.co_filename)), stack[0])
    return f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno} in {inner.f_code.co_name}"


def self_of(frame: FrameType) -> object:
    """Returns the object whose method the frame runs; None for a plain function."""
    code = frame.f_code
    if code.co_argcount == 0 or code.co_varnames[0] != "self":
        return None
    return _C.frame_self(frame)


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not (_is_in_standard_library(path) or path.startswith(_NOT_THE_USERS))


def _is_in_standard_library(path: str) -> bool:
    # The folders of pip's packages lie inside the standard library's.
    return path.startswith(_STANDARD_LIBRARY) and "-packages" not in path
