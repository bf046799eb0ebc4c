"""Runs the first steps of a script in this process and records them; `drivetrain try` starts it for every rank."""

import gc
import json
import multiprocessing
import os
import pickle
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ..monitor.trainers import ScriptMonitor
from ..planner import writers
from ..planner.main_script import load_script
from ..planner.period import Enough
from ..planner.shadow import Shadow
from .budgeted import BudgetedCalls
from .record import ModuleCall, Print, RunRecord, Step, Variant

_END_S = 120.0  # the longest wait for the other ranks at the end
_MOST_NOTES = 12
_PLANNED_STEPS = 2


class StepRecorder:
    """Records each optimizer step of this process and ends the script after the last that is asked for.

    Args:
        task: "steps" are the calls of optimizers' `step`, after which `Enough` is raised. "prints" are also taken of
            gradients and parameters, which are not in the times, and of "calls": what modules take and return. "noise"
            is the relative size of a change that is made to each parameter before the first step; 0: none.
        end_of_planning: Is called once every model has been trained, as two models may have a step each.
    """

    def __init__(self, task: dict[str, Any], end_of_planning: Callable[[], None]) -> None:
        self.record = RunRecord()
        self._end_of_planning = end_of_planning
        self._num_steps, self._takes_prints, self._noise = task["steps"], task["prints"], task["noise"]
        self._signs = torch.empty(0)
        self._names: dict[int, str] = {}
        self._step = Step()
        self._calls: list[ModuleCall] | None = [] if task["calls"] else None
        self._module_names: dict[int, str] = {}
        self._begin = time.perf_counter()

    def begin(self) -> None:
        """Follows backward passes and optimizers from now on."""
        follow_losses(lambda losses: self._step.losses.extend(losses))
        if self._calls is not None:
            register_module_forward_pre_hook(lambda module, given: self._note_call("input", module, given))
            register_module_forward_hook(lambda module, _, result: self._note_call("output", module, result))
        enter = torch.autocast.__enter__

        def enter_autocast(context: torch.autocast) -> Any:
            self._note_dtypes([context.fast_dtype])
            return enter(context)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = enter_autocast  # type: ignore[method-assign]
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        self._begin = time.perf_counter()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _settle()
        self._step.seconds = time.perf_counter() - self._begin
        params = _params_of(optimizer)
        if len(self.record.steps) == min(_PLANNED_STEPS, self._num_steps - 1):
            self._end_of_planning()
        if not self.record.steps:
            self._note_dtypes(param.dtype for param in params)
            if self._noise:
                self._disturb(params)
        if self._calls is not None:
            self._step.calls, self._calls = self._calls, []
        if self._takes_prints:
            self._step.gradients = self._prints({name: param.grad for name, param in self._named(params).items()})
        self._begin = time.perf_counter()

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _settle()
        self._step.seconds += time.perf_counter() - self._begin
        if self._takes_prints:
            self._step.parameters = self._prints(dict(self._named(_params_of(optimizer))))
        self.record.steps.append(self._step)
        self._step = Step()
        if len(self.record.steps) == self._num_steps:
            raise Enough
        self._begin = time.perf_counter()

    def _note_call(self, what: str, module: nn.Module, values: Any) -> None:
        """Notes what a module in training takes or returns."""
        if self._calls is None or not module.training or not torch.is_grad_enabled():
            return
        if id(module) not in self._module_names:
            self._module_names = {id(one): name for name, one in _names_in_largest()}
        name = self._module_names.get(id(module), "")
        tensors = [one.detach() for one in tree_leaves(values) if isinstance(one, Tensor)]
        prints = [self._print(one) for one in tensors if one.layout is torch.strided]
        self._calls.append((f"{what} of {type(module).__name__} {name!r}".removesuffix(" ''"), prints))

    def _note_dtypes(self, dtypes: Iterable[torch.dtype]) -> None:
        for dtype in dtypes:
            if dtype.is_floating_point:
                self.record.resolution = max(self.record.resolution, torch.finfo(dtype).eps)

    def _named(self, params: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns parameters by their names in the script's largest module, without the names of wrappers."""
        if any(id(param) not in self._names for param in params):
            for name, module in _names_in_largest():
                for own, param in module.named_parameters(recurse=False):
                    self._names.setdefault(id(param), f"{name}.{own}" if name else own)
        return {self._names.get(id(param), f"parameter {index}"): param for index, param in enumerate(params)}

    def _prints(self, tensors: dict[str, Tensor | None]) -> dict[str, Print]:
        found = {}
        for name, tensor in tensors.items():
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[union-attr]
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.is_floating_point():
                found[name] = self._print(tensor.detach())
        return found

    @torch.no_grad()
    def _print(self, tensor: Tensor) -> Print:
        flat = tensor.reshape(-1).float()
        if self._signs.numel() < flat.numel() or self._signs.device != flat.device:
            generator = torch.Generator().manual_seed(1)  # the script's own generators stay as they are
            signs = torch.randint(0, 2, (flat.numel(),), generator=generator, dtype=torch.int8)
            self._signs = (2.0 * signs - 1.0).to(flat.device)
        return float(flat.norm()), float(flat @ self._signs[: flat.numel()])

    @torch.no_grad()
    def _disturb(self, params: Sequence[Tensor]) -> None:
        """Changes each parameter as rounding does, to see how much of it the script makes in the steps that follow."""
        generator = torch.Generator().manual_seed(2)
        for param in params:
            if param.is_floating_point() and param.layout is torch.strided and not hasattr(param, "to_local"):
                noise = torch.rand(param.shape, generator=generator).to(param.device) * 2.0 - 1.0
                factor = self._noise * torch.finfo(param.dtype).eps
                param.copy_(param.float() * (1.0 + factor * noise))


def _names_in_largest() -> Iterator[tuple[str, nn.Module]]:
    """Yields every module of this process by its name in the script's largest one, without names of wrappers."""
    seen: set[int] = set()
    modules = [one for one in gc.get_objects() if isinstance(one, nn.Module)]
    for largest in sorted(modules, key=lambda one: -sum(1 for _ in one.modules())):
        for name, module in largest.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield "" if name == "module" else name.removeprefix("module."), module


def follow_losses(note: Callable[[list[float]], None]) -> None:
    """Calls `note` with the losses of each backward pass from now on, before it."""
    plain = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        note([float(one.detach()) for one in given if one.numel() == 1])
        return plain(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _settle() -> None:
    """Waits for the device, so that times include the work and not its launch alone."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _seed(rank: int) -> None:
    """Seeds what a script may leave unseeded, by rank. torch itself begins at another seed in each process."""
    random.seed(rank)
    torch.manual_seed(rank)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(rank)


def _use(variant: Variant) -> None:
    """Puts drivetrain's classes in torch's places."""
    from .. import optim, swap

    swap.install(optim=variant.optim, **(variant.ddp or {}))
    for name in optim.__all__ if variant.formats else ():
        kind = getattr(optim, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            _give_formats(kind, variant.formats)


def _give_formats(kind: Any, formats: dict[str, int]) -> None:
    plain = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **(formats | kwargs if type(self) is kind else kwargs))

    kind.__init__ = init


def _network_bytes() -> int:
    """Returns the bytes that this host's interfaces have received."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines)


def _peak_bytes() -> int:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _without_ours(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(str(Path(__file__).parent))]
    return "".join([*traceback.format_list(theirs), *traceback.format_exception_only(error)])


def run_script(
    task: dict[str, Any],
    shadow: Shadow,
    begin: Callable[[], None],
    others: Mapping[str, Callable[[ModuleType], None]] | None = None,
) -> tuple[str, list[str]]:
    """Runs a script until `Enough`, so that it writes nothing. Calls `begin` before its first line.

    Args:
        task: "script", "arguments" and "folder", which is empty.
        shadow: Keeps the script from writing.
        others: Functions to call with modules that the script imports, by name.

    Returns:
        Why it ended before `Enough`, else "", and the warnings that it gave.
    """
    seen: dict[str, None] = {}
    _seed(int(os.environ.get("RANK", "0")))
    # A compiler is a program, and the script starts none. Uncompiled, both sides run the same operations.
    torch._dynamo.config.disable = True
    multiprocessing.util.get_temp_dir = lambda: task["folder"]  # for sockets of loaders' workers
    try:
        main_module, code = load_script(task["script"])
        sys.modules["__main__"] = main_module
        sys.argv = [task["script"], *task["arguments"]]
        shadow.begin()
        writers.begin(shadow, others or {})
        warnings.showwarning = lambda message, category, *_: seen.setdefault(f"{category.__name__}: {message}")
        begin()
        exec(code, main_module.__dict__)
        error = "the script ended"
    except Enough:
        error = ""
    except SystemExit as exit:
        error = f"the script exited with {exit.code!r}"
    except BaseException as failure:
        error = _without_ours(failure)
    return error, list(seen)


def leave(task: dict[str, Any], waits: bool) -> NoReturn:
    """Ends the process of a script, whose own end would write, print and wait.

    Args:
        task: Several ranks need the address "store" of a store, and the "key" of this run in it.
        waits: Waits until every rank is here.
    """
    for worker in multiprocessing.active_children():
        worker.terminate()
    if task["store"] and waits:  # a process that ends takes its connections with it
        host, port = task["store"]
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_END_S))
        store.set(f"{task['key']}/{os.environ['RANK']}", "")
        ranks = range(int(os.environ["WORLD_SIZE"]))
        store.wait([f"{task['key']}/{rank}" for rank in ranks], timedelta(seconds=_END_S))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(task: dict[str, Any]) -> NoReturn:
    """Runs a script as `task` says, writes the record and ends the process.

    Args:
        task: As for `run_script` and `leave`, and "variant", "steps", "prints", "calls", "noise" and the file "record".
    """
    variant = Variant(**task["variant"])
    budgeted = BudgetedCalls(variant.budget)
    recorder = StepRecorder(task, budgeted.end)
    record, shadow = recorder.record, Shadow(task["folder"], "a script under trial")
    before = _network_bytes()
    if variant.ddp is not None:
        _use(variant)
    monitor = None if task["prints"] else ScriptMonitor([], progress=False)

    def begin() -> None:
        recorder.begin()
        if variant.budget:
            budgeted.begin()
        if monitor is not None:
            monitor.start()

    record.error, seen = run_script(task, shadow, begin)
    if record.error.startswith("the script "):
        record.error += f" after {len(record.steps)} optimizer steps"
    with shadow.lifted():
        if monitor is not None:
            monitor.finish()
            summary = monitor.summary()
            record.phases = {name: seconds / max(summary.num_steps, 1) for name, seconds in summary.phase_s.items()}
        record.peak_bytes, record.network_bytes = _peak_bytes(), _network_bytes() - before
        record.plain_bytes = sum(plan.unplanned_bytes for plan in budgeted.plans)
        record.kept_bytes = sum(plan.peak_bytes for plan in budgeted.plans)
        record.warnings = [text.strip().splitlines()[0] for text in (*budgeted.failures, *seen)][:_MOST_NOTES]
        changes = [f"{what} {path}" for what, path, _ in shadow.overlay.changes()]
        changes += [f"start {program[:60]}" for program in dict.fromkeys(shadow.programs)]
        record.changes = changes[:_MOST_NOTES]
        if variant.ddp is not None:
            from ..ddp import defaults
            from ..optim import left_to_torch

            planned = [f"activation budget of {type(plan._model).__name__}" for plan in budgeted.plans]
            record.built = [*defaults.constructed, *left_to_torch.constructed, *planned]
        Path(task["record"]).write_bytes(pickle.dumps(record))
        leave(task, waits=not (record.error and len(record.steps) < task["steps"]))


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
