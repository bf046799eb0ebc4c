"""Shares optimizer states and gradients among ranks: the part of DistributedDataParallel behind `shard`."""

import functools
import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C
from ..grad import main_grads
from ..optim.sharded import pieces
from ..optim.sharded.dtensors import is_dtensor
from ..optim.sharded.gathers import Gathers, OnStreams, Pending, finish, watch
from . import transport as transports
from .gather import backend_for, gather_objects, is_foreign, on_device
from .kept_rows import KeptRows
from .state_server import Request, StateServer, Steps

if TYPE_CHECKING:
    from .reducer import Reducer

CHOICES = (None, "optimizer", "gradients")
_ALIGNMENT = 64  # bytes, of each parameter's memory
_BUCKET_BYTES = 25 * 2**20

_Range = tuple[int, int, list[int]]  # where it begins and ends, and the ranks that it belongs to


def check(shard: str | None, shard_group: Any, others: dict[str, Any]) -> None:
    """Checks the arguments `shard` and `shard_group` of DistributedDataParallel.

    Args:
        shard: The argument.
        shard_group: The argument.
        others: Further arguments that were given, by name.

    Raises:
        ValueError: `shard` is none of `CHOICES`, or `shard_group` is given without it.
        NotImplementedError: Another argument does not go together with `shard`.
    """
    if shard not in CHOICES:
        raise ValueError(f"shard is {shard!r}, expected one of: {', '.join(map(repr, CHOICES))}.")
    if shard is None:
        for name in ("shard_group", "overlap_gather"):
            if others.get(name):
                raise ValueError(f"{name} is given and shard is None: pass shard='optimizer' or 'gradients' as well.")
        return
    if shard_group is not None and not isinstance(shard_group, dist.ProcessGroup):
        raise ValueError(
            f"shard_group is {shard_group!r}, expected the process group of this rank, from dist.new_group()."
        )
    refused = ["mixed_precision", "delay_all_reduce_named_params"]
    if shard == "gradients":
        refused += ["static_graph", "find_unused_parameters", "check_gradients"]
    for name in refused:
        if others.get(name):
            instead = " or pass shard='optimizer'" if shard == "gradients" and refused.index(name) > 1 else ""
            raise NotImplementedError(
                f"{name} does not go together with shard={shard!r}: leave one of the two out{instead}."
            )


def refuse(wrapper: Any, what: str) -> None:
    """Raises NotImplementedError if ranks keep parts of gradients, which `what` needs whole."""
    if wrapper.__dict__.get("_shard") == "gradients":
        raise NotImplementedError(
            f"{what} does not go together with shard='gradients', where no rank has whole gradients: pass "
            "shard='optimizer'."
        )


def keeps_rows(wrapper: Any) -> bool:
    """Returns whether ranks keep their rows of gradients only, for a wrapper whose process group is known."""
    if wrapper.__dict__.get("_shard") != "gradients":
        return False
    return dist.get_world_size(wrapper.__dict__.get("_shard_group") or wrapper.process_group) > 1


def rows_of(wrapper: Any) -> KeptRows | None:
    """Returns what adds up this rank's rows of every backward's gradients; None: backwards collect all rows."""
    return None if wrapper._sharding is None or wrapper._logical_ranks else wrapper._sharding.rows


@contextmanager
def weighted(wrapper: Any, weight: float) -> Iterator[None]:
    """Surrounds a backward whose loss was multiplied with this rank's weight."""
    if (rows := rows_of(wrapper)) is not None:
        with rows.weighted(weight, ends=wrapper._asks_for_sync):
            yield
        return
    wrapper.reducer.begin_weighted(weight)
    failed = True
    try:
        yield
        failed = False
    finally:
        wrapper.reducer.end_weighted(failed)
    sharding = wrapper._sharding
    if sharding is not None and sharding.rows is not None and wrapper._asks_for_sync:
        sharding.rows.divide(weight)


