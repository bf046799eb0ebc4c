"""Keeps this rank's rows of reduced gradients, and adds up rows of several backwards, weighted or not."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C
from ..optim.sharded import pieces
from ..optim.sharded.dtensors import is_dtensor, local_part, rows_of
from .gather import weakly

if TYPE_CHECKING:
    from .reducer import Reducer

_UNCOUNTED = (
    "backward(loss, weight=...) found gradients that no weight counts: from an earlier synchronized backward, from a "
    "backward without weight, or from one that raised. They are dropped on all ranks. Call optimizer.zero_grad() first."
)
_UNWEIGHTED = (
    "this backward has no weight, but the gradients that it adds to were given with backward(loss, weight=...). Give "
    "every backward of an accumulation a weight, or call optimizer.zero_grad() first."
)

Seen = tuple[weakref.ref[Tensor], int] | None  # a gradient and its version


class KeptRows:
    """The gradients of which each rank keeps its rows: `.grad` is a DTensor over them.

    Every backward reduces; with logical ranks a window's last one. The rows of its result are added to the kept ones.
    After weighted backwards under no_sync() these are sums, which the next one outside of it divides by the sum of all
    weights.

    On CUDA the host waits for no device. An error that only the device can find is raised in a later backward.

    Args:
        reducer: The reducer. Each of its parameters has a piece.
    """

    def __init__(self, reducer: "Reducer") -> None:
        params = reducer.params
        self._params = [weakref.ref(param) for param in params]
        self._reducer = weakref.ref(reducer)
        self._process_group = reducer.process_group
        self._device = params[0].device
        # The weight of the kept sums, over ranks; float64 [1] on CUDA. None: no weight counts the kept rows.
        self._weight: float | Tensor | None = None
        self._own_weight = 0.0  # this rank's part of it
        self._is_weighted = False  # the current backward has a weight
        self._seen: list[Seen] = [None] * len(params)  # the gradients after the last weighted backward
        # Native code refers to these calls, and gc does not see that.
        reducer.set_put_aside(weakly(self, KeptRows._put_all_aside))
        reducer.add_on_reduced(_keep)
        for index, param in enumerate(params):
            handle = param.register_hook(weakly(self, KeptRows._put_aside, index))
            weakref.finalize(self, handle.remove)  # the parameter outlives its wrapper

    # ---- Rows of one backward.

    def _put_aside(self, index: int, *_: Any) -> None:
        """Takes the kept rows out of `.grad` before autograd adds a gradient of all rows."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "a CUDA graph cannot capture a backward of DistributedDataParallel(shard='gradients'): pass "
                "shard='optimizer', or keep backward out of the graph."
            )
        if self._weight is not None and not self._is_weighted:
            self._check_unweighted()
        param = self._params[index]()
        piece = None if param is None else pieces.piece_of(param)
        if param is None or piece is None:
            return
        if param.grad is None:
            piece.kept = None
        elif is_dtensor(param.grad):
            piece.kept = local_part(param.grad)
            param.grad = None

    def _put_all_aside(self) -> None:
        for index in range(len(self._params)):
            self._put_aside(index)

    # ---- Weights.

    @contextmanager
    def weighted(self, weight: float, ends: bool) -> Iterator[None]:
        """Surrounds a backward whose loss was multiplied with this rank's weight.

        Args:
            weight: The weight.
            ends: The kept rows become means over everything that weights count.

        Raises:
            ValueError: `.grad` holds gradients that no weight counts, or all weights sum to 0. Every rank raises, and
                drops its gradients.
        """
        reducer = self._reducer()
        assert reducer is not None
        is_untouched = self._weight is not None and self._are_untouched()
        self._is_weighted = True
        failed = True
        if not is_untouched:
            self._own_weight = 0.0
        self._own_weight += weight
        try:
            reducer.begin_weighted(weight, is_untouched or self._are_any_nonzero())
            try:
                yield
                failed = False
            finally:
                reducer.end_weighted(failed)
        except BaseException:
            self._weight = None
            raise
        finally:
            self._is_weighted = False
        self._take_total(reducer, ends)
        self._seen = self._see()

    def divide(self, weight: float) -> None:
        """Divides the rows that a weighted backward has reduced by the ranks' weights. Nothing was kept before it.

        weight: a part of this rank's weight.
        """
        reducer = self._reducer()
        assert reducer is not None
        self._own_weight = weight
        self._take_total(reducer, ends=True)

    def _take_total(self, reducer: "Reducer", ends: bool) -> None:
        total = reducer.weighted_total()
        if isinstance(total, Tensor):
            self._count_on_device(reducer, total, ends)
        else:
            self._count(*total, ends)

    def _count(self, weight: float, holding: float, ends: bool) -> None:
        """Counts a backward. weight: over ranks; holding: the number of ranks that had gradients to add to."""
        if holding > 0 and self._weight is None:
            self._drop()
            raise ValueError(_UNCOUNTED)
        self._weight = weight + (self._weight or 0.0 if holding > 0 else 0.0)
        if ends:
            total, self._weight = self._weight, None
            if not total > 0:
                self._fail_without_weight(float(total))
            with torch.no_grad():
                for grad in self._grads():
                    local_part(grad).mul_(1.0 / total)

    def _count_on_device(self, reducer: "Reducer", sums: Tensor, ends: bool) -> None:
        """Counts a backward of which only the device knows the weight and the number of ranks: sums, float64 [2]."""
        weight, holding = sums.split(1)
        if self._weight is None:
            reducer.note_found(holding, by_weighted=True)
        else:
            weight = weight + torch.where(holding > 0, self._weight, 0.0)
        self._weight = weight
        if not ends:
            return
        self._weight = None
        if not self._own_weight > 0 and not weight.item() > 0:  # only a rank without weight need wait
            self._fail_without_weight(weight.item())
        factor = weight.reciprocal()
        with torch.no_grad():
            for grad in self._grads():
                _C.scale_by(local_part(grad), factor)

    def _fail_without_weight(self, total: float) -> None:
        self._drop()
        raise ValueError(
            f"the weights given to backward(loss, weight=...) sum to {total} over all ranks, expected a sum above 0."
        )

    def restore(self, weight: float) -> None:
        """Gives gradients that were put into `.grad` the sum of all ranks' weights. Every rank must call it."""
        total = torch.tensor([weight], dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._process_group)
        self._weight = float(total) if total.is_cpu else total
        self._own_weight = weight
        self._seen = self._see()

    def _check_unweighted(self) -> None:
        """Raises ValueError where a backward without weight would add to weighted sums; forgets those zeroed since."""
        found = self._are_untouched() or self._are_any_nonzero()
        reducer = self._reducer()
        if isinstance(found, Tensor):
            assert reducer is not None
            reducer.note_found(found, by_weighted=False)
        elif found:
            raise ValueError(_UNWEIGHTED)
        self._weight = None

    def _are_any_nonzero(self) -> bool | Tensor:
        """Returns whether a kept row has a nonzero element; on CUDA as float64 [1], which the host does not read."""
        if not (grads := self._grads()):
            return False
        if self._device.type == "cpu":
            return any(bool(local_part(grad).any()) for grad in grads)
        counts = torch.stack([local_part(grad).count_nonzero() for grad in grads])
        return counts.sum().gt(0).double().view(1)

    def _grads(self) -> list[Tensor]:
        return [param.grad for ref in self._params if (param := ref()) is not None and param.grad is not None]

    def _see(self) -> list[Seen]:
        grads = (None if (param := ref()) is None else param.grad for ref in self._params)
        return [None if grad is None else (weakref.ref(grad), grad._version) for grad in grads]

    def _are_untouched(self) -> bool:
        return all(map(_is_same, self._see(), self._seen))

    def _drop(self) -> None:
        self._weight = None
        for ref in self._params:
            if (param := ref()) is not None:
                param.grad = None


def _keep(params: list[nn.Parameter], _: bool) -> None:
    """Adds this rank's rows of the reduced gradients to the kept ones, and lets go of the rest."""
    with torch.no_grad():
        for param in params:
            piece = pieces.piece_of(param)
            if piece is None or param.grad is None:
                continue
            own = piece.rows_of(param.grad)
            kept, piece.kept = piece.kept, None
            kept = own.clone() if kept is None else kept.add_(own)
            param.grad = rows_of(piece.distributed(kept))


def _is_same(now: Seen, before: Seen) -> bool:
    if now is None or before is None:
        return now is before
    return now[0]() is before[0]() and now[1] == before[1]
