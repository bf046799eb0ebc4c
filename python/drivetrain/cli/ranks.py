"""Checks all ranks together for `drivetrain doctor`: presence, versions, speed, connections, and all-reduces.

Rank 0 leads: it gives ranks tasks through the launcher's store, and judges their answers.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from drivetrain.cli import collectives, network, speed
from drivetrain.cli.finding import Finding, fail, not_applicable, passed
from drivetrain.cli.launch import LAUNCH_CURE, Launch, first_line

_DUPLICATE_CURE = "give every process a RANK of its own, and end processes that an earlier start left behind"
_LEAST_POLL_S, _MOST_POLL_S = 0.02, 0.5
_POLLS = 10  # the pause is that part of the time waited so far, so that many ranks of one machine leave it its cores
_LOOKS = 8  # ranks that measure again, one at a time
_SETTLE_S = 1.5  # before they do: the others, which have just been woken, then ask the store seldom

Show = Callable[[Sequence[Finding]], None]
_Cards = dict[int, dict[str, Any]]  # by rank: its host, versions, speed, address, failed checks and more


class Meeting:
    """Exchanges findings through the launcher's store. Rank 0 collects and shows them.

    The other ranks wait until rank 0 has shown everything, because a launcher ends all ranks when one fails.
    """

    _store: Store

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        self._launch = launch
        self._timeout_s = timeout_s
        self._num_tasks: Counter[int] = Counter()  # that rank 0 has given to each rank
        self._tasks: dict[str, Callable[..., Any]] = {
            "measure": self._measure_again,
            "probe": self._probe,
            "sum": self._sum,
            "leave": lambda: None,
        }

    def hold(self, own: list[Finding], versions: Mapping[str, str], show: Show) -> list[Finding]:
        """Runs the checks that need all ranks.

        Args:
            own: The findings of this rank alone.
            versions: The versions that must agree on all ranks.
            show: A function that prints findings. Rank 0 calls it; other ranks call it if the store cannot be reached.

        Returns:
            All findings that this rank knows.
        """
        rank = self._launch.rank
        with network.listening(self._launch.master_addr) as address:
            card = {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "versions": dict(versions),
                "flops_per_s": speed.flops_per_s(),
                "gpu": speed.own_gpu(),
                "address": asdict(address),
                "wrong": [asdict(finding) for finding in own if finding.status in ("FAIL", "WARN")],
            }
            try:
                self._store = self._open_store()
                is_first = self._store.add(f"arrived/{rank}", 1) == 1
                self._store.set(f"{'card' if is_first else 'duplicate'}/{rank}", json.dumps(card))
            except RuntimeError as error:
                text = f"no store at {self._launch.master}: {first_line(error)}"
                findings = [*own, fail("ranks", text, LAUNCH_CURE)]
                show(findings)
                return findings
            if not is_first:  # rank 0 reports it as well
                findings = [*own, fail("ranks", f"another process has RANK={rank} already", _DUPLICATE_CURE)]
                show(findings)
                self._wait(["shown"], 4 * self._timeout_s)
                return findings
            if rank == 0:
                return self._lead(own, show)
            self._follow()
            return own

    def _open_store(self) -> Store:
        """Connects to the store. Rank 0 starts it unless torchrun has.

        Raises:
            RuntimeError: No store answers in time.
        """
        serves = self._launch.rank == 0 and not self._launch.agent_store
        # TCPStore would wait too, but it writes native stacks to stderr when it gives up.
        if not serves and not _poll(self._launch.answers, self._timeout_s):
            raise RuntimeError(f"no process listens after {self._timeout_s:g} s")
        store = TCPStore(
            self._launch.master_addr,
            self._launch.master_port,
            self._launch.world_size,
            is_master=serves,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,  # lets rank 0 report which ranks are missing
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart
        return PrefixStore(f"drivetrain/doctor/{attempt}", store)

    def _lead(self, own: list[Finding], show: Show) -> list[Finding]:
        ranks = range(self._launch.world_size)
        self._wait([f"card/{rank}" for rank in ranks])
        cards = self._read({rank: f"card/{rank}" for rank in ranks})
        findings = [*own, *_wrong_elsewhere(cards, own)]
        if missing := [rank for rank in ranks if rank not in cards]:
            text = f"missing after {self._timeout_s:g} s: {_ranks(missing)} of {len(ranks)}"
            cure = f"start them with MASTER_ADDR:MASTER_PORT {self._launch.master}, or lower WORLD_SIZE"
            findings.append(fail("ranks", text, cure))
        else:
            findings += self._examine(cards)
        for rank, other in self._read({rank: f"duplicate/{rank}" for rank in cards}).items():
            processes = [f"{card['host']}, process {card['process']}" for card in (cards[rank], other)]
            text = f"two processes have RANK={rank}: {', and '.join(processes)}"
            findings.append(fail("ranks", text, _DUPLICATE_CURE))
        show(findings)
        self._store.set("shown", "yes")
        self._ask("leave", [rank for rank in cards if rank != 0])  # this process may run the store
        return findings

    def _follow(self) -> None:
        """Does the tasks that rank 0 gives, until it ends them. The tasks of other ranks may take a while."""
        for number in count():
            where = f"{self._launch.rank}/{number}"
            if not self._wait([f"task/{where}"], 10 * self._timeout_s):
                self._wait(["shown"], 3 * self._timeout_s)
                return
            task, details = json.loads(self._store.get(f"task/{where}"))
            with suppress(RuntimeError):  # rank 0 may have left
                self._store.set(f"answer/{where}", json.dumps(self._tasks[task](*details)))
            if task == "leave":
                return

    def _ask(self, task: str, ranks: Iterable[int], *details: object, limit_s: float | None = None) -> dict[int, Any]:
        """Lets ranks do a task at the same time; called by rank 0.

        Args:
            task: The name of the task.
            ranks: The ranks that do it.
            details: The arguments of the task.
            limit_s: Seconds that their answers may take; None means the timeout.

        Returns:
            The answers by rank, of the ranks that have answered in time.
        """
        answers = {}
        for rank in ranks:
            where = f"{rank}/{self._num_tasks[rank]}"
            self._num_tasks[rank] += 1
            self._store.set(f"task/{where}", json.dumps([task, details]))
            answers[rank] = f"answer/{where}"
        if 0 in answers:
            self._store.set(answers[0], json.dumps(self._tasks[task](*details)))
        self._wait(list(answers.values()), limit_s)
        return self._read(answers)

    def _read(self, keys: Mapping[int, str]) -> dict[int, Any]:
        """Returns the values of those keys, by rank, that the store has."""
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _wait(self, keys: list[str], seconds: float | None = None) -> bool:
        """Waits for keys; returns False if they do not appear in time or the store ends."""
        try:
            return _poll(lambda: self._store.check(keys), seconds or self._timeout_s)
        except RuntimeError:  # the store has ended
            return False

    # ---- The checks, which rank 0 leads.

    def _examine(self, cards: _Cards) -> list[Finding]:
        hosts = [cards[rank]["host"] for rank in range(len(cards))]
        speeds = {rank: card["flops_per_s"] for rank, card in cards.items()}
        self._look_again(speeds)
        findings = [*_compare(cards), speed.judge(speeds, hosts)]
        addresses = [cards[rank]["address"] for rank in range(len(cards))]
        self._store.set("addresses", json.dumps(addresses))  # once for all ranks
        answers = self._ask("probe", cards, limit_s=2 * self._timeout_s)
        found = {rank: [network.Probe(**probe) for probe in probes] for rank, probes in answers.items()}
        findings += network.judge([network.Address(**address) for address in addresses], found)
        findings.append(self._all_reduce(hosts, "gloo"))
        if why_not := _why_no_nccl(cards):
            findings.append(not_applicable("nccl-reduce", f"NCCL cannot run here: {why_not}"))
        else:
            findings.append(self._all_reduce(hosts, "NCCL"))
        return findings

    def _look_again(self, speeds: dict[int, float]) -> None:
        """Lets ranks that seem slow measure again, one at a time, while the others wait.

        Ranks that share a machine have disturbed each other's first measurements. The better one counts.
        """
        seen: set[int] = set()
        while len(seen) < _LOOKS and (rank := speed.slow_rank(speeds)) is not None and rank not in seen:
            seen.add(rank)
            speeds[rank] = max(speeds[rank], *self._ask("measure", [rank]).values(), 0.0)

    def _all_reduce(self, hosts: Sequence[str], backend: str) -> Finding:
        """Sums between all ranks. If that fails, searches for the host that breaks it."""
        numbers = count()

        def sums(ranks: Sequence[int], sizes: Sequence[int], round_s: float) -> dict[int, collectives.Outcome]:
            group = f"group/{backend}/{next(numbers)}"
            answers = self._ask("sum", ranks, backend, group, ranks, sizes, round_s, limit_s=3 * round_s)
            return {rank: collectives.Outcome(**outcome) for rank, outcome in answers.items()}

        def works(ranks: Sequence[int]) -> bool:
            outcomes = sums(ranks, collectives.SIZES[:1], collectives.ROUND_S)
            return len(outcomes) == len(ranks) and all(outcome.has_passed for outcome in outcomes.values())

        outcomes = sums(list(range(len(hosts))), collectives.SIZES, self._timeout_s)
        finding = collectives.judge(outcomes, len(hosts), backend)
        found = collectives.host_that_breaks(hosts, works) if finding.status == "FAIL" else ""
        return replace(finding, text=f"{finding.text}; {found}") if found else finding

    # ---- The tasks, which every rank does.

    def _measure_again(self) -> float:
        sleep(_SETTLE_S)
        return speed.flops_per_s()

    def _probe(self) -> list[dict[str, Any]]:
        addresses = [network.Address(**address) for address in json.loads(self._store.get("addresses"))]
        return [asdict(probe) for probe in network.probe_peers(self._launch.rank, addresses)]

    def _sum(
        self, backend: str, group: str, ranks: Sequence[int], sizes: Sequence[int], limit_s: float
    ) -> dict[str, Any]:
        store, rank = PrefixStore(group, self._store), ranks.index(self._launch.rank)
        return asdict(collectives.sum_up(store, rank, len(ranks), sizes, limit_s, backend))


def _why_no_nccl(cards: _Cards) -> str:
    """Returns why the ranks cannot sum over NCCL; "": they can."""
    without = [rank for rank in sorted(cards) if not cards[rank]["gpu"]]
    if without:
        return f"{_ranks(without)} of {len(cards)} without a GPU"
    if len({(card["host"], card["gpu"]) for card in cards.values()}) < len(cards):
        return "several ranks have one GPU"
    return ""


def _poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls a condition; returns False if it does not become true in time."""
    begin = monotonic()
    while not condition():
        waited = monotonic() - begin
        if waited > seconds:
            return False
        sleep(min(max(_LEAST_POLL_S, waited / _POLLS), _MOST_POLL_S))
    return True


