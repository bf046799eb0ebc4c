"""Defines the position in the training data, whose kinds for DataLoaders are in `loader.py`."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Has a state that can be saved and restored."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Position:
    """The position in data that the training does not iterate over, or that has no state: nothing is saved."""

    epoch = 0
    is_exhausted = False  # the position is the end of an epoch
    counts_all = False  # each iteration is an epoch, also one in which no step is made before the next one begins
    others: Sequence["Position"] = ()  # the positions in the training's other loaders

    def call_before_fetch(self, call: Callable[[], None]) -> None:
        """Calls `call` before each batch that the training fetches."""
        raise TypeError("data is no DataLoader, whose batches a callback has to see: pass one")

    def open(self, is_noticed: Callable[[], bool] = lambda: False) -> None:
        """Begins to count batches. Workers that end once `is_noticed()` is True start again."""

    def close(self) -> None:
        """Ends counting, and gives the loader back as it was."""

    def stepped(self) -> None:
        """Learns that the training has made a step with the batches taken last."""

    def other_ended(self) -> None:
        """Learns that a restored iteration over another loader has ended without a further batch."""

    def resumes_on(self, world_size: int) -> bool:
        """Returns True if another number of ranks saw each sample that is left once in the epoch."""
        return False

    def state(self) -> Any:
        """Returns the position, for `Encoder.encode`."""
        return None

    def check(self, state: Any, is_same_world: bool) -> None:
        """Raises ValueError if `restore` could not continue at `state`. Nothing changes."""

    def restore(self, state: Any) -> None:
        """Lets the next iteration continue at a position that `state` returned."""


class Direct(Position):
    """The position of an object with a state."""

    def __init__(self, data: Stateful) -> None:
        self._data = data

    def state(self) -> Any:
        return self._data.state_dict()

    def check(self, state: Any, is_same_world: bool) -> None:
        if not is_same_world:
            raise ValueError(
                f"data is a {type(self._data).__name__}, whose state holds on as many ranks only. Continue on as many "
                "as saved the checkpoint, or use a DataLoader with drivetrain.data.ResumableSampler. If one rank's "
                "state holds for any number of ranks, pass the object in `extra`"
            )

    def restore(self, state: Any) -> None:
        self._data.load_state_dict(state)


class Several(Position):
    """The positions in several loaders. The first one counts epochs."""

    def __init__(self, positions: list[Position]) -> None:
        self._positions = positions
        for position in positions:
            position.others = [one for one in positions if one is not position]

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._positions[0].epoch if self._positions else 0

    def call_before_fetch(self, call: Callable[[], None]) -> None:
        self._positions[0].call_before_fetch(call)
        for position in self._positions:
            position.counts_all = True

    def open(self, is_noticed: Callable[[], bool] = lambda: False) -> None:
        for position in self._positions:
            position.open(is_noticed)

    def close(self) -> None:
        for position in self._positions:
            position.close()

    def stepped(self) -> None:
        errors = []
        for position in self._positions:
            try:
                position.stepped()
            except RuntimeError as error:
                errors.append(error)
        if errors and len(errors) == len(self._positions):
            raise errors[0]

    def resumes_on(self, world_size: int) -> bool:
        return bool(self._positions) and all(position.resumes_on(world_size) for position in self._positions)

    def state(self) -> Any:
        return [position.state() for position in self._positions]

    def check(self, state: Any, is_same_world: bool) -> None:
        if not isinstance(state, list) or len(state) != len(self._positions):
            found = len(state) if isinstance(state, list) else 1
            raise ValueError(f"data has {len(self._positions)} loaders, expected {found} as in the checkpoint")
        for position, one in zip(self._positions, state, strict=True):
            position.check(one, is_same_world)

    def restore(self, state: Any) -> None:
        for position, one in zip(self._positions, state, strict=True):
            position.restore(one)
