"""Saves and restores the position in a DataLoader, so that a loop continues with the next batch of the epoch."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from ...data import ResumableSampler
from . import rng
from .position import Position
from .skipping import Skipping

KEY = "_drivetrain_position"  # an attribute of loaders that are counted
IN_USE = "data is used by another Checkpointer: leave its with block first"


class Counted(Position):
    """Counts the batches that a loop takes from a DataLoader.

    A `for` loop looks `__iter__` up in the class, so the loader gets a subclass of its class for the time of counting.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self._class: type | None = None
        self._count = -1  # of the epochs that have begun, less one
        self._has_begun = False  # an iteration since `open`
        self._has_stepped = False  # the training, in the current iteration
        self._ever_stepped = False  # so that passes without a step are no epochs
        self._base = 0  # the epoch of the first pass since `open`
        self._is_next = False  # the restored position is the end of an epoch, which is the beginning of the next one
        self._restarts_workers = False  # the next iteration starts workers that an uninterrupted run would reuse
        self.batches = 0  # taken in the current iteration
        self.is_exhausted = False  # the current iteration has ended
        self._start: Any = None  # random states at its beginning; None: there is none
        self._first: Any = None  # those at its first fetch, with which a sampler draws if there are no workers
        self._asked = self._asks()  # how often its sampler was asked when it began first
        self._workers_start: Any = None  # those at the start of persistent workers, which later iterations reuse
        self._is_reuse = False  # the current iteration reuses workers
        self._resumed: Any = None  # the state with which the next iteration continues
        self._before_fetch: Callable[[], None] | None = None
        self._is_noticed: Callable[[], bool] = lambda: False
        self._late_steps = 0  # made since the current iteration has ended
        self.is_fetching = False  # maybe on a thread that takes batches ahead

    def call_before_fetch(self, call: Callable[[], None]) -> None:
        self._before_fetch, self.counts_all = call, True

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return max(0, self._count + self._is_next)

    def open(self, is_noticed: Callable[[], bool] = lambda: False) -> None:
        if hasattr(self._loader, KEY):
            raise RuntimeError(IN_USE)
        self._is_noticed = is_noticed
        self._has_begun = False
        self._class = type(self._loader)
        own: Any = self._class

        def __iter__(loader: Any) -> Iterator[Any]:
            # Copies, and loaders that a script makes of this class, are not counted.
            counted: Any = loader.__dict__.get(KEY)
            is_counted = counted is not None and counted._loader is loader
            batches: Iterator[Any] = counted.begin() if is_counted else own.__iter__(loader)
            return batches

        members = {"__iter__": __iter__, "__module__": own.__module__}
        setattr(self._loader, KEY, self)
        self._loader.__class__ = type(self._class.__name__, (self._class,), members)

    def close(self) -> None:
        if self._class is not None:
            self._loader.__class__ = self._class
            delattr(self._loader, KEY)
            self._class = None

    def begin(self) -> Iterator[Any]:
        """Begins an iteration over the loader; its own `__iter__` comes here.

        Scripts also look at a batch first, or measure the accuracy on these data. A restored position therefore waits
        for the iteration in which the training makes a step, and iterations without one are no epochs.
        """
        resumed = self._resumed
        if self.counts_all or not self._ever_stepped:
            self._resumed = None
        self.batches, self.is_exhausted, self._is_next, self._has_begun = 0, False, False, True
        self._late_steps = 0
        if resumed is None or resumed["start"] is None:
            self._resumed = None
            if self._has_stepped or not self._ever_stepped or self.counts_all:
                self._count += 1
            self._has_stepped = False
            self._start, self._first, self._asked = self._streams(), None, self._asks()
            self._is_reuse = self._workers_start is not None
            if self._is_persistent() and not self._is_reuse:
                self._workers_start = self._start
            if not self._restarts_workers:
                return self._hand_out(self._iterate(), None)
            self._restarts_workers = False
            self._set_streams(self._workers_start)
            return self._hand_out(self._iterate_from({}), None)
        self._continue(resumed)
        return self._hand_out(self._iterate_again(resumed), resumed)

    def fetching(self) -> None:
        """Learns that the training is about to fetch a batch.

        Between the begin of an iteration and its first fetch, other loaders and the script may draw random numbers.
        """
        if self._first is None and self._asked == 1:
            self._first = self._streams()
        if self._before_fetch is not None:
            self._before_fetch()

    def end(self) -> None:
        """Ends the current iteration, whose batches are all taken."""
        is_at_once = self._resumed is not None
        self.is_exhausted, self._resumed = True, None
        for other in self.others if is_at_once else ():
            other.other_ended()

    def other_ended(self) -> None:
        """Lets the next iteration be a new one, as loops over several loaders end with the shortest."""
        if self._has_begun:
            self._resumed = None

    def fetched(self) -> None:
        """Learns that a batch was fetched, or that the iteration has ended."""
        self.is_fetching = False

    def has_lost_workers(self, batches: Iterator[Any]) -> bool:
        """Returns whether a worker has ended under a notice, so that the iteration must begin again."""
        return self._is_noticed() and not all(worker.is_alive() for worker in getattr(batches, "_workers", ()))

    def begin_again(self, taken: int) -> Iterator[Any]:
        """Begins the current iteration again with new workers, after the first `taken` batches of it."""
        self._loader._iterator = None
        return self._iterate_again({"batches": taken})

    def stepped(self) -> None:
        if not self._has_begun:
            raise RuntimeError(
                "data was not iterated over since the block began, so the position in it is unknown. Call iter() on "
                "the loader that Checkpointer was given, inside of the block, or pass the one that the loop uses"
            )
        if not self._ever_stepped:
            self._ever_stepped, self._count = True, self._base
        self._has_stepped, self._resumed = True, None
        if not self.is_exhausted:
            return
        self._late_steps += 1  # the first may be of a last window of micro-batches
        if self._late_steps == 2 and all(getattr(other, "_late_steps", 0) for other in self.others):
            warnings.warn(
                "data has ended, and steps are made without another batch of it, so that checkpoints do not know the "
                "position. If the loop makes a loader for each epoch, make one before the block, and use it in all.",
                stacklevel=2,
            )

    def state(self) -> Any:
        # After an epoch, in an iteration in which the training makes no step.
        is_idle = self._ever_stepped and not self._has_stepped and not self.counts_all
        is_between = is_idle and self._resumed is None and self._has_begun
        is_end = self.is_exhausted or is_between
        return {
            "epoch": self._count - is_between,
            "is_exhausted": is_end,
            "start": self._start,
            "first": self._first if self._start is not None else None,
            "asked": self._asked,
            "workers_start": self._workers_start,
            "is_reuse": self._is_reuse,
            "own": [rng.state_of(one) for one in self._own_generators()] if is_end else [],
            "ever_stepped": self._ever_stepped,
            "shape": self._shape(),
        }

    def _shape(self) -> dict[str, Any]:
        """Returns what a number of batches depends on."""
        dataset = self._loader.dataset
        length = len(dataset) if isinstance(dataset, Sized) else None
        return {"batch_size": self._loader.batch_size, "dataset": length}

    def check(self, state: Any, is_same_world: bool) -> None:
        ours = self._shape()
        differing = [name for name, value in state.get("shape", ours).items() if value != ours[name]]
        if differing and not state["is_exhausted"] and state["start"] is not None:
            name = "length of the dataset" if differing[0] == "dataset" else differing[0]
            raise ValueError(
                f"data has another {name}, {ours[differing[0]]}, expected {state['shape'][differing[0]]} as in the "
                "checkpoint, which is inside of an epoch. Finish that epoch as it began, or use "
                "drivetrain.data.ResumableSampler, with which a batch size may change"
            )

    def restore(self, state: Any) -> None:
        self._count = state["epoch"]
        self._has_stepped = self._ever_stepped = state.get("ever_stepped", True)
        self._base = max(0, self._count + state["is_exhausted"])
        self.batches, self.is_exhausted, self._start = 0, state["is_exhausted"], state["start"]
        self._is_next = self.is_exhausted
        self._resumed = None if self._is_next else state
        if self._is_next:
            for generator, words in zip(self._own_generators(), state["own"], strict=True):
                rng.set_state(generator, words)
            self._workers_start = state["workers_start"] if self._is_persistent() else None
            self._restarts_workers = self._workers_start is not None
        else:
            self._continue(state)  # a save may come before the iteration

    def _continue(self, state: Any) -> None:
        """Makes the iteration of a state the current one."""
        self._start, self._first, self._is_reuse = state["start"], state.get("first"), state["is_reuse"]
        self._workers_start, self._asked = state["workers_start"], state.get("asked", self._asks())

    def _iterate(self) -> Iterator[Any]:
        assert self._class is not None
        iterator: Iterator[Any] = self._class.__iter__(self._loader)  # type: ignore[attr-defined]
        return iterator

    def _iterate_again(self, state: Any) -> Iterator[Any]:
        """Begins an iteration with the seeds that it drew when it began first. The random states then go on."""
        now = rng.capture_host()
        self._set_streams(self._workers_start or self._start)
        batches = self._iterate_from(state)
        rng.restore_host(now)
        return batches

    def _iterate_from(self, state: Any) -> Iterator[Any]:
        return self._iterate()

    def _hand_out(self, batches: Iterator[Any], state: Any) -> "CountedBatches":
        """Returns what counts the batches of an iteration; `state` is that with which it continues, or None."""
        return CountedBatches(batches, self)

    def _asks(self) -> int:
        """Returns how often DataLoader calls `iter()` of its sampler for a new iteration."""
        return 2 if self._loader.num_workers else 1

    def _is_persistent(self) -> bool:
        return self._loader.persistent_workers and self._loader.num_workers > 0

    def _own_generators(self) -> list[Any]:
        return []

    def _streams(self) -> Any:
        return rng.capture_host() | {"own": [rng.state_of(one) for one in self._own_generators()]}

    def _set_streams(self, state: Any) -> None:
        for generator, words in zip(self._own_generators(), state["own"], strict=True):
            rng.set_state(generator, words)
        rng.restore_host(state)