def _wrong_elsewhere(cards: _Cards, own: Sequence[Finding]) -> list[Finding]:
    """Returns the findings of the other ranks. A finding on a whole host is reported once for it."""
    reported = {(cards[0]["host"], finding.name, finding.text) for finding in own} if 0 in cards else set()
    findings = []
    for rank, card in cards.items():
        for finding in (Finding(**wrong) for wrong in card["wrong"]):
            what = (card["host"], finding.name, finding.text)
            if rank != 0 and what not in reported:
                reported.add(what)
                findings.append(replace(finding, text=f"rank {rank}: {finding.text}"))
    return findings


def _compare(cards: _Cards) -> list[Finding]:
    """Returns a finding for each package whose version differs between ranks, or one that reports agreement."""
    findings = []
    for what in cards[0]["versions"]:
        ranks_of: dict[str, list[int]] = {}
        for rank, card in cards.items():
            ranks_of.setdefault(card["versions"][what], []).append(rank)
        if len(ranks_of) > 1:
            spelled_out = ", ".join(f"{version} on {_ranks(ranks)}" for version, ranks in ranks_of.items())
            cure = f"install the same {what} for every rank"
            findings.append(fail("versions", f"{what} differs: {spelled_out}", cure))
    versions = ", ".join(f"{what} {version}" for what, version in cards[0]["versions"].items())
    return findings or [passed("versions", f"equal on {len(cards)} ranks: {versions}")]


def _ranks(ranks: Sequence[int]) -> str:
    """Formats ranks; it lists at most eight and counts the rest."""
    listed = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
