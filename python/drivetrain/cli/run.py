"""Implements `drivetrain run`: runs an unedited training script with drivetrain's classes under torch's names."""

from __future__ import annotations

import argparse
import atexit
import builtins
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from drivetrain import swap
from drivetrain.cli import children
from drivetrain.planner import main_script
from drivetrain.planner.main_script import load_script, set_first_path

_OUR_FILES = {__file__, main_script.__file__}  # their frames are above the script's
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _PackageError(Exception):
    """Wraps an error of the script's own package, which runs before its module is found."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def run(args: argparse.Namespace) -> int:
    """Runs the script like `python script.py arguments` and reports the swapped names at exit.

    Returns:
        0 if the script ends without `sys.exit`; 2 if the script or a default of `--ddp` does not exist.

    Raises:
        BaseException: The exception of the script. Its traceback begins at the script's first line.
    """
    ddp_defaults, monitor = dict(args.ddp), None
    sys.excepthook = _without_our_frames(sys.excepthook)
    try:
        swap.install(optim=args.optim, **ddp_defaults)
        main_module, code = _module(args.script) if args.as_module else load_script(args.script)
        if args.with_monitor or args.monitor_to:
            from drivetrain.monitor.trainers import ScriptMonitor

            monitor = ScriptMonitor(args.monitor_to)
            monitor.start()
    except _PackageError as found:
        raise found.error from None
    except (OSError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        print(f"drivetrain run: {error}", file=sys.stderr)
        return 2
    children.follow()
    spec = main_module.__spec__
    main = ["-m", spec.name] if spec else [str(Path(args.script).absolute())]
    children.follow_reruns(main, args.optim, ddp_defaults)
    atexit.register(children.at_exit, args.optim, os.getpid())
    _name_options_of_the_script(args)
    sys.argv = [args.script if main_module.__spec__ is None else str(main_module.__file__), *args.arguments]
    _become(main_module)
    try:
        exec(code, main_module.__dict__)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            atexit.unregister(children.at_exit)  # the error stays the last thing on the screen
        if monitor is not None:
            monitor.fail(error)
        raise
    return 0


def _name_options_of_the_script(args: argparse.Namespace) -> None:
    """Says which options of `run` stand after the script's name and are therefore the script's."""
    after = [word.partition("=")[0] for word in args.arguments]
    found = [name for name in ("--optim", "--ddp", "--with-monitor", "--monitor-to") if name in after]
    if found and children.speaks_for_the_job():
        names = " and ".join(found)
        print(
            f"drivetrain run: passed {names} to {args.script}. For drivetrain, write it before the script.",
            file=sys.stderr,
        )


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """Builds the `__main__` module of `python -m name`, and loads its code."""
    set_first_path(str(Path.cwd()))
    spec = None
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise _PackageError(error) from error
    loader = spec and spec.loader
    code = loader.get_code(spec.name) if spec and isinstance(loader, SourceFileLoader) else None
    if spec is None or code is None:
        raise ImportError(f"module '{name}' was not found or has no Python source to run as a script")
    module = ModuleType("__main__")
    module.__dict__.update(__file__=spec.origin, __loader__=loader, __package__=spec.parent)
    module.__dict__.update(__cached__=spec.cached, __spec__=spec)
    return module, code


def _become(main_module: ModuleType) -> None:
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    if "__mp_main__" in sys.modules:  # multiprocessing's alias for the main module
        sys.modules["__mp_main__"] = main_module


def _without_our_frames(hook: _Hook) -> _Hook:
    """Wraps an exception hook so that it removes the frames above the script's first frame from tracebacks."""

    def strip(error: BaseException) -> None:
        last_of_ours, entry = None, error.__traceback__
        while entry is not None:
            if entry.tb_frame.f_code.co_filename in _OUR_FILES:
                last_of_ours = entry
            entry = entry.tb_next
        if last_of_ours is not None:
            error.__traceback__ = last_of_ours.tb_next

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> object:
        strip(error)
        return hook(kind, error, error.__traceback__)

    return show
