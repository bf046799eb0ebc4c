"""Drives torch's own memory budget for the compiled regions of a model by the bytes that they save for backward."""

import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .. import _C
from . import plan, progress, table

if TYPE_CHECKING:
    from .trace import Trace

_MAX_RECOMPILATIONS = 5
_NEAR = 0.95  # share of the allowed bytes from which another compilation is not worth its time
_FINEST = 0.02  # smallest step of the ratio


class HigherRatio(NamedTuple):
    """A higher ratio, and the number of regions, from the first on, that have it."""

    ratio: float
    num_regions: int


class CompiledRegions:
    """The outermost compiled parts of a model: modules that torch.compile returned, and modules whose `compile()` was
    called or whose `forward` is compiled.

    From construction to `remove()`, operations inside of the regions are not recorded. The bytes that a region saves
    count, and torch's partitioner decides which these are. `install(ratio)` recompiles the regions with
    `torch._functorch.config.activation_memory_budget` at that ratio. The setting is in force only while these regions
    are compiled, including later recompilations. `remove()` restores the original compiled functions.

    Attributes:
        ratio: the ratio in force; None: the regions are as they were found.
        higher: a higher ratio and the number of regions, from the first on, that have it; None: all have `ratio`.
        measured: the bytes that the regions saved for backward, by the ratio that was tried.
        saved_bytes: the bytes that the regions save now; None before they were measured.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ratio: float | None = None
        self.higher: HigherRatio | None = None
        self.saved_bytes: int | None = None
        self.measured: dict[float, int] = {}
        self._regions: list[_Region] = []
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes a second
            self._regions = [_Region(module, attribute) for module, attribute in _find(model)]
        for region in self._regions:
            region.attach()

    def __len__(self) -> int:
        return len(self._regions)

    def __enter__(self) -> "CompiledRegions":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # planning failed
            self.remove()

    def __str__(self) -> str:
        """Describes the ratios in force and the saved bytes."""
        saved = "" if self.saved_bytes is None else f"; they save {table.size(self.saved_bytes)} for backward"
        regions = "1 compiled region" if len(self) == 1 else f"{len(self)} compiled regions"
        if self.ratio is None:
            return f"{regions}, as they were found{saved}"
        ratios = f"{self.ratio:g}"
        if self.higher is not None:
            ratios = f"{self.higher.ratio:g} for the first {self.higher.num_regions} and {self.ratio:g} for the others"
        if self.measured:
            saved += f" ({table.size(max(self.measured.values()))} without a budget)"
        return f"{regions}, compiled at torch's activation_memory_budget {ratios}{saved}"

    def install(self, ratio: float | None, higher: HigherRatio | None = None) -> None:
        """Compiles the regions at the ratio from their next call on.

        Args:
            ratio: The memory budget of torch's partitioner, from 0 to 1; None: restore what was found.
            higher: Another ratio and the number of regions, from the first on, to compile with it.
        """
        self.ratio, self.higher = ratio, higher
        scope = _new_scope()
        for index, region in enumerate(self._regions):
            region.set_ratio(higher.ratio if higher is not None and index < higher.num_regions else ratio, scope)
        _drop_compiled(lambda backend: not backend.is_in_use)

    def remove(self) -> None:
        """Restores the calls of the model. Safe to call twice."""
        self.install(None)
        for region in self._regions:
            region.detach()
        self._regions = []

    def fit(
        self, trace: "Trace", peak_bytes: int, budget_bytes: int, profile: Callable[[], "tuple[Trace, int]"]
    ) -> "Trace":
        """Finds the largest ratio at which the regions' bytes fit by bisection, and leaves it in force.

        The regions get the same share of the budget that they have of the bytes without a budget. If no tried ratio
        fits that share, they get what the rest of the model leaves when it recomputes as much as possible. The bytes
        change with the ratio in large steps. Therefore, if there are several regions, as many as fit get the next
        higher tried ratio.

        Args:
            trace: The trace of a step with the regions as they were found.
            peak_bytes: The peak of that step.
            budget_bytes: The budget for the whole model.
            profile: Runs the step with everything kept. Called at most 6 times, with one recompilation each.

        Returns:
            The trace of the step at the chosen ratio.

        Raises:
            ValueError: No ratio makes the budget possible. The message names the smallest possible budget.
        """
        if not self._regions or budget_bytes >= peak_bytes:
            return trace
        from torch._functorch import config

        high, low = float(config.activation_memory_budget), 0.0
        own_bytes = _unseen_bytes(trace)
        if own_bytes == 0:
            return trace
        self.measured = {high: own_bytes}
        share_bytes = math.floor(budget_bytes * own_bytes / max(peak_bytes, own_bytes))
        smallest_bytes = plan.choose(trace, budget_bytes).smallest_bytes
        fitting: dict[float, Trace] = {}
        possible: dict[float, Trace] = {high: trace} if smallest_bytes <= budget_bytes else {}
        ratio = round(high * share_bytes / own_bytes, 4)
        with progress.showing():
            for count in range(1, _MAX_RECOMPILATIONS + 1):
                progress.tell(f"compiles at memory budget {ratio:.3f} ({count} of at most {_MAX_RECOMPILATIONS})")
                self.install(ratio)
                tried, _ = profile()
                self.measured[ratio] = own_bytes = _unseen_bytes(tried)
                smallest = plan.choose(tried, budget_bytes).smallest_bytes
                smallest_bytes = min(smallest_bytes, smallest)
                if smallest <= budget_bytes:
                    possible[ratio] = tried
                if ratio in possible and own_bytes <= share_bytes:
                    fitting[ratio] = tried
                    low = ratio
                else:
                    high = ratio
                if (fitting and own_bytes <= share_bytes and own_bytes >= _NEAR * share_bytes) or ratio == 0.0:
                    break
                is_last = count == _MAX_RECOMPILATIONS - 1
                ratio = 0.0 if not fitting and (is_last or high < 2 * _FINEST) else round((low + high) / 2, 4)
                if high - low < _FINEST and fitting:
                    break
        found = fitting or possible
        if not found:
            self.install(None)
            raise ValueError(
                f"budget is {table.size(budget_bytes)}: the smallest that is possible with this step is "
                f"{table.size(smallest_bytes)} ({table.size(peak_bytes)} without a budget); its compiled regions save "
                + ", ".join(
                    f"{table.size(num_bytes)} at {tried:.3f}" for tried, num_bytes in sorted(self.measured.items())
                )
            )
        best = max(found)
        if best in fitting:
            mixed = self._fit_mixed(best, share_bytes, budget_bytes, profile)
            if mixed is not None:
                return mixed
        self.saved_bytes = self.measured[best]
        if best != self.ratio or self.higher is not None:
            self.install(best if found[best] is not trace else None)
        return found[best]

    def _fit_mixed(
        self, ratio: float, share_bytes: int, budget_bytes: int, profile: Callable[[], "tuple[Trace, int]"]
    ) -> "Trace | None":
        """Compiles as many regions as fit at the next higher tried ratio, and returns the trace of the step.

        Estimates the number of regions as if all saved the same bytes, then measures. Returns None if that does not
        fit, or would not gain enough."""
        if self.measured[ratio] >= _NEAR * share_bytes:
            return None
        above = min(tried for tried in self.measured if tried > ratio)
        bytes_per_region = (self.measured[above] - self.measured[ratio]) / len(self._regions)
        count = int((share_bytes - self.measured[ratio]) / max(bytes_per_region, 1.0))
        if not 0 < count < len(self._regions):
            return None
        with progress.showing():
            progress.tell(f"compiles {count} regions at memory budget {above:.3f}, others at {ratio:.3f}")
            self.install(ratio, HigherRatio(above, count))
            mixed, _ = profile()
        saved_bytes = _unseen_bytes(mixed)
        if saved_bytes > share_bytes or plan.choose(mixed, budget_bytes).smallest_bytes > budget_bytes:
            return None
        self.saved_bytes = saved_bytes
        return mixed

    def to_dict(self) -> dict[str, Any]:
        measured = [list(pair) for pair in sorted(self.measured.items())]
        return {
            "ratio": self.ratio,
            "higher": None if self.higher is None else list(self.higher),
            "saved_bytes": self.saved_bytes,
            "measured": measured,
        }

    @classmethod
    def restored(cls, model: nn.Module, plain: dict[str, Any] | None) -> "CompiledRegions":
        """Finds the regions of a model, and puts the result of `to_dict` in force.

        Raises:
            ValueError: The result has a ratio for compiled regions, and the model has none.
        """
        regions = cls(model)
        if plain is not None and plain["ratio"] is not None:
            if not regions:
                raise ValueError(
                    "plan was made for a model with compiled regions, and this model has none: compile the model "
                    "before it gets the plan"
                )
            regions.measured = dict(plain["measured"])
            regions.saved_bytes = plain.get("saved_bytes")
            higher = plain.get("higher")
            regions.install(plain["ratio"], None if higher is None else HigherRatio(*higher))
        return regions


class _Region:
    """Replaces a compiled callable, and disables the recorder inside of it."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = module
        self._attribute = attribute
        self._found = getattr(module, attribute)
        self._compiled = self._found
        self._backend: _Backend | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._found(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_recorders_key()):
            return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._found, memo)

    def attach(self) -> None:
        setattr(self._module, self._attribute, self)

    def detach(self) -> None:
        if getattr(self._module, self._attribute, None) is self:
            setattr(self._module, self._attribute, self._found)

    def set_ratio(self, ratio: float | None, scope: int | None) -> None:
        if self._backend is not None:
            self._backend.is_in_use = False
        self._compiled, self._backend = (
            (self._found, None) if ratio is None else _compiled_at(self._found, ratio, scope)
        )


