"""Turns measured shares into advice: the cause and the remedy in one sentence, only where both were measured."""

import math
from dataclasses import dataclass

from .summary import Summary

_MIN_STEPS = 20
_SHARES = {"data": 0.10, "communication": 0.15, "recomputation": 0.15, "checkpoint": 0.05, "host": 0.15}


@dataclass(frozen=True)
class Setup:
    """The facts besides times that advice depends on.

    Attributes:
        num_workers: Number of the loader's workers; None if it is not known.
        num_cores: Cores that this process may use.
        sees_loader: True if the loop's waits for its loader are marked.
        ranks_are_even: True if the ranks were compared and none is slow. They then wait for the network.
    """

    num_workers: int | None = None
    num_cores: int = 1
    sees_loader: bool = True
    ranks_are_even: bool = False


def advise(summary: Summary, setup: Setup) -> dict[str, str]:
    """Returns a sentence by phase for every phase above its share; none before 20 steps of this rank count."""
    if summary.num_steps < _MIN_STEPS:
        return {}
    above = {phase: summary.share(phase) for phase, limit in _SHARES.items() if summary.share(phase) > limit}
    sentences: dict[str, str] = {}
    for phase, share in above.items():
        if sentence := _sentence(phase, share, summary, setup):
            sentences[phase] = sentence
    return sentences


def _sentence(phase: str, share: float, summary: Summary, setup: Setup) -> str | None:
    if phase == "data":
        return _of_data(share, summary, setup)
    per_step_ms = 1e3 * summary.phase_s[phase] / summary.num_steps
    if phase == "communication":
        if not setup.ranks_are_even:
            return None
        return (
            f"{share:.0%} exposed communication: {per_step_ms:.1f} ms of each step wait for gradients that backward "
            "does not hide. Two micro-batches per step under no_sync() would halve their share"
        )
    if phase == "recomputation":
        return (
            f"{share:.0%} recomputation: {per_step_ms:.1f} ms of each step run forward operations again; a larger "
            "activation budget, or fewer checkpointed regions, removes it if memory allows"
        )
    if phase == "checkpoint":
        return (
            f"{share:.0%} checkpoint: saves take {per_step_ms:.1f} ms per step; saving {math.ceil(share / 0.02)} times "
            "less often would bring them to 2 %"
        )
    if not setup.sees_loader:
        return (
            f"{share:.0%} of each step ({per_step_ms:.1f} ms) lies outside of forward, backward and optimizer: loop "
            "over monitor(loader), which tells how much of it waits for data"
        )
    return (
        f"{share:.0%} of each step ({per_step_ms:.1f} ms) lies outside of loading, forward, backward and optimizer: "
        "look for printing, logging and .item() in the loop"
    )


def _of_data(share: float, summary: Summary, setup: Setup) -> str | None:
    rest_s = (summary.wall_s - summary.phase_s["data"]) / summary.num_steps
    wait_s = summary.phase_s["data"] / summary.num_steps
    if not summary.samples or rest_s <= 0:
        return None
    could = summary.samples / summary.num_steps / rest_s
    rate = f"{summary.samples_per_s:,.0f} samples/s, the step could take {could:,.0f}"
    if setup.num_workers is None:
        return f"{share:.0%} waiting for data: the loader delivers {rate}; make it faster"
    if setup.num_workers == 0:
        # The loop itself loads: a batch takes wait_s, and n workers deliver one every wait_s / n.
        needed = max(math.ceil(wait_s / rest_s), 1)
        cause = f"the training process loads its batches itself and reaches {rate}"
    else:
        needed = max(math.ceil(setup.num_workers * (rest_s + wait_s) / rest_s), setup.num_workers + 1)
        workers = "1 worker delivers" if setup.num_workers == 1 else f"{setup.num_workers} workers deliver"
        cause = f"{workers} {rate}"
    cure = f"num_workers={needed} would do"
    if needed > setup.num_cores:
        cure += f" if they mostly wait: this process may use {setup.num_cores} cores"
    return f"{share:.0%} waiting for data: {cause}; {cure}"
