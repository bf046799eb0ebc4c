"""Checks all ranks together for `drivetrain doctor`: presence, versions, speed, connections, and an all-reduce."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from drivetrain.cli import collectives, network, speed
from drivetrain.cli.finding import Finding, fail, not_applicable, passed
from drivetrain.cli.launch import LAUNCH_CURE, Launch, first_line
from drivetrain.processes import machine

_DUPLICATE_CURE = "give every process a RANK of its own, and end processes that an earlier start left behind"
_LEAST_POLL_S, _MOST_POLL_S = 0.02, 0.5
_POLLS = 10  # the pause is that part of the time waited so far, so that many ranks of one machine leave it its cores
_LOOKS = 8  # ranks that measure again, one at a time
_SETTLE_S = 1.5  # before they do: the others, which have just been woken, then ask the store seldom

Show = Callable[[Sequence[Finding]], None]
_Cards = dict[int, dict[str, Any]]  # by rank: its host, machine, versions, cores, speed, failed checks and more


class Meeting:
    """Exchanges findings through the launcher's store. Rank 0 collects and shows them.

    The other ranks wait until rank 0 has shown everything, because a launcher ends all ranks when one fails.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        self._launch = launch
        self._timeout_s = timeout_s

    def hold(self, own: list[Finding], versions: Mapping[str, str], show: Show) -> list[Finding]:
        """Runs the checks that need all ranks.

        Args:
            own: The findings of this rank alone.
            versions: The versions that must agree on all ranks.
            show: A function that prints findings. Rank 0 calls it; other ranks call it if the store cannot be reached.

        Returns:
            All findings that this rank knows.
        """
        card = {
            "host": f"{socket.gethostname()}, process {os.getpid()}",
            "versions": dict(versions),
            "cores": speed.cores(),
            "machine": machine(),
            "flops_per_s": speed.flops_per_s(),
            "gpu": speed.own_gpu(),
            "wrong": [finding.as_dict() for finding in own if finding.status in ("FAIL", "WARN")],
        }
        try:
            store = self._open_store()
            if store.add(f"arrived/{self._launch.rank}", 1) > 1:
                return self._leave_as_duplicate(store, own, show)
            store.set(f"card/{self._launch.rank}", json.dumps(card))
        except RuntimeError as error:
            text = f"no store at {self._launch.master}: {first_line(error)}"
            findings = [*own, fail("ranks", text, LAUNCH_CURE)]
            show(findings)
            return findings
        if self._launch.rank == 0:
            return self._lead(store, own, show)
        return self._follow(store, own)

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

    def _leave_as_duplicate(self, store: Store, own: list[Finding], show: Show) -> list[Finding]:
        """Reports that another process has this rank's number. Rank 0 reports it as well."""
        store.set(f"duplicate/{self._launch.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        findings = [*own, fail("ranks", f"another process has RANK={self._launch.rank} already", _DUPLICATE_CURE)]
        show(findings)
        self._wait(store, ["shown"], 4 * self._timeout_s)  # a launcher ends all ranks when one fails
        return findings

    def _lead(self, store: Store, own: list[Finding], show: Show) -> list[Finding]:
        world_size = self._launch.world_size
        cards = self._collect(store)
        missing = [rank for rank in range(world_size) if rank not in cards]
        findings = [*own, *_wrong_elsewhere(cards, own)]
        store.set("crowds", json.dumps(speed.crowds(*_machines_and_cores(cards))))
        store.set("complete", "no" if missing else "yes")
        if missing:
            text = f"missing after {self._timeout_s:g} s: {_ranks(missing)} of {world_size}"
            cure = f"start them with MASTER_ADDR:MASTER_PORT {self._launch.master}, or lower WORLD_SIZE"
            findings.append(fail("ranks", text, cure))
        else:
            hosts = [_host(cards[rank]) for rank in range(world_size)]
            findings += _compare(cards)
            self._look_again(store, cards)
            findings += speed.judge(
                _speeds(cards),
                hosts,
                {rank: card["cores"] for rank, card in cards.items()},
            )
            findings += self._probe(store)
            findings.append(self._all_reduce(store, hosts, collectives.GLOO))
            why_not = _why_no_nccl(cards)
            store.set("nccl", "no" if why_not else "yes")
            if why_not:
                findings.append(not_applicable(collectives.NCCL.check, f"NCCL cannot run here: {why_not}"))
            else:
                findings.append(self._all_reduce(store, hosts, collectives.NCCL))
        findings += _duplicates(store, cards)
        show(findings)
        store.set("shown", "yes")
        self._wait(store, [f"done/{rank}" for rank in cards if rank != 0])  # this process may run the store
        return findings

    def _follow(self, store: Store, own: list[Finding]) -> list[Finding]:
        findings = list(own)
        # Rank 0 may start to wait one timeout later than this rank, and its all-reduce may take two more.
        if self._wait(store, ["complete"], 2 * self._timeout_s) and store.get("complete") == b"yes":
            self._measure_again(store)
            self._probe(store)
            self._join_all_reduce(store, collectives.GLOO)
            if self._wait(store, ["nccl"], 2 * self._timeout_s) and store.get("nccl") == b"yes":
                self._join_all_reduce(store, collectives.NCCL)
        self._wait(store, ["shown"], 3 * self._timeout_s)
        with suppress(RuntimeError):  # rank 0 may have left
            store.set(f"done/{self._launch.rank}", "yes")
        return findings

    def _collect(self, store: Store) -> _Cards:
        cards: _Cards = {}
        deadline = monotonic() + self._timeout_s
        for rank in range(self._launch.world_size):
            left = max(deadline - monotonic(), 0.1)
            if self._wait(store, [f"card/{rank}"], seconds=left):
                cards[rank] = json.loads(store.get(f"card/{rank}"))
        return cards

    def _wait(self, store: Store, keys: list[str], seconds: float | None = None) -> bool:
        """Waits for keys; returns False if they do not appear in time or the store ends."""
        try:
            return _poll(lambda: store.check(keys), seconds or self._timeout_s)
        except RuntimeError:  # the store has ended
            return False

    def _look_again(self, store: Store, cards: _Cards) -> None:
        """Lets ranks that seem slow measure again, one at a time, while the others wait.

        Ranks that share a machine have disturbed each other's first measurements. The better one counts.
        """
        number = 0
        seen: set[int] = set()
        while number < _LOOKS:
            rank = speed.slow_rank(_speeds(cards))
            if rank is None or rank in seen:
                break
            seen.add(rank)
            store.set(f"again/{number}", str(rank))
            if rank == self._launch.rank:
                sleep(_SETTLE_S)
                again = speed.flops_per_s()
            elif self._wait(store, [f"again/{number}/measured"]):
                again = float(store.get(f"again/{number}/measured"))
            else:
                again = 0.0
            cards[rank]["flops_per_s"] = max(cards[rank]["flops_per_s"], again)
            number += 1
        store.set(f"again/{number}", "")

    def _measure_again(self, store: Store) -> None:
        """Measures again if rank 0 asks for it, until rank 0 ends it."""
        for number in range(_LOOKS + 1):
            if not self._wait(store, [f"again/{number}"], 2 * self._timeout_s):
                return
            rank = store.get(f"again/{number}").decode()
            if not rank:
                return
            if int(rank) == self._launch.rank:
                sleep(_SETTLE_S)
                store.set(f"again/{number}/measured", str(speed.flops_per_s()))

    def _probe(self, store: Store) -> list[Finding]:
        """Tests the connections to other ranks.

        Returns:
            On rank 0 the findings on all ranks' figures; on the other ranks none.
        """
        ranks = range(self._launch.world_size)
        with network.Listener(self._launch.master_addr) as listener:
            store.set(f"address/{self._launch.rank}", json.dumps(asdict(listener.address)))
            if not self._wait(store, [f"address/{rank}" for rank in ranks]):
                text = f"a rank has not opened its port after {self._timeout_s:g} s"
                return [fail("network", text, LAUNCH_CURE)]
            addresses = [network.Address(**json.loads(store.get(f"address/{rank}"))) for rank in ranks]
            probes = network.probe_peers(self._launch.rank, addresses)
            crowd = self._crowd(store)
            if probes and self._has_turn(store, crowd):
                probes[0] = network.measure_link(probes[0], addresses[probes[0].peer], is_crowded=bool(crowd))
            store.set(f"probes/{self._launch.rank}", json.dumps([probe.as_dict() for probe in probes]))
            keys = [f"probes/{rank}" for rank in ranks]
            # A listener must outlive the other ranks' probes. The last turn may begin one timeout after this rank's.
            self._wait(store, keys, 2 * self._timeout_s)
            if self._launch.rank != 0:
                return []
            found = {
                rank: [network.Probe(**probe) for probe in json.loads(store.get(f"probes/{rank}"))]
                for rank in ranks
                if store.check([f"probes/{rank}"])
            }
        return network.judge(addresses, found)

    def _crowd(self, store: Store) -> list[int]:
        """Returns the ranks of this rank's machine if it has too few cores for them; none otherwise."""
        return next((ranks for ranks in json.loads(store.get("crowds")) if self._launch.rank in ranks), [])

    def _has_turn(self, store: Store, crowd: list[int]) -> bool:
        """Waits until this rank may measure its link; returns False if its turn does not come in time.

        Ranks that crowd a machine measure one after another. At the same time they would delay each other's packets.
        """
        before = crowd[: crowd.index(self._launch.rank)] if crowd else []
        return not before or self._wait(store, [f"probes/{before[-1]}"])

    def _all_reduce(self, store: Store, hosts: Sequence[str], backend: collectives.Backend) -> Finding:
        """Sums between all ranks. If that fails, rank 0 searches for the host that breaks it."""
        store = PrefixStore(backend.name, store)
        self._sum(store, backend)
        ranks = range(self._launch.world_size)
        self._wait(store, [f"sum/{rank}" for rank in ranks], 3 * self._timeout_s)
        outcomes = {
            rank: collectives.Outcome(**json.loads(store.get(f"sum/{rank}")))
            for rank in ranks
            if store.check([f"sum/{rank}"])
        }
        finding = collectives.judge(outcomes, self._launch.world_size, backend)
        store.set("search", "yes" if finding.status == "FAIL" else "no")
        if finding.status != "FAIL":
            return finding
        found = collectives.lead_search(store, 0, hosts, self._waiting(store), backend)
        return collectives.named(finding, found)

    def _join_all_reduce(self, store: Store, backend: collectives.Backend) -> None:
        store = PrefixStore(backend.name, store)
        self._sum(store, backend)
        if self._wait(store, ["search"], 4 * self._timeout_s) and store.get("search") == b"yes":
            collectives.follow_search(store, self._launch.rank, self._waiting(store), backend)

    def _waiting(self, store: Store) -> collectives.Wait:
        return lambda keys, seconds: self._wait(store, keys, seconds)

    def _sum(self, store: Store, backend: collectives.Backend) -> None:
        launch, prefix = self._launch, PrefixStore("group", store)
        outcome = collectives.sum_up(
            prefix, launch.rank, launch.world_size, collectives.SIZES, self._timeout_s, backend
        )
        with suppress(RuntimeError):  # the store has ended
            store.set(f"sum/{launch.rank}", json.dumps(asdict(outcome)))


def _why_no_nccl(cards: _Cards) -> str:
    """Returns why the ranks cannot sum over NCCL; "": they can."""
    without = [rank for rank in sorted(cards) if not cards[rank]["gpu"]]
    if without:
        return (
            f"{_ranks(without)} of {len(cards)} has no GPU" if len(without) == 1 else f"{_ranks(without)} have no GPU"
        )
    gpus = [(_host(card), card["gpu"]) for card in cards.values()]
    if len(set(gpus)) < len(gpus):
        return "several ranks have one GPU"
    return ""


def _speeds(cards: _Cards) -> dict[int, float]:
    """Returns the speeds that can be compared, by rank."""
    return {rank: cards[rank]["flops_per_s"] for rank in speed.comparable(*_machines_and_cores(cards))}


def _machines_and_cores(cards: _Cards) -> tuple[dict[int, str], dict[int, list[int]]]:
    """Returns the machine and the cores of each rank."""
    return {rank: card["machine"] for rank, card in cards.items()}, {
        rank: card["cores"] for rank, card in cards.items()
    }


def _poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls a condition; returns False if it does not become true in time."""
    begin = monotonic()
    while not condition():
        waited = monotonic() - begin
        if waited > seconds:
            return False
        sleep(min(max(_LEAST_POLL_S, waited / _POLLS), _MOST_POLL_S))
    return True


def _duplicates(store: Store, cards: _Cards) -> list[Finding]:
    return [
        fail(
            "ranks",
            f"two processes have RANK={rank}: {card['host']}, and {store.get(f'duplicate/{rank}').decode()}",
            _DUPLICATE_CURE,
        )
        for rank, card in cards.items()
        if store.check([f"duplicate/{rank}"])
    ]


def _wrong_elsewhere(cards: _Cards, own: Sequence[Finding]) -> list[Finding]:
    """Returns the findings of the other ranks. A finding on a whole host is reported once for it."""
    reported = {(_host(cards[0]), finding.name, finding.text) for finding in own} if 0 in cards else set()
    findings = []
    for rank, card in cards.items():
        for finding in card["wrong"]:
            what = (_host(card), finding["name"], finding["text"])
            if rank != 0 and what not in reported:
                reported.add(what)
                text = f"rank {rank}: {finding['text']}"
                findings.append(Finding(finding["name"], finding["status"], text, finding["cure"]))
    return findings


def _host(card: Mapping[str, Any]) -> str:
    return str(card["host"]).partition(",")[0]


def _compare(cards: _Cards) -> list[Finding]:
    """Returns a finding for each package whose version differs between ranks, or one that reports agreement."""
    findings = []
    for what in cards[0]["versions"]:
        by_version = _ranks_by({rank: card["versions"][what] for rank, card in cards.items()})
        if len(by_version) > 1:
            cure = f"install the same {what} for every rank"
            findings.append(fail("versions", f"{what} differs: {_spelled_out(by_version)}", cure))
    if findings:
        return findings
    versions = ", ".join(f"{what} {version}" for what, version in cards[0]["versions"].items())
    return [passed("versions", f"equal on {len(cards)} ranks: {versions}")]


def _ranks_by(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _spelled_out(groups: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())


def _ranks(ranks: Sequence[int]) -> str:
    """Formats ranks; it lists at most eight and counts the rest."""
    listed = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
