"""The reducer as torch's DistributedDataParallel calls it: the native one, and methods that need Python objects."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel.distributed import _find_tensors
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _C
from . import transport as transports
from .consistency import title_of
from .gather import is_foreign, weakly
from .hang_reports import DEFAULT_LIMIT_S, HangReporter, waiting
from .tag_board import show_collectives, show_connection

if TYPE_CHECKING:
    from .distributed import DistributedDataParallel

# Numbers this process's wrappers from 1. Ranks that wrap the same models in the same order give the same numbers.
_wrappers = itertools.count(1)


_reducers: set[weakref.ref[Reducer]] = set()  # not a WeakSet, which other threads may change while one reads it
_hooks: list[Any] = []  # on the steps of all optimizers, from the first reducer on


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for reference in list(_reducers):
        if (reducer := reference()) is not None and reducer.settle_between_backwards():
            reducer.warn_of_step(optimizer)


def _are_held(tensors: list[torch.Tensor], params: Sequence[nn.Parameter]) -> bool:
    """Returns True if Python refers to any of these tensors of the native reducer besides this list.

    References as a parameter's main gradient do not count, as these follow the reducer.
    """
    owner = nn.Parameter(torch.empty(0))
    owner.grad = torch.empty(0)
    not_held = [owner.grad]  # the number of references depends on the version of torch
    main = {id(getattr(param, "main_grad", None)) for param in params}
    return any(
        sys.getrefcount(tensors[i]) > sys.getrefcount(not_held[0]) + (id(tensors[i]) in main)
        for i in range(len(tensors))
    )


class Reducer(_C.Reducer):
    """Takes the place of a `dist.Reducer` in torch's wrapper; csrc/ddp/reducer.h describes it.

    Args:
        wrapper: Gives its process group, modules and options; copies from older versions lack some. It is not kept.
        params: The parameters that require a gradient, in registration order.
        names: Their names, for messages.
        sparse: Per parameter, True if its gradients are sparse.
        is_connected: Communicates now, to make the transport that carries gradients between them. False: it does so
            when the first gradient comes that is to be reduced.
        **options: Further options of the native reducer; csrc/ddp/reducer_state.h describes them.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        *,
        is_connected: bool,
        **options: Any,
    ) -> None:
        # Ranks do not make the others together, so that these have no number.
        number = f" {next(_wrappers)}" if is_connected else ""
        self.title = f"DistributedDataParallel{number} ({title_of(wrapper.module)})"
        self.params, self._names, self.sparse = params, names, sparse
        self.process_group, self.modules = wrapper.process_group, list(wrapper.module.named_modules())
        asked = wrapper.__dict__
        self.report_hang_after: float = asked.get("_report_hang_after", DEFAULT_LIMIT_S)
        self._transport, self._wire_dtype = wrapper._transport, asked.get("_wire_dtype")
        self._logical_ranks = asked.get("_logical_ranks")
        if is_connected:
            self.comm: _C.Comm = self._make_comm()
        else:
            self.comm = transports.unconnected_comm(self.process_group, params[0].device, self._wire_dtype)
        options |= {"logical_ranks": self._logical_ranks or 0, "wrapper": self.title}
        super().__init__(params=params, names=names, comm=self.comm, sparse=sparse, **options)
        self.set_are_held(lambda tensors: _are_held(tensors, params))
        self._rebuilding_is_known = False
        self._has_warned = False  # of steps between backward passes
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_any_step))
        _reducers.add(weakref.ref(self, _reducers.discard))
        self.is_sharded: bool = False  # states or gradients are divided among the ranks
        self._on_reduced: list[Callable[[list[nn.Parameter], bool], None]] = []
        self._is_connected = is_connected
        self.thread: int = threading.get_ident()  # which trains usually, as it builds the model
        self.hang_reporter: HangReporter | None = None
        if is_connected:
            self._report_hangs()
        else:
            self.set_connect(weakly(self, Reducer._connect))

    def add_on_reduced(self, call: Callable[[list[nn.Parameter], bool], None]) -> None:
        """Calls `call(params, is_last)` for each bucket once the `.grad` of its parameters are reduced.

        It runs inside backward where that is possible, and may take the gradients away. is_last is True for the last
        bucket of a backward. All ranks must call this together.
        """
        self._on_reduced.append(call)
        self.set_on_reduced(weakly(self, Reducer.tell))  # gc does not see references of native code

    def remove_on_reduced(self, call: Callable[[list[nn.Parameter], bool], None]) -> None:
        """Ends the calls of `call`."""
        self._on_reduced.remove(call)
        if not self._on_reduced:
            self.set_on_reduced(None)

    @property
    def steps_in_backward(self) -> bool:
        """True if something is called for reduced buckets."""
        return bool(self._on_reduced)

    def tell(self, indices: list[int], is_last: bool) -> None:
        """Passes a reduced bucket on to all that were added."""
        for call in self._on_reduced:
            call([self.params[index] for index in indices], is_last)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the reduced parameters with their names."""
        return list(zip(self._names, self.params, strict=True))

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> list[str]:
        """Ends a forward whose backward will synchronize. Returns parameters unfrozen since, of which it warns."""
        unfrozen = super().prepare_for_backward(outputs)
        if unfrozen and dist.get_world_size(self.process_group) > 1:
            warnings.warn(
                f"drivetrain: {', '.join(map(repr, unfrozen))} required no gradient when DistributedDataParallel "
                "wrapped the module, and does now. As under torch, each rank keeps its own gradient of it, so that the "
                "replicas will differ. Wrap the module again to reduce it.",
                RuntimeWarning,
                stacklevel=2,
            )
        return unfrozen

    def warn_of_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns once of an optimizer that steps parameters of this reducer whose gradients are not all reduced."""
        own = {id(param) for param in self.params}
        if self._has_warned or not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return
        self._has_warned = True
        warnings.warn(
            f"drivetrain: {type(optimizer).__name__} steps before backward has reached all parameters of {self.title}. "
            "Some of its gradients are means over ranks by now, and others are this rank's share of them, so that "
            "replicas will differ. Under torch they are all this rank's own. If the loss leaves parameters out, pass "
            "find_unused_parameters=True. If another backward pass follows, step after it, or use a wrapper for each "
            "part of the model that steps by itself.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _connect(self) -> str:
        """Connects a wrapper in its first backward. Returns "", or why this has failed. Every rank must call it."""
        try:
            show_connection(self.process_group, self.params[0].device)
            self._change_comm()
            self._is_connected = True
            transports.warn_of_fallback(self.comm, self.process_group)
        except Exception as error:
            return (
                "drivetrain: a copied or loaded DistributedDataParallel, or one with init_sync=False, first "
                "communicates in its first backward. This one has waited there for every other rank to run a backward "
                f"through its own, and has failed: {error}"
            )
        return ""

    def _make_comm(self) -> _C.Comm:
        group, device = self.process_group, self.params[0].device
        comm = transports.make_comm(self._transport, group, device, self._wire_dtype, self._logical_ranks)
        show_collectives(comm, group, device)
        return comm

    def _change_comm(self) -> None:
        comm = self._make_comm()
        self.set_comm(comm)
        self.comm = comm
        self._report_hangs()

    def _report_hangs(self) -> None:
        self.hang_reporter = None
        group = self.process_group
        if self.report_hang_after > 0 and group.size() > 1 and not is_foreign(group):
            self.hang_reporter = HangReporter(self)
        self.set_ended_ranks(self.hang_reporter.ended_ranks if self.hang_reporter else str)

    def _rebuild_buckets(self) -> bool:
        """Returns True once after a rebuild. Backward rebuilds, so that no forward communicates."""
        was_known, self._rebuilding_is_known = self._rebuilding_is_known, self.has_rebuilt_buckets()
        return self._rebuilding_is_known and not was_known

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        if self.is_sharded:
            raise NotImplementedError(
                "DistributedDataParallel with shard= cannot change its process group: the new ranks have no states. "
                "Save a checkpoint, and construct a new wrapper."
            )
        self.process_group = process_group
        if self._is_connected:
            self._change_comm()

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError(
            "drivetrain's DistributedDataParallel does not support _set_sparse_metadata (sparse gradients over NCCL): "
            "use torch.nn.parallel.DistributedDataParallel for this model."
        )

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        for future in futures:
            self.add_end_callback(future.wait)

    # torch's Python hooks call the following for the plain sum.

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """Sums a `dist.GradBucket` over ranks."""
        work = dist.all_reduce(bucket.buffer(), group=self.process_group, async_op=True)
        assert work is not None
        return work.get_future()

    # Uneven inputs: ranks that have run out of inputs take part in the others' collectives.

    def _set_forward_pass_work_handle(self, work: dist.Work, divide_by_initial_world_size: bool) -> None:
        """Waits for `work`, the all-reduce that counts the ranks which still have inputs."""
        with waiting(self.progress(), "the count of ranks that still have inputs"):
            work.wait()
        self.set_joining(0 if divide_by_initial_world_size else int(work.get_future().value()[0].item()))


@_disable_dynamo
def announce(reducer: Reducer, output: Any) -> None:
    """Marks the outputs by which the reducer recognizes a forward's backward."""
    reducer.announce(list(_find_tensors(output)))
