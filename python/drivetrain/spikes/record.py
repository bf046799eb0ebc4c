"""Holds what one run of a script has shown of its steps, for the processes of `drivetrain explain`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Batch(NamedTuple):
    """One batch that the script has taken from a DataLoader."""

    loader: int  # the iteration over a DataLoader, in the order in which they began
    number: int  # of the batch in that iteration
    dataset: int  # likewise, of the datasets
    indices: list[int]  # of its samples in the dataset; empty if they have none


@dataclass
class SeenStep:
    """One call of an optimizer's `step`, on one rank."""

    losses: list[float] = field(default_factory=list)  # of the backward passes since the step before
    norm: float = 0.0  # of this rank's gradients together, before the step
    rate: float = 0.0  # learning rate of the first group
    batches: list[Batch] = field(default_factory=list)  # taken since the step before


@dataclass
class RecordedSteps:
    """One run of the script on one rank."""

    steps: list[SeenStep] = field(default_factory=list)
    restored: int = 0  # the step of the checkpoint that it began with
    names: dict[str, str] = field(default_factory=dict)  # what the dataset calls replaced samples, by index
    error: str = ""  # why there are fewer steps than asked for

    @classmethod
    def of(cls, found: dict[str, Any]) -> RecordedSteps:
        """Returns the record that was written as JSON."""
        steps = [SeenStep(**one | {"batches": [Batch(*batch) for batch in one["batches"]]}) for one in found["steps"]]
        return cls(**found | {"steps": steps})