class _Backend:
    """A compiler backend at a memory ratio. Dynamo takes it for another backend, so that earlier code does not match.

    Instances for equal backends and ratios are equal, so that a block that occurs many times is still compiled once."""

    def __init__(self, backend: Any, ratio: float) -> None:
        functools.update_wrapper(self, backend, assigned=("__name__", "__doc__"))
        # Dynamo would unwrap the backend through these. A __getattr__ would not do: dynamo looks attributes up while it
        # compiles a frame, and would then try to compile the frame of __getattr__.
        for name in ("_torchdynamo_orig_backend", "__wrapped__"):
            self.__dict__.pop(name, None)
        self._inner = backend
        self._ratio = ratio
        self.is_in_use = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._functorch import config

        with config.patch(activation_memory_budget=self._ratio):  # read by the partitioner, which runs inside
            return self._inner(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._ratio)

    def _key(self) -> tuple[Any, float, bool]:
        inner = self._inner
        while hasattr(inner, "_torchdynamo_orig_backend"):
            inner = inner._torchdynamo_orig_backend
        return inner, self._ratio, self.is_in_use


def regions_inside(model: nn.Module) -> set[nn.Module]:
    """Returns the modules whose calls are compiled. Hooks on these would be compiled, too."""
    inside: set[nn.Module] = set()
    if "torch._dynamo" in sys.modules:
        for module, attribute in _find(model):
            modules = set(module.modules())
            inside |= modules if attribute == "_compiled_call_impl" else modules - {module}
    return inside