def of(wrapper: Any, *, overlaps: bool) -> "Sharding | None":
    """Returns what divides the states of a new wrapper's parameters; None without `shard`, or on one rank.

    Raises:
        NotImplementedError: The wrapper reduces past its reducer, or has sparse gradients.
        ValueError: This rank is not in `shard_group`, or that has ranks outside of the wrapper's group. Also if it has
            one rank here and several elsewhere, with "gradients".
    """
    shard, shard_group = wrapper._shard, wrapper._shard_group
    if shard is not None and (is_foreign(wrapper.process_group) or is_foreign(shard_group)):
        raise NotImplementedError(
            "shard= is for process groups of torch.distributed, and this one is a script's own: leave shard= out."
        )
    group = wrapper.process_group
    if shard_group is not None:
        group, ranks = shard_group, dist.get_process_group_ranks(shard_group)
        if outside := set(ranks) - set(dist.get_process_group_ranks(wrapper.process_group)):
            raise ValueError(f"shard_group has the ranks {ranks}, of which process_group lacks {sorted(outside)}.")
    places = [(rank, dist.get_world_size(group)) for rank in range(dist.get_world_size(group))]
    if shard == "gradients" and shard_group is not None:
        with on_device(wrapper.device):
            places = gather_objects((dist.get_rank(group), dist.get_world_size(group)), wrapper.process_group)
        sizes = [size for _, size in places]
        if min(sizes) == 1 < max(sizes):
            raise ValueError(
                f"shard_group has the single rank {sizes.index(1)}, and {max(sizes)} ranks elsewhere: expected groups "
                "of at least two ranks, or of one everywhere."
            )
    if shard is None or dist.get_world_size(group) == 1:
        wrapper._shard = None
        return None
    if not wrapper._has_reducer() or wrapper._use_python_reducer:
        raise NotImplementedError(
            "shard= does not go together with torch._dynamo.config.optimize_ddp = 'python_reducer', nor with "
            "parameters that are all delayed or ignored: leave one of the two out."
        )
    for (name, _), is_sparse in zip(wrapper.reducer.named_parameters(), wrapper.reducer.sparse, strict=True):
        if is_sparse:
            raise NotImplementedError(
                f"parameter {name!r} gets sparse gradients, which shard= does not support: construct its layer with "
                "sparse=False, or leave shard= out."
            )
    return Sharding(wrapper, places, overlaps)


class _Bucket(NamedTuple):
    """Parameters that are gathered together.

    Attributes:
        flat: Their memory, uint8.
        ranges: The range of bytes of each rank, for transports that gather in place.
        views: The bytes of every rank in it, one view per parameter.
        bytes: The most bytes that a rank has in it.
    """

    flat: Tensor
    ranges: _C.RankRanges
    views: list[list[Tensor]]
    bytes: int


