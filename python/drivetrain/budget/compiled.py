"""Finds what torch.compile has compiled in a model, and compiles it again at another memory budget of torch's."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import _C


class Region:
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
    """Returns the modules whose calls are compiled. Hooks on these would be compiled as well."""
    inside: set[nn.Module] = set()
    if "torch._dynamo" in sys.modules:
        for module, attribute in find(model):
            modules = set(module.modules())
            inside |= modules if attribute == "_compiled_call_impl" else modules - {module}
    return inside


def anything_is_compiled() -> bool:
    """Returns whether dynamo has compiled a function of this process that is still alive."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo import convert_frame

    return any(weak() is not None for weak in convert_frame.output_codes.seen)


def find(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    call = getattr(module, "_compiled_call_impl", None)  # what `module.compile()` made, perhaps inside of the recorder
    while isinstance(call, _C.ActivationCall):
        call = call.inner
    forward = module.__dict__.get("forward")  # compiled in modules that torch.compile returned, too
    is_torchs = hasattr(forward, "_torchdynamo_orig_callable") and _context_of(forward) is not None
    if call is not None:
        yield module, "_compiled_call_impl"
    elif is_torchs or isinstance(forward, Region):
        yield module, "forward"
    else:
        for child in module.children():
            yield from find(child)


def _context_of(compiled: Any) -> Any:
    """Returns the context object of torch.compile, which the compiled function closes over; None if there is none."""
    code = getattr(compiled, "__code__", None)
    cells = dict(zip(code.co_freevars, compiled.__closure__ or (), strict=True)) if code is not None else {}
    context = cells["self"].cell_contents if "self" in cells else None
    return context if callable(getattr(context, "callback", None)) else None


def new_scope() -> int | None:
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
        context._isolate_recompiles_id = new_scope() if is_alone else scope
    callback = context.callback
    convert = callback._torchdynamo_orig_backend
    backend = _Backend(convert._torchdynamo_orig_backend, ratio)
    context.callback = type(callback)(convert._clone_with_backend(backend), callback.hooks)
    return context(compiled._torchdynamo_orig_callable), backend


def drop_compiled(is_obsolete: Callable[[_Backend], bool]) -> None:
    """Removes the code of such backends from dynamo's caches. If torch does not divide its caches, this removes all
    compiled versions of the same function, and they still count for the recompilation limit."""
    if "torch._dynamo" not in sys.modules:
        return
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import convert_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    has_scopes = new_scope() is not None
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


def _recorders_key() -> Any:
    key = torch._C._parse_dispatch_key(_C.activation_recorder_key())
    assert key is not None, "every torch has it"
    return torch._C.DispatchKeySet(key)
