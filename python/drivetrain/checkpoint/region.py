"""`checkpoint`: calls a function now, and once more in backward instead of keeping what it saved."""

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

_torchs = _torch_checkpoint.checkpoint  # while the name means torch's
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
    """Calls `function(*args, **kwargs)` and keeps its arguments for backward instead of the tensors it saves; backward
    calls it again, up to the last tensor it needs. In place of `torch.utils.checkpoint.checkpoint`, for a fraction of
    its time on the host.

    Gradients have the bits that they have without it, dropout included: the second call draws the first one's random
    numbers, from torch's default generators of the CPU and of every device, runs under the same autocast and
    `torch.device` contexts, and leaves the generators as it found them. Regions may be nested, and every kind of
    backward may go through them: `torch.autograd.grad`, a retained graph, a part of it, `create_graph`, and one inside
    the function.

    What would give other gradients raises: saved tensors of other number, shape, dtype or device; an argument (in
    tuples, lists and dicts, too), a parameter or a buffer that was modified in place since. Lists and dicts among the
    arguments are given to the second call as the first found them.

    What the function does besides computing its result it does twice: BatchNorm in training updates its running
    statistics twice, as under torch's (gradients do not depend on them). Not seen are writes through `.data`, writes to
    tensors that are neither arguments nor saved themselves, and random numbers of Python, NumPy or a generator of your
    own: `verify=True` sees what comes of them.

    Args:
        function: Function or module to call. The backward pass calls it again.
        *args: Positional arguments of the function.
        **kwargs: Keyword arguments of the function.
        use_reentrant: None or False: this. True: torch's own reentrant variant is called instead.
        context_fn: other than the default (selective checkpointing): torch's own is called instead.
        determinism_check: "default" compares number, shape, dtype and device of what is recomputed, and looks for
            tensors that were modified since; "none" compares the number only.
        debug: True: torch's own, with its log of operations, is called instead.
        early_stop: whether the second call ends as soon as the last tensor it has to recompute is there.
            `torch.utils.checkpoint.set_checkpoint_early_stop` overrides it.
        preserve_rng_state: False saves 2.5 KB per region where the function draws no random numbers.
        verify: compare 64-bit hashes of the values of every saved tensor, and say in which module what differs was
            saved. Reads each twice; on a GPU each is copied to the host, for which that waits.

    Returns:
        What the function returns.

    Without grad mode it is a plain call. Under torch.compile it is torch's own, which the compiler knows; verify=True
    breaks the graph there instead.

    Raises:
        torch.utils.checkpoint.CheckpointError: in backward, and in forward if the function modified its own arguments
            in place: gradients would have been wrong. Says which tensor of which module, and why that usually happens.
        NotImplementedError: verify=True together with what torch's own is called for, or on tensor subclasses.
        ValueError: determinism_check is neither.
    """
    if torch.compiler.is_compiling() or use_reentrant or debug or context_fn is not noop_context_fn or _debug_is_on():
        if verify:
            raise NotImplementedError(
                "verify=True cannot be had with use_reentrant=True, context_fn, debug or inside a compiled graph"
            )
        options: dict[str, Any] = {} if context_fn is noop_context_fn else {"context_fn": context_fn}
        return _torchs(
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
    """The function under the innermost `with torch.device(...)`, or set_default_device(), that is in force now."""
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in reversed(modes):
        if isinstance(mode, DeviceContext):
            return functools.update_wrapper(functools.partial(_call_on, mode.device, function), function)
    return function


def _call_on(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with device:
        return function(*args, **kwargs)