class StatefulLoader(Counted):
    """A loader that saves its own position, such as torchdata's."""

    def state(self) -> Any:
        before = rng.capture_host()
        state = self._loader.state_dict()  # type: ignore[attr-defined]
        rng.restore_host(before)  # A loader without an iteration begins one, which draws seeds.
        return super().state() | {"loader": state}

    def begin_again(self, taken: int) -> Iterator[Any]:
        before = rng.capture_host()
        self._loader.load_state_dict(self._loader.state_dict())  # type: ignore[attr-defined]
        batches = self._iterate()
        rng.restore_host(before)
        return batches

    def check(self, state: Any, is_same_world: bool) -> None:
        super().check(state, is_same_world)
        if not is_same_world:
            raise ValueError(
                f"data is a {type(self._loader).__name__}, whose state holds on as many ranks only. Continue on as "
                "many as saved the checkpoint, or use a DataLoader with drivetrain.data.ResumableSampler"
            )

    def restore(self, state: Any) -> None:
        super().restore(state)
        self._restarts_workers = False  # The loader restores its workers by itself.
        self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]


class MapStyleLoader(Counted):
    """A plain DataLoader over a map-style dataset.

    With a ResumableSampler the position is restored at once. Any other sampler is asked for the indices of the epoch
    again, from the same random states, and indices of consumed batches are dropped. No sample is loaded twice.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        super().__init__(loader)
        batch_sampler = loader.batch_sampler
        sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
        is_plain = batch_sampler is None or type(batch_sampler) is BatchSampler
        self._sampler: Any = sampler
        self._resumable = sampler if is_plain and isinstance(sampler, ResumableSampler) else None
        self._batch_size = 1 if batch_sampler is None else getattr(batch_sampler, "batch_size", 1)
        self._counting: tuple[Any, Any] = (sampler, batch_sampler)  # each may have an `epoch`
        self._begun_epochs = self._seen_epochs = self._epochs()
        self._skipped = 0  # batches that the current iteration left out at its beginning

    def _epochs(self) -> list[Any]:
        return [getattr(one, "epoch", None) for one in self._counting]

    def _set_epochs(self, epochs: list[Any]) -> None:
        for one, epoch, now in zip(self._counting, epochs, self._epochs(), strict=True):
            if epoch is None or epoch == now:
                continue
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
            elif "epoch" in getattr(one, "__dict__", {}):
                one.epoch = epoch

    def fetched(self) -> None:
        self._seen_epochs = self._epochs()
        super().fetched()

    def state(self) -> Any:
        # In this order: a thread that takes batches ahead may be fetching one now.
        epochs, is_fetching = self._epochs(), self.is_fetching
        was_set = epochs != self._seen_epochs and not is_fetching
        common = super().state()
        # A sampler may count epochs itself, when it begins or ends. The current iteration begins again as it began.
        common["sampler_epochs"] = epochs if was_set or common["is_exhausted"] else self._begun_epochs
        if was_set:  # by set_epoch() of the script; the next iteration draws its own seeds.
            common["start"] = None
        batches = 0 if self._resumed is not None else self.batches  # A restored position waits for the first step.
        if self._resumable is None:
            return common | {"batches": self._skipped + batches if common["start"] is not None else 0}
        drawn = self._resumable._drawn
        consumed = drawn if self.is_exhausted else min(batches * self._batch_size, drawn)
        return common | {"sampler": self._resumable.state_dict(consumed)}

    def resumes_on(self, world_size: int) -> bool:
        return self._resumable is not None and self._resumable.num_replicas == world_size

    def check(self, state: Any, is_same_world: bool) -> None:
        if self._resumable is None:
            super().check(state, is_same_world)
        if ("sampler" in state) != (self._resumable is not None):
            has, lacks = ("a", "none") if "sampler" in state else ("no", "one")
            raise ValueError(f"data has {lacks}, but the checkpoint is of a loader with {has} ResumableSampler")
        if not is_same_world and self._resumable is None and state["start"] is not None:
            raise ValueError(
                "data has a sampler that cannot continue at another number of ranks: use "
                "drivetrain.data.ResumableSampler, or continue on as many ranks as saved the checkpoint"
            )
        generators = len(state["start"]["own"]) if state["start"] is not None else 0
        if state["start"] is not None and generators != len(self._own_generators()):
            raise ValueError(
                f"data has {len(self._own_generators())} generators of its own, expected {generators} as in the "
                "checkpoint"
            )

    def restore(self, state: Any) -> None:
        super().restore(state)
        self._skipped = 0
        if self._resumable is not None:
            position = 0 if self._is_next else state["sampler"]["position"]
            self._resumable.load_state_dict(state["sampler"] | {"position": position})
        else:
            self._skipped = 0 if self._is_next else state["batches"]
            self._set_epochs(state["sampler_epochs"])
        self._begun_epochs = self._seen_epochs = self._epochs()

    def begin_again(self, taken: int) -> Iterator[Any]:
        if self._resumable is not None:
            self._resumable.load_state_dict(self._resumable.state_dict(0))  # to the beginning of this iteration
        else:
            self._set_epochs(self._begun_epochs)
        return super().begin_again(self._skipped + taken)

    def begin(self) -> Iterator[Any]:
        if self._resumed is not None and self._resumable is None and self._epochs() == self._seen_epochs:
            self._set_epochs(self._resumed["sampler_epochs"])  # an iteration without a step may have counted
        self._begun_epochs = self._epochs()
        if self._resumed is None:
            self._skipped = 0
        elif self._resumable is not None and self._resumed["sampler"]["epoch"] == self._begun_epochs[0]:
            self._resumable.load_state_dict(self._resumed["sampler"])  # an iteration without a step may have drawn
        batches = super().begin()
        self.fetched()
        return batches

    def _iterate_from(self, state: Any) -> Iterator[Any]:
        name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        original = getattr(self._loader, name)
        # An iteration over running workers drew no seed for them before its sampler drew. One without workers took its
        # first element at the first fetch. A ResumableSampler gives up its position for the first `iter()`.
        then = self._start if self._is_reuse else self._first
        before = None if then is None else functools.partial(self._set_streams, then)
        count, asks = state.get("batches", 0), self._asks()
        early, late = min(asks, self._asked), max(0, self._asked - asks)
        if self._is_reuse or self._resumable is not None:
            early, late = 0, 1
        skipping = Skipping(original, count, before, early, late)
        # DataLoader refuses to replace its sampler, because an iteration in progress would not see it. None is.
        object.__setattr__(self._loader, name, skipping)
        try:
            iterator = self._iterate()
            if count or (late and (then is not None or self._asked > 1 or "first" not in state)):
                skipping.prime()
        finally:
            object.__setattr__(self._loader, name, original)
        return iterator

    def _own_generators(self) -> list[Any]:
        return rng.generators_of(
            self._loader.generator, self._sampler, self._loader.batch_sampler, but=self._loader.dataset
        )


class CountedBatches:
    """Iterates over a loader's batches and counts those that it hands out."""

    def __init__(self, batches: Iterator[Any], counted: Counted) -> None:
        self._batches, self._counted = batches, counted
        self._fetched = 0

    def __iter__(self) -> "CountedBatches":
        return self

    def __next__(self) -> Any:
        self._counted.fetching()
        try:
            batch = self._fetch()
        except StopIteration:
            self._counted.end()
            raise
        self._counted.batches += 1
        return batch

    def _fetch(self) -> Any:
        self._counted.is_fetching = True
        try:
            return self._fetch_once()
        finally:
            self._counted.fetched()

    def _fetch_once(self) -> Any:
        try:
            if not self._counted.has_lost_workers(self._batches):
                batch = next(self._batches)
                self._fetched += 1
                return batch
        except StopIteration:
            raise
        except Exception:
            if not self._counted.has_lost_workers(self._batches):
                raise
        self._batches = self._counted.begin_again(self._fetched)
        batch = next(self._batches)
        self._fetched += 1
        return batch

    def apart(self) -> tuple[Iterator[Any], Counted]:
        """Returns the iterator without counting, and what counts, for data.prefetch, which takes batches ahead.

        The caller calls `fetching` before the training fetches a batch, and counts `batches` or calls `end` after it.
        """
        return iter(self._fetch, object()), self._counted

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
