"""Lets all Checkpointers of a process leave at one step, and says on stderr how to continue."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkpointer import Checkpointer

_NAMED_AFTER_S = 20.0  # a wait for another rank, so that a script that hangs shows why within half a minute


class Company:
    """The Checkpointers of this process that are inside of their blocks.

    Each of them gets the notice in its own `step()`. The last one of a pass of the loop raises, so that all are saved
    after the same pass.
    """

    def __init__(self) -> None:
        self._members: dict[int, tuple[Checkpointer, Callable[[], None]]] = {}
        self._leaving: set[int] = set()  # members that have saved their last steps and wait for others

    def join(self, member: Checkpointer, save_last: Callable[[], None]) -> None:
        """Adds a Checkpointer that enters its block, and what saves its last step unless it is saved."""
        self._members[id(member)] = member, save_last

    def part(self, member: Checkpointer) -> None:
        """Removes a Checkpointer that leaves its block."""
        self._members.pop(id(member), None)
        self._leaving.discard(id(member))

    def is_leaving(self) -> bool:
        """Returns whether a member has saved its last step and waits for another one."""
        return bool(self._leaving)

    def may_leave(self, member: Checkpointer) -> bool:
        """Saves the last steps of all. Returns False if another member has yet to make the step of this pass.

        A member waits once: others may step more rarely.
        """
        self._members[id(member)][1]()
        has_waited = id(member) in self._leaving
        self._leaving.add(id(member))
        others = [one for one in self._members.values() if one[0] is not member]
        if not has_waited and any(one.steps < member.steps and id(one) not in self._leaving for one, _ in others):
            return False
        for _, save_last in others:
            save_last()
        return True


def say_how_to_continue(reason: str | None, steps: int, directory: Path) -> None:
    """Writes on stderr why the process ends, how far the run is, and how to continue."""
    reason = reason or "another rank has it"
    file = reason.removeprefix("the file ").removesuffix(" exists")
    start = "Start" if file == reason else f"Delete {file}, then start"
    saved = f"Step {steps} is saved in {directory}" if steps else "No step was made"
    sys.stderr.write(
        f"drivetrain ends this process on a notice: {reason}. {saved}. {start} the script again to continue.\n"
    )
    sys.stderr.flush()


@contextmanager
def named_wait(describe: Callable[[], str | None], log: Callable[[str], None], limit: float) -> Iterator[None]:
    """Logs what the block waits for, if it takes long and `describe` returns a text then. It waits `limit` seconds."""

    def name() -> None:
        if (text := describe()) is not None:
            log(text)

    timer = threading.Timer(min(_NAMED_AFTER_S, limit / 2), name)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