def anything_is_compiled() -> bool:
    """Returns whether dynamo has compiled a function of this process that is still alive."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo import convert_frame

    return any(weak() is not None for weak in convert_frame.output_codes.seen)


def _find(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if _compiled_call_of(module) is not None:
        yield module, "_compiled_call_impl"
    elif _is_compiled(module.__dict__.get("forward")):  # includes modules that torch.compile returned
        yield module, "forward"
    else:
        for child in module.children():
            yield from _find(child)


def _compiled_call_of(module: nn.Module) -> Any:
    """Returns the compiled call that `module.compile()` made, unwrapped from the recorder; None if there is none."""
    found = getattr(module, "_compiled_call_impl", None)
    while isinstance(found, _C.ActivationCall):
        found = found.inner
    return found


def _is_compiled(function: Any) -> bool:
    return isinstance(function, _Region) or (
        hasattr(function, "_torchdynamo_orig_callable") and _context_of(function) is not None
    )


def _context_of(compiled: Any) -> Any:
    """Returns the context object of torch.compile, which the compiled function closes over; None if there is none."""
    code = getattr(compiled, "__code__", None)
    cells = dict(zip(code.co_freevars, compiled.__closure__ or (), strict=True)) if code is not None else {}
    context = cells["self"].cell_contents if "self" in cells else None
    return context if callable(getattr(context, "callback", None)) else None


def _new_scope() -> int | None:
    """Returns the id of a new part of dynamo's caches with its own recompilation limit; None: torch has none."""
    if "torch._dynamo" not in sys.modules:
        return None
    from torch._dynamo import eval_frame

    counter = getattr(eval_frame, "_next_isolate_recompiles_id", None)
    return None if counter is None else next(counter)


def _compiled_at(compiled: Any, ratio: float, scope: int | None) -> tuple[Any, _Backend]:
    """Compiles a function again, with the same options and backend, at a memory ratio."""
    context = copy.copy(_context_of(compiled))
    if scope is not None:
        is_alone = getattr(context, "_isolate_recompiles_id", -1) >= 0
        context._isolate_recompiles_id = _new_scope() if is_alone else scope
    callback = context.callback
    convert = callback._torchdynamo_orig_backend
    backend = _Backend(convert._torchdynamo_orig_backend, ratio)
    context.callback = type(callback)(convert._clone_with_backend(backend), callback.hooks)
    return context(compiled._torchdynamo_orig_callable), backend


def _drop_compiled(is_obsolete: Callable[[_Backend], bool]) -> None:
    """Removes the code of such backends from dynamo's caches. If torch does not divide its caches, this removes all
    compiled versions of the same function, and they still count for the recompilation limit."""
    if "torch._dynamo" not in sys.modules:
        return
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import convert_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    has_scopes = _new_scope() is not None
    codes = [weak() for weak in [*convert_frame.input_codes.seen, *convert_frame.output_codes.seen]]
    for code in codes:
        if code is None:
            continue
        for entry in _debug_get_cache_entry_list(code):
            if not isinstance(entry.backend, _Backend) or not is_obsolete(entry.backend):
                continue
            if not has_scopes:
                reset_code(code)
                break
            manager = entry.guard_manager
            if not isinstance(manager, DeletedGuardManagerWrapper) and manager.extra_state is not None:
                manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("another memory budget is in force"))


def _unseen_bytes(trace: "Trace") -> int:
    """Sums the saved values that no recorded operation made: those of compiled regions, and the inputs of the step."""
    saved = {use.value for use in trace.uses}
    total = 0
    for begin, one in trace.passes_at():
        made = one.made
        total += sum(v.num_bytes for i, v in enumerate(one.values) if begin + i in saved and i not in made)
    return total


def _recorders_key() -> Any:
    key = torch._C._parse_dispatch_key(_C.activation_recorder_key())
    assert key is not None, "every torch has it"
    return torch._C.DispatchKeySet(key)
