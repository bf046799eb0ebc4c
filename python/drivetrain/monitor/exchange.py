"""Shows every rank's last steps and place to the others, through the process group's store, without a collective."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, TypedDict

import torch.distributed as dist

from ..ddp.control_block import ControlBlock, connection_to_store, host_name
from .hangs import RankProgress
from .stragglers import WINDOW, Profile, Straggler, find_straggler, profile_of

_PERIOD_S = 1.0
_PREFIX = "drivetrain/monitor/"


class Message(TypedDict):
    """The message that a rank shows the others."""

    place: RankProgress
    profile: Profile | None


class Exchange:
    """Publishes this rank's steps and its place; on rank 0, compares the ranks' steps.

    No call waits longer than `_PERIOD_S`. After the store has failed, as at the end of a job, nothing is exchanged.

    Args:
        group: The process group.

    Attributes:
        has_compared: True on rank 0 once all ranks have published enough steps.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.has_compared = False
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        ranks = [dist.get_global_rank(group, rank) for rank in range(self._world_size)]
        # Only its questions with a time limit are used here, none of its keys.
        self._store = ControlBlock(connection_to_store(group), _PREFIX, ranks, self._rank, host_name(), _PERIOD_S)
        self._ranks = ranks
        self._steps: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._profile: Profile | None = None  # of the last steps; None: there were too few
        self._is_new = False
        self._have_all_come = False

    def add(self, phases: Mapping[str, float]) -> None:
        """Notes a step of this rank: seconds by phase."""
        self._steps.append(phases)
        self._is_new = True

    def exchange(self, place: RankProgress, wants_others: bool) -> tuple[Straggler | None, dict[int, RankProgress]]:
        """Publishes the place, and the noted steps.

        Args:
            place: The place of this rank.
            wants_others: True reads the places of the other ranks.

        Returns:
            On rank 0 the straggler, if there is one; and the places that were asked for. Both by global ranks.
        """
        compares = False
        if self._is_new:
            self._profile = profile_of(list(self._steps))
            compares = self._profile is not None and self._rank == 0
        self._is_new = False
        # One message, because each question to the store takes a round trip.
        mine = json.dumps({"place": place, "profile": self._profile})
        found = self._store.ask(lambda store: self._ask(store, mine, compares, wants_others)) or {}
        messages: dict[int, Message] = {self._ranks[rank]: json.loads(text) for rank, text in found.items()}
        places = {rank: message["place"] for rank, message in messages.items() if rank != self._ranks[self._rank]}
        straggler = None
        if compares and len(messages) == self._world_size:
            profiles = {rank: profile for rank, message in messages.items() if (profile := message["profile"])}
            if len(profiles) == self._world_size:
                self.has_compared = True
                straggler = find_straggler(profiles)
        return straggler, places if wants_others else {}

    def _ask(self, store: Any, mine: str, compares: bool, wants_others: bool) -> dict[int, bytes]:
        """Publishes this rank's message, and returns the ranks' messages that are there, if they are wanted."""
        store.set(f"{_PREFIX}{self._rank}", mine)
        if not (compares or wants_others):
            return {}
        keys = {rank: f"{_PREFIX}{rank}" for rank in range(self._world_size)}
        # The store would wait for a key that does not exist.
        if not self._have_all_come and not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if wants_others and store.check([key])}
        else:
            self._have_all_come = True
        return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}
