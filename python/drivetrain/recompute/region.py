"""Defines `checkpoint`, which calls a function again in backward instead of keeping its saved tensors."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as _torch_checkpoint
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import noop_context_fn

from .. import _C

_torchs_checkpoint = _torch_checkpoint.checkpoint  # read before drivetrain may replace it
_DETERMINISM_CHECKS = ("default", "none")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    verify: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)` and keeps its arguments for backward instead of its saved tensors.

    Backward calls the function again, up to the last tensor that it needs. Replaces
    `torch.utils.checkpoint.checkpoint`, for a fraction of its time on the host.

    Gradients are bitwise equal to those without checkpointing, including dropout. The second call draws the same random
    numbers from torch's default generators of the CPU and of every device. It runs under the same autocast and
    `torch.device` contexts, and restores the generators afterwards. Calls may be nested. Every kind of backward is
    supported: `torch.autograd.grad`, a retained graph, a part of the graph, `create_graph`, and a backward inside of
    the function.

    Raises if gradients would differ. This is the case if the second call saves tensors of other number, shape, dtype or
    device. It is also the case if an argument, a parameter or a buffer was modified in place in between. Arguments in
    tuples, lists and dicts count. The second call receives lists and dicts as the first call found them.

    Side effects of the function happen twice. BatchNorm in training mode updates its running statistics twice, as with
    torch's checkpoint; gradients do not depend on them. Writes through `.data`, and writes to tensors that are neither
    arguments nor saved, are not detected. Nor are random numbers of Python, NumPy or your own generators. Pass
    `verify=True` to detect their effect on saved tensors.

    Args:
        function: Function or module to call. The backward pass calls it again.
        *args: Positional arguments of the function.
        **kwargs: Keyword arguments of the function.
        use_reentrant: True calls torch's own reentrant variant instead.
        context_fn: A function other than the default (selective checkpointing) calls torch's own variant instead.
        determinism_check: "default" compares number, shape, dtype and device of the recomputed tensors, and raises if
            tensors were modified in place in between. "none" compares the number only.
        debug: True calls torch's own variant instead, which logs operations.
        early_stop: End the second call as soon as the last needed tensor is recomputed.
            `torch.utils.checkpoint.set_checkpoint_early_stop` overrides it.
        preserve_rng_state: False saves 2.5 KB per call, for functions that draw no random numbers.
        verify: Compare 64-bit hashes of the values of every saved tensor, and name the module that saved a differing
            one. Reads each tensor twice. Tensors on a GPU are copied to the host, which waits for the copies.

    Returns:
        The result of the function.

    Without grad mode, this is a plain call. Under torch.compile it calls torch's own variant, which the compiler
    supports; verify=True breaks the graph there instead.

    Raises:
        torch.utils.checkpoint.CheckpointError: Gradients would be wrong. Raised in backward, or in forward if the
            function modified its own arguments in place. Names the tensor, the module and the usual cause.
        NotImplementedError: verify=True is combined with an option that calls torch's own variant, or a saved tensor is
            a subclass.
        ValueError: determinism_check is neither "default" nor "none".
    """
    if torch.compiler.is_compiling() or use_reentrant or debug or context_fn is not noop_context_fn or _debug_is_on():
        if verify:
            raise NotImplementedError(
                "verify=True is not supported with use_reentrant=True, context_fn, debug or inside a compiled graph: "
                "leave these out, or pass verify=False"
            )
        options: dict[str, Any] = {} if context_fn is noop_context_fn else {"context_fn": context_fn}
        return _torchs_checkpoint(
            function,
            *args,
            use_reentrant=bool(use_reentrant),
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            preserve_rng_state=preserve_rng_state,
            **options,
            **kwargs,
        )
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check is {determinism_check!r}, expected one of {_DETERMINISM_CHECKS}")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch._C._len_torch_function_stack():
        function = _under_its_device(function)
    global_early_stop = _torch_checkpoint._enable_checkpoint_early_stop
    if global_early_stop is not None:
        early_stop = global_early_stop
    return _C.checkpoint(function, args, kwargs, preserve_rng_state, early_stop, determinism_check == "default", verify)


def _debug_is_on() -> bool:
    return bool(_torch_checkpoint._checkpoint_debug_enabled)


def _under_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function in the innermost `with torch.device(...)`, or set_default_device(), that is in force now."""
    modes: list[object] = _get_current_function_mode_stack()
    for mode in reversed(modes):
        if isinstance(mode, DeviceContext):
            return functools.update_wrapper(functools.partial(_call_on, mode.device, function), function)
    return function


def _call_on(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with device:
        return function(*args, **kwargs)
