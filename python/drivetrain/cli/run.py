"""Implements `drivetrain run`: runs an unedited training script with drivetrain's classes under torch's names."""

from __future__ import annotations

import argparse
import ast
import atexit
import builtins
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from drivetrain import main_script, swap
from drivetrain.cli import children, report
from drivetrain.main_script import load_script, set_first_path

_OUR_FILES = {__file__, main_script.__file__}  # their frames are above the script's
_WORDS: dict[str, object] = {"true": True, "false": False, "none": None}
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `run`. All arguments after the script's name belong to the script."""
    parser.usage = (
        "drivetrain run [-h] [--optim] [--ddp NAME=VALUE]... [--monitor] [--monitor-to SINK]... [-m] script.py "
        "[ARGUMENT]..."
    )
    parser.add_argument("--optim", action="store_true", help="replace torch's optimizers too")
    parser.add_argument(
        "--ddp",
        metavar="NAME=VALUE",
        type=_ddp_default,
        action="append",
        default=[],
        help="default of a DistributedDataParallel argument that the script does not pass; may be repeated",
    )
    parser.add_argument("--monitor", action="store_true", help="show where the time of each step goes")
    parser.add_argument(
        "--monitor-to",
        metavar="SINK",
        action="append",
        default=[],
        help="with --monitor: a sink such as jsonl:run.jsonl; may be repeated",
    )
    parser.add_argument("-m", dest="as_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("script", help="path of the script, or name of the module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the script, passed unchanged")


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
        if args.monitor or args.monitor_to:
            from drivetrain.monitor.trainers import ScriptMonitor

            monitor = ScriptMonitor(args.monitor_to)
            monitor.start()
    except (OSError, ImportError, TypeError, ValueError) as error:
        print(f"drivetrain run: {error}", file=sys.stderr)
        return 2
    children.follow(args.optim, ddp_defaults)
    spec = main_module.__spec__
    main = ["-m", spec.name] if spec else [str(Path(args.script).absolute())]
    children.follow_reruns(main, args.optim, ddp_defaults)
    atexit.register(report.at_exit, args.optim, os.getpid())
    sys.argv = [args.script if main_module.__spec__ is None else str(main_module.__file__), *args.arguments]
    _become(main_module)
    try:
        exec(code, main_module.__dict__)
    except BaseException as error:
        if monitor is not None:
            monitor.fail(error)
        raise
    return 0


def _ddp_default(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    if value.lower() in _WORDS:
        return name, _WORDS[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """Builds the `__main__` module of `python -m name`, and loads its code."""
    set_first_path(str(Path.cwd()))
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
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
