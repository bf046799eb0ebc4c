"""Remembers parameters that DistributedDataParallel reduces over another group of ranks than their model's."""

from collections.abc import Iterable, MutableMapping

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

# The hooks that scale gradients. A new wrapper of a parameter ends the one of its last wrapper, which may still exist.
scales: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()


def refuse_norm(params: Iterable[Tensor], what: str) -> None:
    """Raises NotImplementedError if ranks have different parameters, whose norms would make replicas differ."""
    if scales and any(param in scales for param in params):
        raise NotImplementedError(
            f"{what} does not go together with DistributedDataParallel's process_groups: ranks hold different "
            "parameters, and would clip what they share by different norms. Clip with a norm over all ranks."
        )
