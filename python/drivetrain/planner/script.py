"""Plans an unedited training script: runs it with tensors that have no values, until its loop has repeated itself.

`measure_script` runs it with values, to measure its iterations on this machine.
"""

import contextlib
import copyreg
import multiprocessing.util
import os
import pickle
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from . import machines, writers
from .machines import TORCHDATA, BatchSize, load_in_process, taking_batch
from .main_script import load_script
from .options import formatted
from .period import Enough, Period
from .shadow import Shadow
from .trace import StepTrace
from .tracer import PlanError, Tracer

_WARM_UP = 3  # iterations of a measured script that do not count
_MEASURED, _MEASURED_S = 64, 5.0  # iterations and seconds after which the others suffice
_MOST_CHANGES = 20  # lines about what the script would have done


class ScriptError(RuntimeError):
    """A script has failed by itself. Its traceback has been printed."""


def trace_script(
    path: str, arguments: Sequence[str] = (), *, device_kind: str, batch: int | None = None, world_size: int = 1
) -> StepTrace:
    """Traces the first iterations of a script.

    The script runs in a fork of this process, on the CPU, and changes nothing: a `Shadow` takes what it writes. Large
    tensors, parameters among them, have no values, and names of CUDA devices mean the planned one. A process group, if
    it makes one, has one member that pretends to be rank 0 of `world_size`. `batch` is the batch size of every
    DataLoader; None keeps the script's.

    Raises:
        PlanError: The script ends before it has made two iterations, depends on values, or ends its process.
        ScriptError: The script cannot be compiled, or raises an error of its own.
        OSError: The script cannot be read.
    """
    trace: StepTrace = forked(path, lambda folder: _traced(path, arguments, folder, device_kind, batch, world_size))
    return trace


def measure_script(
    path: str, arguments: Sequence[str] = (), *, period: int, batch: int | None = None, seconds: float = 30.0
) -> float:
    """Returns the median seconds of a script's iteration, which includes its loaders and all that Python does.

    The script runs as for `trace_script`, but on the CPU's real values and with its own workers, and prints nothing. It
    is ended after `seconds`. An iteration has `period` calls of optimizers' `step`.

    Raises:
        PlanError: The script has made fewer than 4 iterations when it ends or the time is up, or ends its process.
        ScriptError: The script raises an error of its own.
        OSError: The script cannot be read.
    """
    found: float = forked(path, lambda folder: _measured(path, arguments, folder, period, batch, seconds), 2 * seconds)
    return found


