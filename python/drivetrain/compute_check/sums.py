"""Checks that an all-reduce adds up: sums of blocks of the reduced gradients against sums of the ranks' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_BLOCK = 1024  # elements
_FEWEST = 3  # blocks that show the factor which all have in common


class Sums:
    """The sums of this rank's gradients of a step, before and after their all-reduce.

    Args:
        model: The wrapper. It may multiply all gradients by a factor, such as one over the number of ranks.
        params: The parameters that it reduces, with names.
    """

    def __init__(self, model: DistributedDataParallel, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        # Communication hooks and formats of the wire change single values.
        self._is_known = not model._comm_hooks and getattr(model, "_wire_dtype", None) is None
        self._params = [(name, param) for name, param in params if param.requires_grad]
        for _, param in self._params:  # Such a hook changes the gradient before it is reduced.
            self._is_known &= not param.is_complex() and not getattr(param, "_post_accumulate_grad_hooks", None)
        self._own: dict[str, Tensor] = {}
        self._reduced: dict[str, Tensor] = {}

    def note(self, name: str, grad: Tensor) -> None:
        """Notes a gradient of this rank while backward runs, and the reduced gradients at its end."""
        if not self._own:
            self._is_known &= not any(param.grad is not None and bool(param.grad.any()) for _, param in self._params)
            # The wrapper's own callback comes before one that a callback adds.
            _at_end_of_backward(lambda: _at_end_of_backward(self._note_reduced))
        self._own[name] = _of_blocks(grad)

    def _note_reduced(self) -> None:
        for name, param in self._params:
            if param.grad is not None and not hasattr(param.grad, "to_local"):
                self._reduced[name] = _of_blocks(param.grad)
        self._is_known &= self._own.keys() <= self._reduced.keys()

    def compare(self, group: dist.ProcessGroup) -> tuple[bool, str, str]:
        """Compares sums over ranks, all of which must call this.

        Returns:
            True if that was possible. Then a parameter and which of its elements have a sum that rounding cannot
            explain, or two empty texts.
        """
        counts = [-(-param.numel() // _BLOCK) for _, param in self._params]
        zeros = {name: torch.zeros(2, count) for (name, _), count in zip(self._params, counts, strict=True)}
        own, reduced = (
            torch.cat([torch.zeros(2, 1, dtype=torch.float64), *(part.cpu() for part in (zeros | found).values())], 1)
            for found in (self._own, self._reduced)
        )
        own[0, 0] = not self._is_known
        dist.all_reduce(own, group=group)
        is_unknown, (total, magnitude), found = bool(own[0, 0]), own[:, 1:], reduced[0, 1:]
        # Every rank may round an element once, and the wrapper rounds it once more.
        kinds = [torch.finfo(param.dtype) for _, param in self._params]
        limits = torch.tensor([(kind.eps, kind.tiny, kind.max) for kind in kinds], dtype=torch.float64)
        eps, tiny, most = limits.repeat_interleave(torch.tensor(counts), 0).T
        rounding = (dist.get_world_size(group) + 1) * eps * (magnitude + _BLOCK * tiny)
        is_small = magnitude < most / 4
        clearness = torch.where(is_small, total.abs() / rounding, 0)
        clear = clearness > 8
        if is_unknown or int(clear.sum()) < _FEWEST:
            return False, "", ""
        # The median of the clearer half is right if most of these blocks are.
        least = clearness[clear].median()
        factor = (found / total)[clearness >= least].median()
        bound = factor.abs() * (rounding + total.abs() / least)
        excess = torch.where(is_small, (found - factor * total).abs() / bound, 0).nan_to_num(torch.inf)
        if excess.max() <= 1:
            return True, "", ""
        block, place = int(excess.argmax()), 0
        while block >= counts[place]:
            block, place = block - counts[place], place + 1
        (name, param), begin = self._params[place], block * _BLOCK
        return True, name, f"elements {begin} to {min(begin + _BLOCK, param.numel()) - 1} of {name!r}"


def _of_blocks(values: Tensor) -> Tensor:
    """Returns the sums of blocks of values, and of their magnitudes: [2, blocks] in float64."""
    flat = values.detach()
    flat = (flat.to_dense() if flat.is_sparse else flat).flatten().double()
    rows = nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
    return torch.stack([rows.sum(1), rows.abs().sum(1)])


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
