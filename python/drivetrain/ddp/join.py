"""Uneven inputs: how a rank that has run out of inputs takes part in the steps of the others, under `join()`."""

from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from .. import _C
from .hang_reports import waiting
from .reducer import Reducer

BUFFERS = "the broadcast of buffers"


class JoinsUnevenInputs(TorchDistributedDataParallel):
    """The part of the wrapper that torch's Join context calls. It marks all waits, for hang reports."""

    reducer: Reducer  # type: ignore[assignment]  # torch's wrapper wants its methods, not its type

    def _has_reducer(self) -> bool:
        """Returns False if the all-reduce of every parameter is delayed."""
        return "reducer" in self.__dict__

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook of a rank that has run out of inputs, as torch does.

        Raises:
            NotImplementedError: An optimizer steps in backward, or the wrapper has `shard`. A rank that has run out of
                inputs has no backward and no step.
        """
        if self.__dict__.get("_sharding") is not None:
            raise NotImplementedError(
                "join() does not go together with shard=. A rank that has run out of inputs takes no steps, and the "
                "others need the rows that it steps. Give every rank as many inputs, or leave shard= out."
            )
        if self._has_reducer() and self.reducer.steps_in_backward:
            raise NotImplementedError(
                "join() does not go together with optimizer.step_in_backward(): a rank that has run out of inputs has "
                "no backward to step in. Give every rank as many inputs, or step after backward."
            )
        return _WatchedJoinHook(super().join_hook(**kwargs), self.reducer.progress())  # type: ignore[no-untyped-call]

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Takes part in the others' backward with zeros. This rank's own `.grad` become their mean."""
        self.reducer.shadow_planning()
        as_sum = not self._divide_by_initial_world_size
        reduces = [self.reducer.reduce_zeros(i, as_sum) for i in range(len(self.reducer.buckets()))]
        for i, reduce in enumerate(reduces):
            self.reducer.wait_for_zeros(i, reduce)

    def _match_unused_params_allreduce(self) -> None:
        """Does nothing: our reducer shares the map of used parameters by another rule than torch's."""

    def _check_and_sync_module_buffers(self) -> None:
        with waiting(self.reducer.progress(), BUFFERS):
            super()._check_and_sync_module_buffers()  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        """Broadcasts rank 0's buffers, and marks the wait for hang reports."""
        with waiting(self.reducer.progress(), BUFFERS):
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Broadcasts buffers of one rank, after the ranks have compared that all are about to."""
        if self._has_reducer() and not hasattr(self, "buffer_hook"):  # a hook may communicate otherwise, or not at all
            self.reducer.announce_buffers()
        try:
            super()._sync_module_buffers(authoritative_rank)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self._has_reducer() and (difference := self.reducer.difference()):
                raise RuntimeError(f"drivetrain: {BUFFERS} has failed: {difference}") from error
            raise

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        self.reducer.announce_agreement()
        with waiting(self.reducer.progress(), "the agreement on whether to synchronize"):
            found: bool | None = super()._check_global_requires_backward_grad_sync(  # type: ignore[no-untyped-call]
                is_joined_rank
            )
        return found

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        with waiting(self.reducer.progress(), "the last broadcast of parameters, in join(),"):
            super()._sync_final_model(is_last_joiner)  # type: ignore[no-untyped-call]


class _WatchedJoinHook(JoinHook):
    """torch's hook of a rank that has run out of inputs. It waits for the others' next step between its calls."""

    def __init__(self, hook: JoinHook, progress: _C.Progress) -> None:
        self._hook = hook
        self._progress = progress
        self._is_waiting = False

    def main_hook(self) -> None:
        self._end_wait()
        self._hook.main_hook()
        self._progress.begin_wait("the beginning, on ranks that still have inputs,")
        self._is_waiting = True

    def post_hook(self, is_last_joiner: bool) -> None:
        self._end_wait()
        self._hook.post_hook(is_last_joiner)

    def _end_wait(self) -> None:
        if self._is_waiting:
            self._progress.end_wait()
        self._is_waiting = False
