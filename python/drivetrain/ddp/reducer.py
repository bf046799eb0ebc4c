"""The reducer as torch's DistributedDataParallel calls it: the native one, plus what needs torch's Python objects."""

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _C
from . import transport as transports
from .watch import Watched, waiting

# The process's wrappers count from 1: on every rank the same, where all wrap the same models in the same order.
_wrappers = itertools.count(1)


def _are_held(tensors: list[torch.Tensor], params: Sequence[nn.Parameter]) -> bool:
    """Whether Python refers to any of these tensors, which the native reducer owns, beside this list and as the
    parameters' main gradients, which follow them."""
    owner = nn.Parameter(torch.empty(0))
    owner.grad = torch.empty(0)
    not_held = [owner.grad]  # how many references that makes depends on the version of torch
    main = {id(getattr(param, "main_grad", None)) for param in params}
    return any(
        sys.getrefcount(tensors[i]) > sys.getrefcount(not_held[0]) + (id(tensors[i]) in main)
        for i in range(len(tensors))
    )


def _tell(of: "weakref.ref[Reducer]", indices: list[int], is_last: bool) -> None:
    if (reducer := of()) is not None:
        reducer.tell(indices, is_last)


class Reducer(_C.Reducer):
    """Stands where torch's wrapper expects a `dist.Reducer`; see csrc/ddp/reducer.h for what it does.

    Args:
        params: the parameters that require a gradient, in registration order.
        names: theirs, for messages.
        process_group: the ranks to reduce over.
        comm: what carries gradients between them.
        transport: what was asked for, for when the group is replaced.
        wire_dtype: likewise.
        bucket_caps: bytes per bucket, in the expected order of buckets; the last repeats.
        sparse: per parameter, whether its gradient is sparse.
        find_unused_parameters: some parameters may get no gradient.
        skip_unused_buckets: do not reduce buckets that no parameter of which is used (on any rank: a promise).
        check_replicas_every: synchronised steps between two comparisons of the ranks' parameters; 0: never.
        frozen: the module's other parameters with their names; one that requires a gradient later raises.
        modules: all modules with their names, for messages.
        report_hang_after: seconds after which a wait for other ranks is reported; 0: never.
        shares_norm: the squares of gradients are added up in the reduction once an optimizer asks for their norm.
        gradients_stay_views: whatever refers to a gradient shows the parameter's next one, too.
        plan_from_measurement: choose the buckets' sizes anew once the first steps have been timed. Only for parameters
            on the CPU, none of them with sparse gradients.
    """

    def __init__(
        self,
        *,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        process_group: dist.ProcessGroup,
        comm: _C.Comm,
        transport: str,
        wire_dtype: torch.dtype | None,
        bucket_caps: Sequence[int],
        sparse: Sequence[bool],
        find_unused_parameters: bool,
        skip_unused_buckets: bool,
        check_replicas_every: int,
        frozen: Sequence[tuple[str, nn.Parameter]],
        modules: Sequence[tuple[str, nn.Module]],
        report_hang_after: float,
        shares_norm: bool,
        gradients_stay_views: bool,
        plan_from_measurement: bool,
    ) -> None:
        self._wrapper = f"DistributedDataParallel {next(_wrappers)} ({type(modules[0][1]).__name__})"
        super().__init__(
            params=params,
            names=names,
            comm=comm,
            bucket_caps=bucket_caps,
            sparse=sparse,
            find_unused_parameters=find_unused_parameters,
            skip_unused_buckets=skip_unused_buckets,
            check_replicas_every=check_replicas_every,
            frozen=frozen,
            shares_norm=shares_norm,
            plan_from_measurement=plan_from_measurement,
            wrapper=self._wrapper,
            gradients_stay_views=gradients_stay_views,
        )
        self.set_are_held(lambda tensors: _are_held(tensors, params))
        self._told_of_rebuilding = False
        self._params = params
        self._on_reduced: list[Callable[[list[nn.Parameter], bool], None]] = []
        self._process_group = process_group
        self._transport = transport
        self._wire_dtype = wire_dtype
        self._modules = modules
        self._report_hang_after = report_hang_after
        self._watch(comm)

    def add_on_reduced(self, call: Callable[[list[nn.Parameter], bool], None]) -> None:
        """`call` is given the parameters of each bucket once their `.grad` are reduced, inside backward where that can
        be; it may take these away. And whether the bucket is the backward's last. All ranks must do so together."""
        self._on_reduced.append(call)
        self.set_on_reduced(functools.partial(_tell, weakref.ref(self)))  # what native code holds, gc cannot see

    def remove_on_reduced(self, call: Callable[[list[nn.Parameter], bool], None]) -> None:
        """`call` hears of no more."""
        self._on_reduced.remove(call)
        if not self._on_reduced:
            self.set_on_reduced(None)

    @property
    def steps_in_backward(self) -> bool:
        """Whether somebody hears of reduced buckets."""
        return bool(self._on_reduced)

    def tell(self, indices: list[int], is_last: bool) -> None:
        """Of a bucket that is reduced."""
        for call in self._on_reduced:
            call([self._params[index] for index in indices], is_last)

    def _watch(self, comm: _C.Comm) -> None:
        self.watched: Watched | None = None
        if self._report_hang_after > 0 and dist.get_world_size(self._process_group) > 1:
            device = self._params[0].device
            # On the CPU, and over a communicator of our own, a collective with a rank that has ended fails by itself.
            hangs = device.type != "cpu" and comm.name == "torch"
            self.watched = Watched(
                self.progress(),
                self._process_group,
                self._modules,
                self._report_hang_after,
                self._wrapper,
                device if hangs else None,
            )
        self.set_ended_ranks(self.watched.ended_ranks if self.watched else str)

    def _rebuild_buckets(self) -> bool:
        """Whether that has happened since it was last asked: backward does it, so that no forward communicates."""
        told, self._told_of_rebuilding = self._told_of_rebuilding, self.has_rebuilt_buckets()
        return self._told_of_rebuilding and not told

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        device = self._params[0].device
        comm = transports.make_comm(self._transport, process_group, device, self._wire_dtype)
        self.set_comm(comm)
        self._watch(comm)

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError(
            "drivetrain's DistributedDataParallel does not support _set_sparse_metadata (sparse gradients over NCCL): "
            "use torch.nn.parallel.DistributedDataParallel for this model."
        )

    def _install_post_backward_futures(self, futures: Sequence["torch.futures.Future[Any]"]) -> None:
        for future in futures:
            self.add_end_callback(future.wait)

    # A hook that wants the plain sum.

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """bucket: a `dist.GradBucket`."""
        work = dist.all_reduce(bucket.buffer(), group=self._process_group, async_op=True)
        assert work is not None
        return work.get_future()

    # Uneven inputs: ranks that have run out shadow what the others do.

    def _set_forward_pass_work_handle(self, work: dist.Work, divide_by_initial_world_size: bool) -> None:
        """work: the all-reduce that counts the ranks which still have inputs."""
        with waiting(self.progress(), "the count of ranks that still have inputs"):
            work.wait()
        self.set_joining(0 if divide_by_initial_world_size else int(work.get_future().value()[0].item()))

    def _get_zeros_like_grad_buckets(self) -> list[int]:
        return list(range(len(self.buckets())))

    def _run_comm_hook(self, bucket: int, as_sum: bool = False) -> _C.PendingReduce:
        return self.reduce_zeros(bucket, as_sum)
