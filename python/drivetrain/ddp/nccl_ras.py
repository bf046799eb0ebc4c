"""Asks NCCL which ranks are behind in its collectives, for reports of hangs.

Since version 2.24, NCCL has a thread for "reliability, availability and serviceability" (RAS) in each process. One
process of a host answers for the whole job on a local socket, port 28028 or $NCCL_RAS_ADDR; since 2.28.7 in JSON. Its
counts of collectives need no cooperation of the training, so that they also explain torch's DDP and FSDP.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

ADDRESS = "localhost:28028"
VARIABLE = "NCCL_RAS_ADDR"
_MOST_BYTES = 64 << 20  # of an answer; a rank takes about 600
_RANKS_NAMED = 4
_NO_ERRORS = (0, 7)  # ncclSuccess, ncclInProgress
_POINT_TO_POINT = ("Send", "Recv", "SendRecv")


def describe(timeout_s: float = 5.0) -> str:
    """Returns sentences that name the ranks that are missing or behind; "" if NCCL names none or does not answer.

    Asks twice, and names what both answers agree on: in a training that goes on, some rank is always ahead.

    Args:
        timeout_s: Seconds for everything: connections, NCCL's questions to the other hosts, and a pause.
    """
    try:
        before = _facts(ask(0.4 * timeout_s))
        if not before:
            return ""
        time.sleep(0.2 * timeout_s)
        now = _facts(ask(0.4 * timeout_s))
    # No NCCL on this host, RAS switched off, a version that answers in text, or another program on that port.
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    both = {which: [fact for fact in facts if fact in before.get(which, [])] for which, facts in now.items()}
    return " ".join(_sentence(which, facts) for which, facts in both.items() if facts)


def ask(timeout_s: float) -> Mapping[str, Any]:
    """Returns the status of all communicators of the job, as NCCL words it.

    Raises:
        OSError: Nothing answers there, or not within `timeout_s`.
        ValueError: The answer is not JSON. NCCL before 2.28.7 answers in text.
    """
    host, _, port = os.environ.get(VARIABLE, ADDRESS).rpartition(":")
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
        # NCCL itself waits for silent peers. It gets half of the time, so that it can say which are silent.
        connection.sendall(f"TIMEOUT {timeout_s / 2:g}\nSET FORMAT json\nSTATUS\n".encode())
        received = bytearray()
        while len(received) <= _MOST_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = connection.recv(1 << 16)
            if not part:  # NCCL closes the connection after its answer
                break
            received += part
    timeout_said, format_said, status = (*received.decode().split("\n", 2), "", "")[:3]
    if (timeout_said, format_said) != ("OK", "OK"):
        raise ValueError(f"NCCL answered {timeout_said!r} and {format_said!r}, expected OK twice")
    answer: Mapping[str, Any] = json.loads(status)
    return answer


def _facts(answer: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns what is wrong with each communicator, by its name; nothing for the others."""
    found = {}
    for communicator in answer["communicators"]:
        ranks = communicator["ranks"]
        facts = []
        for rank in communicator["missing_ranks"]:
            how = "does not answer" if rank["status"]["unresponsive"] else "has left it"
            facts.append(f"{_name(rank)} {'is dead' if rank['status']['considered_dead'] else how}")
        facts += _behind(ranks)
        for rank in ranks:
            if rank["status"]["async_error"] not in _NO_ERRORS:
                facts.append(f"{_name(rank)} has NCCL error {rank['status']['async_error']}")
        if facts:
            found[f"the communicator {communicator['hash']} of {communicator['size']} ranks"] = facts
    return found


def _sentence(which: str, facts: list[str]) -> str:
    if len(facts) > _RANKS_NAMED:
        facts = [*facts[:_RANKS_NAMED], f"{len(facts) - _RANKS_NAMED} more"]
    return f"NCCL says of {which}: {'; '.join(facts)}."


def _behind(ranks: list[Mapping[str, Any]]) -> list[str]:
    """Returns which ranks have made fewer collectives of a kind than another rank, the furthest behind first.

    Sends and receives are not compared, because ranks may differ in them.
    """
    counts = [
        Counter({k: v for k, v in rank["collective_counts"].items() if k not in _POINT_TO_POINT}) for rank in ranks
    ]
    most: Counter[str] = Counter()
    for each in counts:
        most |= each
    found = []
    for rank, own in sorted(zip(ranks, counts, strict=True), key=lambda one: one[1].total()):
        if lacking := [f"{own[kind]} of {most[kind]} {kind}" for kind in most - own]:
            found.append(f"{_name(rank)} has made {', '.join(lacking)}")
    return found


def _name(rank: Mapping[str, Any]) -> str:
    return f"rank {rank['rank']} (process {rank['pid']} on {rank['host']})"
