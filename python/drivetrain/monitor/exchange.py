"""Shows every rank's last steps and place to the others, through the process group's store, without a collective."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..ddp.control_block import ControlBlock, connection_to_store, host_name
from .hangs import Place
from .stragglers import WINDOW, Straggler, find_straggler, profile_of

_PERIOD_S = 1.0
_PREFIX = "drivetrain/monitor/"


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
        self._is_new = False

    def add(self, phases: Mapping[str, float]) -> None:
        """Notes a step of this rank: seconds by phase."""
        self._steps.append(phases)
        self._is_new = True

    def exchange(self, place: Place, wants_others: bool) -> tuple[Straggler | None, dict[int, Place]]:
        """Publishes the place, and the noted steps.

        Args:
            place: Of this rank.
            wants_others: True reads the places of the other ranks.

        Returns:
            On rank 0 the straggler, if there is one; and the places that were asked for. Both by global ranks.
        """
        profile = profile_of(list(self._steps)) if self._is_new else None
        mine = json.dumps(profile) if profile is not None else ""
        self._is_new = False

        def ask(store: Any) -> tuple[list[bytes], list[tuple[int, bytes]]]:
            store.set(_place_of(self._rank), json.dumps(place))
            if mine:
                store.set(f"{_PREFIX}{self._rank}", mine)
            keys = [f"{_PREFIX}{rank}" for rank in range(self._world_size)]
            # The store would wait for a key that does not exist.
            profiles = list(store.multi_get(keys)) if mine and self._rank == 0 and store.check(keys) else []
            others = [rank for rank in range(self._world_size) if rank != self._rank] if wants_others else []
            return profiles, [(rank, store.get(_place_of(rank))) for rank in others if store.check([_place_of(rank)])]

        profiles, places = self._store.ask(ask) or ([], [])
        straggler = None
        if profiles:
            self.has_compared = True
            straggler = find_straggler({self._ranks[rank]: json.loads(text) for rank, text in enumerate(profiles)})
        return straggler, {self._ranks[rank]: json.loads(text) for rank, text in places}


def _place_of(rank: int) -> str:
    return f"{_PREFIX}place/{rank}"
