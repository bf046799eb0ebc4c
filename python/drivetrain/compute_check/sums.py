"""Checks that an all-reduce adds up: sums of blocks of the reduced gradients against sums of the ranks' own."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ..ddp.gather import gather_objects
from ..ddp.reducer import Reducer
from .repeat import hash_of

_BLOCK = 1024  # elements
_FEWEST = 3  # blocks that show the factor which all have in common
_USED_UP = "gradients are used up while backward runs"

Piece = tuple[str, int, int]  # a parameter, and the range of its elements


class Sums:
    """The gradients that this rank puts into the all-reduce of a step, and the sums that come out of it.

    Args:
        model: The wrapper. It may multiply all gradients by a factor, such as one over the number of ranks.
        params: The parameters that it reduces, with names.

    Attributes:
        why_not: The reason why the results are no sums, or None.
    """

    def __init__(self, model: DistributedDataParallel, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._model = model
        self._params = [(name, param) for name, param in params if param.requires_grad]
        self._counts = [-(-param.numel() // _BLOCK) for _, param in self._params]
        self.why_not = self._obstacle()
        self._values: dict[str, Tensor] = {}  # what this rank puts in
        self._reduced: dict[str, Tensor] = {}  # sums of blocks of the results
        self._own = self._total = torch.zeros(0)  # of what this rank, and all ranks, put in, with magnitudes

    def _obstacle(self) -> str | None:
        for hook, _ in self._model._comm_hooks:
            is_torchs = str(hook.__module__).startswith("torch.distributed.algorithms")
            if is_torchs and hook is not default_hooks.allreduce_hook:
                return f"communication hook {hook.__qualname__} does not give exact sums"
        if name := next((name for name, param in self._params if param.is_complex()), None):
            return f"parameter {name!r} is complex"
        return None

    def note(self, name: str, param: Tensor) -> None:
        """Notes an accumulated gradient of this rank while backward runs, and the reduced gradients at its end."""
        if param.grad is None:
            self.why_not = self.why_not or _USED_UP
        elif self._reduced:
            self.why_not = "a step has several backward passes that reduce gradients, or some inside of others"
        if self.why_not is not None:
            self.forget()
            return
        if not self._values:
            if self._model.find_unused_parameters or self._model.static_graph:  # those of an earlier pass, then
                self._values = {one: p.grad.detach().clone() for one, p in self._params if p.grad is not None}
            # The wrapper's own callback comes before one that a callback adds.
            _at_end_of_backward(lambda: _at_end_of_backward(self._note_reduced))
        self._values[name] = param.grad.detach().clone()  # type: ignore[union-attr]

    def _note_reduced(self) -> None:
        for name, param in self._params:
            if hasattr(param.grad, "to_local"):
                self.why_not = "each rank keeps its own rows of the reduced gradients"
            elif param.grad is not None:
                self._reduced[name] = _of_blocks(param.grad)
            elif name in self._values:
                self.why_not = _USED_UP

    def compare(self, group: dist.ProcessGroup) -> tuple[bool, Piece | None]:
        """Compares sums over ranks, all of which must call this.

        Returns:
            True if that was possible. Then the piece whose sums differ most, if rounding cannot explain it.
        """
        own = {name: _of_blocks(values, with_magnitudes=True) for name, values in self._values.items()}
        self._own, found = self._of_all(own, 2), self._of_all(self._reduced, 1)[0]
        self._total = self._own.clone()
        dist.all_reduce(self._total, group=group)
        total, magnitude = self._total
        # Every rank may round an element once, and the wrapper rounds it once more.
        kinds = [torch.finfo(param.dtype) for _, param in self._params]
        limits = torch.tensor([(kind.eps, kind.tiny, kind.max) for kind in kinds], dtype=torch.float64)
        eps, tiny, most = limits.repeat_interleave(torch.tensor(self._counts), 0).T
        rounding = (dist.get_world_size(group) + 1) * eps * (magnitude + _BLOCK * tiny)
        is_small = magnitude < most / 4
        clearness = torch.where(is_small, total.abs() / rounding, 0)
        clear = clearness > 8
        if int(clear.sum()) < _FEWEST:
            return False, None
        # The median of the clearer half is right if most of these blocks are.
        least = clearness[clear].median()
        factor = (found / total)[clearness >= least].median()
        bound = factor.abs() * (rounding + total.abs() / least)
        excess = torch.where(is_small, (found - factor * total).abs() / bound, 0).nan_to_num(torch.inf)
        if excess.max() <= 1:
            return True, None
        block, place = int(excess.argmax()), 0
        while block >= self._counts[place]:
            block, place = block - self._counts[place], place + 1
        (name, param), begin = self._params[place], block * _BLOCK
        return True, (name, begin, min(begin + _BLOCK, param.numel()))

    def culprits(self, piece: Piece, group: dist.ProcessGroup) -> tuple[list[int], str]:
        """Finds who has made a sum wrong that is equal on all ranks. All ranks must call this, after `compare`.

        Returns:
            The ranks that may have, and what they have done.
        """
        name, begin, end = piece
        place = [one for one, _ in self._params].index(name)
        block = sum(self._counts[:place]) + begin // _BLOCK
        own = _flat(self._values.get(name, torch.zeros_like(self._params[place][1])))[begin:end]
        noted, magnitude = self._own[:, block].tolist()
        gathered = gather_objects((own.cpu(), noted), group)
        noted_by_all = [one for _, one in gathered]
        # Otherwise this check's own all-reduce is wrong, and not the gradients'.
        is_total = abs(float(self._total[0, block]) - sum(noted_by_all)) <= 1e-12 * sum(map(abs, noted_by_all))
        is_other = abs(float(_of_blocks(own)) - noted) > 1e-12 * magnitude
        again = hash_of(_added([values.to(own.device) for values, _ in gathered]))
        found = gather_objects((is_other, again, is_total and self._has_added(piece)), group)
        usual, most = Counter(again for _, again, _ in found).most_common(1)[0]
        cases = {
            "gives another sum of its own gradient in a repetition": [other for other, _, _ in found],
            "adds up the same gradients differently": [
                again != usual and 2 * most > len(found) for _, again, _ in found
            ],
            "has added up these elements": [has_added for _, _, has_added in found],
            "adds wrongly, or what connects them is at fault. The transport does not know which, and a repetition is "
            "right": [True] * len(found),
        }
        what, are_meant = next(case for case in cases.items() if any(case[1]))
        return [rank for rank, is_meant in enumerate(are_meant) if is_meant], what

    def _has_added(self, piece: Piece) -> bool:
        reducer = getattr(self._model, "reducer", None)
        if not isinstance(reducer, Reducer) or self._model._comm_hooks:  # a hook has added them up
            return False
        name, begin, end = piece
        view = reducer.gradient_views()[[one for one, _ in reducer.named_parameters()].index(name)]
        if view is None:
            return False
        return reducer.comm.has_summed(view.flatten()[begin:end] if view.is_contiguous() else view)

    def forget(self) -> None:
        """Frees the memory of what this rank has put in."""
        self._values, self._reduced = {}, {}

    def _of_all(self, found: dict[str, Tensor], rows: int) -> Tensor:
        """Returns the sums of all parameters' blocks: [rows, blocks]. Those without are 0."""
        none = (torch.zeros(rows, count, dtype=torch.float64) for count in self._counts)
        return torch.cat([found.get(name, zeros).cpu() for (name, _), zeros in zip(self._params, none, strict=True)], 1)


def _flat(values: Tensor) -> Tensor:
    values = values.detach()
    return (values.to_dense() if values.is_sparse else values).flatten()


def _added(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


def _of_blocks(values: Tensor, with_magnitudes: bool = False) -> Tensor:
    """Returns the sums of blocks of values, and of their magnitudes: [1 or 2, blocks] in float64."""
    flat = _flat(values).to(torch.float64, copy=True)
    count, rest = divmod(len(flat), _BLOCK)
    rows = [flat[: len(flat) - rest].view(count, _BLOCK), flat[len(flat) - rest :].view(int(rest > 0), rest)]
    sums = [torch.cat([one.sum(1) for one in rows])]
    if with_magnitudes:
        flat.abs_()  # vector_norm() takes three times as long
        sums.append(torch.cat([one.sum(1) for one in rows]))
    return torch.stack(sums)


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
