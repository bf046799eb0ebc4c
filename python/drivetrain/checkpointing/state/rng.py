"""Captures and restores the states of random number generators: Python's, NumPy's, torch's, and a user's own."""

import array
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

_DEPTH, _MEMBERS = 5, 64  # how far generators are searched: samplers wrap each other, and may hold long lists
Generators = Sequence[Any]  # torch.Generator, numpy.random.Generator, numpy.random.RandomState or random.Random


def capture(generators: Generators = ()) -> dict[str, Any]:
    """Returns the states of all generators, for `Encoder.encode`.

    The default generators are Python's `random`, NumPy's if NumPy is imported, torch's on the CPU, and torch's on every
    CUDA device if CUDA is initialized.
    """
    has_cuda = torch.cuda.is_initialized()
    return capture_host() | {
        "cuda": [_bytes(state) for state in torch.cuda.get_rng_state_all()] if has_cuda else [],
        "generators": [state_of(generator, "generators") for generator in generators],
    }


def capture_host() -> dict[str, Any]:
    """Returns the states of the default generators on the CPU."""
    numpy = sys.modules.get("numpy")
    return {
        "python": state_of(random),
        "numpy": None if numpy is None else numpy.random.get_state(legacy=False),
        "torch": state_of(torch.default_generator),
    }


def restore(state: dict[str, Any], generators: Generators = ()) -> None:
    """Restores what `capture` returned."""
    saved, devices = state["cuda"], torch.cuda.device_count() if state["cuda"] else 0
    if len(saved) > devices:
        raise ValueError(
            f"the checkpoint has random states of {len(saved)} CUDA devices and this process sees {devices}: make as "
            "many visible, or pass generators of your own"
        )
    if len(state["generators"]) != len(generators):
        raise ValueError(
            f"generators has {len(generators)} elements, expected {len(state['generators'])} as in the checkpoint"
        )
    for generator, saved_state in zip(generators, state["generators"], strict=True):
        set_state(generator, saved_state)
    for device, words in enumerate(saved):
        torch.cuda.set_rng_state(_tensor(words), device)
    restore_host(state)


def restore_host(state: dict[str, Any]) -> None:
    """Restores what `capture_host` returned."""
    set_state(random, state["python"])
    if state["numpy"] is not None:
        import numpy

        numpy.random.set_state(state["numpy"])
    set_state(torch.default_generator, state["torch"])


def generators_of(*objects: Any, but: Any) -> list[Any]:
    """Returns the generators among the objects, and in their attributes and containers, except generators of `but`."""
    found: dict[int, Any] = {}
    seen = {id(but)}

    def look(one: Any, depth: int) -> None:
        if one is None or id(one) in seen or depth > _DEPTH:
            return
        seen.add(id(one))
        numpy = sys.modules.get("numpy")
        kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
        if isinstance(one, (torch.Generator, random.Random, *kinds)):
            if one not in (torch.default_generator, getattr(random, "_inst", None)):
                found[id(one)] = one
        elif isinstance(one, list | tuple | dict):
            for value in itertools.islice(one.values() if isinstance(one, dict) else one, _MEMBERS):
                look(value, depth + 1)
        elif not isinstance(one, Tensor | torch.nn.Module | type | Dataset) and hasattr(one, "__dict__"):
            look(vars(one), depth)

    for one in objects:
        look(one, 0)
    return list(found.values())


def set_state(generator: Any, state: Any) -> None:
    """Restores what `state_of` returned into a generator of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    elif generator is random or isinstance(generator, random.Random):
        words = array.array("I", state["words"])
        generator.setstate((state["version"], tuple(words), state["gauss"]))
    elif hasattr(generator, "bit_generator"):
        state = dict(state)
        seeds = state.pop("seed_sequence", None)
        generator.bit_generator.state = state
        if seeds is not None:
            from numpy.random import SeedSequence

            generator.bit_generator.__setstate__((state, SeedSequence(**seeds)))
    else:
        generator.set_state(state)


def state_of(generator: Any, name: str = "generator") -> Any:
    """Returns the state of one generator, for `Encoder.encode`. Raises TypeError for other objects."""
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if generator is random or isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": array.array("I", words).tobytes(), "gauss": gauss}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        pickled = generator.bit_generator.__getstate__()  # NumPy 2 adds the sequence, from which spawn() takes seeds
        seeds = pickled[1] if isinstance(pickled, tuple) else None
        known = seeds.state if isinstance(seeds, numpy.random.SeedSequence) else None
        return {**generator.bit_generator.state, "seed_sequence": known}
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    raise TypeError(
        f"{name} is a {type(generator).__name__}, expected a torch.Generator, numpy.random.Generator, "
        "numpy.random.RandomState or random.Random"
    )


def _bytes(state: Tensor) -> bytes:
    return bytes(state.tolist())


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