class _GroupGather:
    """Gathers through a process group, by way of a copy of one bucket."""

    def __init__(self, bucket: _Bucket, group: dist.ProcessGroup, rank: int) -> None:
        self._bucket, self._rank = bucket, rank
        self._sent = torch.zeros(bucket.bytes, dtype=torch.uint8)
        own = bucket.views[rank]
        torch.cat(own, out=self._sent[: sum(map(len, own))])
        self._received = torch.empty(len(bucket.views), bucket.bytes, dtype=torch.uint8)
        self._work: Any = dist.all_gather_into_tensor(self._received.view(-1), self._sent, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        targets, sources = [], []
        for rank, theirs in enumerate(self._bucket.views):
            if rank == self._rank:
                continue
            targets += theirs
            sources += self._received[rank, : sum(map(len, theirs))].split([len(target) for target in theirs])
        torch._foreach_copy_(targets, sources)

    def is_done(self) -> bool:
        return True  # after a wait


class Sharding:
    """Divides the rows of every parameter among ranks, as torch's DTensors with Shard(0) do.

    Each rank steps its own rows. The parameters' memory comes from the transport, in buckets. After a step the ranks
    gather the buckets that it changed: before `step()` returns, or until the first use of a bucket that gathers.py
    sees.

    Args:
        wrapper: The DistributedDataParallel, with its reducer. Its parameters get other memory.
        places: For every rank of the wrapper, its number in the group that shares states, and this group's size.
        overlaps: Uses of the module await gathers; False: they end in `step()`.

    Attributes:
        steps: Counts the steps that write states.
        states: Asks the other ranks for their rows of states.
        place_of: The numbers of parameters in its requests, by id.
        gathers: The gathers in progress.

    Raises:
        NotImplementedError: A parameter cannot be divided, or its gradients cannot be kept in parts. Also if CUDA
            parameters are on several devices, or on one for which the group has another backend than NCCL.
    """

    def __init__(self, wrapper: Any, places: Sequence[tuple[int, int]], overlaps: bool) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        from ..optim.sharded.rows import refuse_files

        reducer: Reducer = wrapper.reducer
        named = reducer.named_parameters()
        for name, param in named:
            _check_param(name, param)
        group = wrapper._shard_group or wrapper.process_group
        self._device = named[0][1].device
        _check_devices(named, group)
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._comm = reducer.comm
        if wrapper._shard_group is not None:
            self._comm = transports.make_comm(wrapper._transport, group, self._device)
        self._mesh = DeviceMesh.from_group(group, self._device.type)
        refuse_files(self._mesh)
        self._params = [param for _, param in named]
        self.place_of: dict[int, int] = {id(param): place for place, param in enumerate(self._params)}
        # Logical ranks need norms with equal bits on any number of ranks.
        self.has_whole_norms = wrapper._logical_ranks is not None
        self.steps: Steps = Steps()
        read = functools.partial(_rows_of_state, weakref.ref(self))
        self.states: StateServer = StateServer(group, self._device, self.steps, read)
        self._bucket_of: dict[int, int] = {}
        self._buckets: list[_Bucket] = []
        self._lay_out(named)
        self.gathers: Gathers = Gathers(self._bucket_of)
        self._overlaps = overlaps
        if overlaps:
            ends = watch(wrapper.module, self.gathers)
            self._finish = weakref.finalize(self, finish, self.gathers, ends)
        reducer.is_sharded = True
        self.rows: KeptRows | None = None
        if wrapper._shard == "gradients":
            main_grads.leave_to_rows(self._params)
            reducer.set_kept([_owners(param, places) for param in self._params])
            has_copies = any(places.count(place) > 1 for place in places)
            if has_copies and reducer.comm.name == "torch" and self._device.type == "cpu":
                reducer.comm.set_returning(transports.twin_of(wrapper.process_group, "return").group_name)
            self.rows = KeptRows(reducer)

    def __reduce__(self) -> Any:
        raise TypeError("DistributedDataParallel(shard=...) cannot be copied or pickled: copy its `module`.")

    def gather(self, params: Iterable[Tensor]) -> None:
        """Gets the other ranks' rows of these parameters after a step. Every rank must call it."""
        stepped = list(params)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "a CUDA graph cannot capture a step of parameters of DistributedDataParallel(shard=...): keep "
                "optimizer.step() out of the graph."
            )
        self.gathers.wait()
        for index in sorted({self._bucket_of[id(param)] for param in stepped}):
            if not self._buckets[index].bytes:
                continue  # scalars, which every rank steps
            self.gathers.begin(index, functools.partial(self._start, self._buckets[index]))
        if not self._overlaps:
            self.gathers.end()
        torch.autograd.graph.increment_version(stepped)  # the others keep their values

    def _start(self, bucket: _Bucket) -> Pending:
        work = self._comm.start_gather(bucket.flat.view(torch.int32), bucket.ranges)
        if work is None:
            return _GroupGather(bucket, self._group, self._rank)
        return OnStreams(work, self._device) if self._device.type == "cuda" else work

    def _lay_out(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Moves the parameters to buckets of the transport's memory, and divides them."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        plans: list[list[tuple[str, nn.Parameter, int]]] = []
        sizes: list[int] = []
        for name, param in named:
            if not plans or sizes[-1] >= _BUCKET_BYTES:
                plans.append([])
                sizes.append(0)
            plans[-1].append((name, param, sizes[-1]))
            sizes[-1] += -(-param.nbytes // _ALIGNMENT) * _ALIGNMENT
        for plan, size in zip(plans, sizes, strict=True):
            if self._device.type == "cuda":  # torch's memory, as NCCL rounds each of its own allocations far up
                flat = torch.zeros(max(size, _ALIGNMENT), dtype=torch.uint8, device=self._device)
            else:
                flat = self._comm.allocate(max(size, _ALIGNMENT), "cpu")
            ranges: list[_Range] = []
            views: list[list[Tensor]] = [[] for _ in range(self._size)]
            for name, param, offset in plan:
                moved = _C.piece_of(flat, offset, param.shape, param.stride(), param.dtype)
                moved.copy_(param.detach())
                param.data = moved
                own: Tensor = param.detach()
                placement: Any = Replicate()
                rows = (0, 0)
                if param.ndim:
                    row_bytes = param.nbytes // max(param.shape[0], 1)
                    for rank in range(self._size):
                        first, last = _rows(param, rank, self._size)
                        if last > first:
                            begin, end = offset + first * row_bytes, offset + last * row_bytes
                            ranges.append((begin, end, [rank]))
                            views[rank].append(flat[begin:end])
                    placement, rows = Shard(0), _rows(param, self._rank, self._size)
                    own = own[rows[0] : rows[1]]
                form: Any = {"shape": param.shape, "stride": param.stride()}
                part = DTensor.from_local(own, self._mesh, [placement], run_check=False, **form)
                pieces.add(param, pieces.Piece(name, param, part, rows, self))
                self._bucket_of[id(param)] = len(self._buckets)
            most = max(sum(map(len, theirs)) for theirs in views)
            self._buckets.append(_Bucket(flat, _C.RankRanges(ranges), views, most))


def _rows_of_state(of_sharding: "weakref.ref[Sharding]", request: Request) -> Tensor:
    """Returns this rank's rows of a state that another rank asks for."""
    sharding = of_sharding()
    if sharding is None:
        raise RuntimeError("its wrapper was deleted")
    optimizer = sharding.steps.optimizer(request.optimizer)
    return pieces.rows_of_state(optimizer, sharding._params[request.param], request.name)


def _rows(param: Tensor, rank: int, size: int) -> tuple[int, int]:
    """Returns a rank's first row of a parameter and the one behind its last."""
    count = param.shape[0]
    per_rank = -(-count // size)
    return min(rank * per_rank, count), min((rank + 1) * per_rank, count)


def _owners(param: Tensor, places: Sequence[tuple[int, int]]) -> list[_Range]:
    """Returns which of a parameter's elements belong to which ranks.

    Where rows belong to several ranks, each of these comes first for an equal part of them, which it sums.

    Args:
        param: The parameter.
        places: As in `Sharding`.
    """
    if not param.ndim or not param.numel():
        return []
    per_row = param.numel() // param.shape[0]
    changes: defaultdict[int, list[int]] = defaultdict(list)  # the ranks whose rows begin or end, by element
    for rank, place in enumerate(places):
        for row in _rows(param, *place):
            changes[row * per_row].append(rank)
    found: list[_Range] = []
    active: set[int] = set()
    for begin, end in itertools.pairwise(sorted(changes)):
        for rank in changes[begin]:
            active ^= {rank}
        owners = sorted(active)
        parts = [begin + (end - begin) * part // len(owners) for part in range(len(owners) + 1)]
        for first, (start, stop) in enumerate(itertools.pairwise(parts)):
            if start < stop:
                found.append((start, stop, owners[first:] + owners[:first]))
    return found


def _check_param(name: str, param: Tensor) -> None:
    if is_dtensor(param):
        raise NotImplementedError(f"parameter {name!r} is a DTensor, which is sharded already: leave shard= out.")
    if param.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"parameter {name!r} is on {param.device}, and shard= is for the CPU and for CUDA devices: leave it out."
        )
    if param.ndim and not param[:1].numel() == 0 and not _has_rows_in_order(param):
        raise NotImplementedError(
            f"parameter {name!r} has strides {param.stride()}, whose rows do not lie one behind another: make it "
            "contiguous before wrapping, or leave shard= out."
        )
    if pieces.piece_of(param) is not None:
        gc.collect()  # the wrapper may be part of a cycle that nothing refers to
    if pieces.piece_of(param) is not None:
        raise RuntimeError(
            f"parameter {name!r} is sharded by another DistributedDataParallel, which something still refers "
            "to: delete it before its module is wrapped again."
        )


def _check_devices(named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
    first, device = named[0][0], named[0][1].device
    for name, param in named:
        if param.device != device:
            raise NotImplementedError(
                f"parameter {name!r} is on {param.device} and {first!r} on {device}, and shard= is for one device per "
                "rank: leave it out."
            )
    if device.type == "cuda" and (backend := backend_for(group, device)) != "nccl":
        raise NotImplementedError(
            f"parameter {first!r} is on {device}, for which the process group's backend is {backend!r}. shard= "
            "needs 'nccl' there: pass it to init_process_group(), or leave shard= out."
        )


def _has_rows_in_order(param: Tensor) -> bool:
    """Returns whether each row is a block of memory of its own, directly behind the one before."""
    row = param[0]
    return param.stride(0) == row.numel() and torch.empty_like(row).stride() == row.stride()
