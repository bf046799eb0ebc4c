"""Random streams that depend on a seed, a logical rank and a window alone, whichever rank draws from them."""

import enum
import hashlib
import random
import sys
from typing import Any

import torch


class Use(enum.Enum):
    """Tells the streams of a logical rank and a window apart."""

    DATA = "data"  # before the part's first forward
    MODEL = "model"  # from there on
    STEP = "step"  # the optimizer's, equal on all ranks
    SAMPLE = "sample"  # of a dataset, by its index and epoch


def begin(use: Use, seed: int, logical_rank: int, window: int) -> None:
    """Lets the default generators of torch, of Python and of NumPy, if it is imported, begin a stream."""
    digest = hashlib.blake2b(repr((use.value, seed, logical_rank, window)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    for generator in _of_torch():
        generator.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


def states() -> tuple[Any, ...]:
    """Returns the states of these generators."""
    numpy = sys.modules.get("numpy")
    of_torch = [generator.get_state() for generator in _of_torch()]
    return of_torch, random.getstate(), None if numpy is None else numpy.random.get_state()


def restore(saved: tuple[Any, ...]) -> None:
    """Restores what `states` returned."""
    for generator, state in zip(_of_torch(), saved[0], strict=False):  # CUDA may have been initialized since
        generator.set_state(state)
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy"].random.set_state(saved[2])


def _of_torch() -> list[torch.Generator]:
    """Returns the default generators of the CPU and of all CUDA devices, which need no context, if CUDA is in use."""
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