def forked(path: str, work: Callable[[str], object], limit_s: float | None = None) -> Any:
    """Calls a function in a fork of this process, with a temporary folder, and returns or raises what it does."""
    folder = tempfile.mkdtemp(prefix="drivetrain-plan-")
    receiver, sender = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        os.register_at_fork(after_in_child=lambda: os.close(sender))  # workers must not keep it open
        _run_as_child(sender, lambda: work(folder))
    os.close(sender)
    try:
        if limit_s is not None and not select.select([receiver], [], [], limit_s)[0]:
            os.kill(child, signal.SIGKILL)
        with os.fdopen(receiver, "rb") as file:
            sent = file.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.rmtree(folder, ignore_errors=True)
    if not sent:
        how = f"was ended by signal {-status}" if status < 0 else f"has ended its process with exit code {status}"
        raise PlanError(f"{path} {how} before it could be planned: let it return from its loop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about the layout of arguments
        result = pickle.loads(sent)
    if isinstance(result, BaseException):
        raise result
    return result


def _run_as_child(sender: int, work: Callable[[], object]) -> None:
    """Sends the result or the error to the parent and ends this process, without what the script left for its end."""
    code = 1
    try:
        result: object
        try:
            result = work()
        except (PlanError, ScriptError, OSError) as error:
            result = error.with_traceback(None)
            result.__cause__ = result.__context__ = None
        with os.fdopen(sender, "wb") as file:
            for kind in (torch._ops.OpOverload, *torch._ops.OpOverload.__subclasses__()):
                copyreg.pickle(kind, lambda op: (_operation, (op._schema.name, op._overloadname)))
            pickle.dump(result, file, pickle.HIGHEST_PROTOCOL)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _operation(name: str, overload: str) -> Any:
    """Returns an operation of torch by its name, as it is pickled."""
    namespace, _, packet = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _traced(
    path: str, arguments: Sequence[str], folder: str, device_kind: str, batch: int | None, world_size: int
) -> StepTrace:
    tracer = Tracer(torch.device("cpu"), device_kind, is_script=True)
    period = Period(tracer.trace)
    size = BatchSize(batch)
    exit_code = None
    main, code = _loaded(path, arguments)
    tracer.begin_step()
    shadow = Shadow(folder)

    def stand_in_for_torchdata(module: Any) -> None:
        iterators = module._StatefulSingleProcessDataLoaderIter
        load_in_process(setattr, module.StatefulDataLoader, iterators, period, size)

    try:
        shadow.begin()
        writers.begin(shadow, {TORCHDATA: stand_in_for_torchdata})
        with machines.stand_ins(tracer.recorder, period, device_kind, size, world_size):
            hook = register_optimizer_step_post_hook(lambda optimizer, *_: period.step(optimizer))
            try:
                with tracer:
                    exec(code, main.__dict__)
            except Enough:
                pass
            except SystemExit as error:
                exit_code = error.code
            finally:
                hook.remove()
    except PlanError:
        raise
    except Exception as error:
        _print_traceback(error, path)
        raise ScriptError(f"{path} raised {type(error).__name__} after {period.num_steps} optimizer steps") from None
    if not period.cut():
        how = "ended" if exit_code in (None, 0) else f"exited with {exit_code!r}"
        advice = "let it run longer" if exit_code in (None, 0) else "see what it has printed"
        raise PlanError(
            f"{path} {how} after {period.num_steps} optimizer steps, and a plan needs 2, of each optimizer: {advice}"
        )
    with shadow.lifted():
        trace = tracer.finish()
        trace.changes = list(_described(shadow))
    if batch is not None and not size.is_taken:
        trace.notes.append(
            f"--batch {batch} changes nothing: the script has made no DataLoader that takes a batch size"
        )
    return trace


def _loaded(path: str, arguments: Sequence[str]) -> tuple[ModuleType, CodeType]:
    """Makes a script this process's main module, and returns it and its code."""
    try:
        main, code = load_script(path)
    except SyntaxError as error:
        _print_traceback(error, path)
        raise ScriptError(f"{path} cannot be compiled") from None
    sys.modules["__main__"] = main
    sys.argv = [path, *arguments]
    return main, code


def _measured(
    path: str, arguments: Sequence[str], folder: str, period: int, batch: int | None, seconds: float
) -> float:
    main, code = _loaded(path, arguments)
    ends: list[float] = []  # of the optimizers' steps

    def stepped(*_: object) -> None:
        ends.append(time.perf_counter())
        if len(ends) >= period * _MEASURED and ends[-1] - ends[0] >= _MEASURED_S:
            raise Enough

    def end(*_: object) -> None:
        raise Enough

    def give_batch(loader: Any) -> None:
        loader.__init__ = taking_batch(loader.__init__, BatchSize(batch))

    give_batch(DataLoader)
    others = {TORCHDATA: lambda module: give_batch(module.StatefulDataLoader)}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the plan is of the CPU
    register_optimizer_step_post_hook(stepped)
    multiprocessing.util.get_temp_dir = lambda: folder  # for sockets of loaders' workers
    shadow = Shadow(folder)
    with Path(os.devnull).open("w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        shadow.begin()
        writers.begin(shadow, others)
        exec(code, main.__dict__)
    except (Enough, SystemExit):
        pass
    except Exception as error:
        if len(ends) < period * _MEASURED:
            raise ScriptError(f"{path} raised {type(error).__name__} on real values: {error}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with shadow.lifted():
            for worker in multiprocessing.active_children():
                worker.terminate()
    whole = ends[_WARM_UP * period :]  # which begin with the end of an iteration
    times = [end - begin for begin, end in zip(whole, whole[period:], strict=False)]
    if not times:
        raise PlanError(
            f"{path} has made {len(ends)} optimizer steps in {seconds:g} s, too few to measure an iteration"
        )
    return statistics.median(times)


def _print_traceback(error: BaseException, script: str) -> None:
    """Prints an error of the script, from the script's first line on and without the frames of stand-ins."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != str(Path(script).absolute()):
        entry = entry.tb_next
    shown = traceback.TracebackException.from_exception(error.with_traceback(entry))
    ours = str(Path(__file__).parent)
    frames = [frame for frame in shown.stack if not frame.filename.startswith(ours)]
    shown.stack = traceback.StackSummary.from_list(frames)
    print("".join(shown.format()), end="", file=sys.stderr)


def _described(shadow: Shadow) -> Iterator[str]:
    """Yields lines about what the script would have done."""
    lines = []
    home = f"{Path.cwd()}{os.sep}"
    for what, path, size in shadow.overlay.changes():
        lines.append(f"{what} {path.removeprefix(home)}" + (f" ({formatted(size)})" if "write" in what else ""))
    lines += [f"start {' '.join(program.split())[:100]}" for program in dict.fromkeys(shadow.programs)]
    lines += [f"connect to {server}" for server in dict.fromkeys(shadow.servers)]
    yield from lines[:_MOST_CHANGES]
    if len(lines) > _MOST_CHANGES:
        yield f"and {len(lines) - _MOST_CHANGES} more"
