"""Tests restarts by torchrun: ranks are killed, others join or leave, and the training repeats one step at most."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from warm_python import warm_environ, warm_python

PROGRAM = Path(__file__).with_name("elastic_training.py")
LIMIT_S = 240.0
SAMPLES, EPOCHS, BATCH = 48, 2, 2


class Agents:
    """Starts torchrun's agents on this host as if each were a node, and ends what is left of them."""

    def __init__(self, folder: Path, nodes: str, **options: Any) -> None:
        defaults = {"kills": [], "every": None, "hold": None, "pause_s": 0.0}
        plan = defaults | options | {"folder": str(folder), "directory": str(folder / "runs")}
        self._plan = folder / "plan.json"
        self._plan.write_text(json.dumps(plan))
        self._folder, self._nodes, self._port = folder, nodes, free_port()
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self, nproc: int = 1, python: str = "") -> subprocess.Popen[bytes]:
        command = [python or warm_python(), "-m", "torch.distributed.run", "--nnodes", self._nodes]
        command += ["--nproc-per-node", str(nproc), "--max-restarts", "3", "--monitor-interval", "0.2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic"]
        alive = "keep_alive_interval=1,keep_alive_max_attempt=12"  # a loaded machine may be late
        command += ["--rdzv-conf", f"last_call_timeout=5,join_timeout=60,{alive}", "--local-addr", "127.0.0.1"]
        output = (self._folder / f"agent-{len(self._agents)}.log").open("wb")
        # torchrun gives restarted ranks the store of the ranks before, whose addresses gloo then takes for new ones.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = {**warm_environ(), **own_store, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with output:
            agent = subprocess.Popen(
                [*command, str(PROGRAM), str(self._plan)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._agents.append(agent)
        return agent

    def serves_the_rendezvous(self, agent: subprocess.Popen[bytes]) -> bool:
        """Returns whether that agent has opened the port of the rendezvous. Whichever agent comes first does."""
        tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [row.split() for table in tables for row in table]
        listening = {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == self._port}
        opened = set()
        for path in Path(f"/proc/{agent.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened.add(str(path.readlink()))
        return any(f"socket:[{inode}]" in opened for inode in listening)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *exception: object) -> None:
        for agent in self._agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait(30)

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self._folder.glob("agent-*.log")))

    def lines(self) -> list[dict[str, Any]]:
        """Returns what ranks have told, ordered by restart."""
        found = []
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            rank = int(path.stem.removeprefix("rank-"))
            found += [{"rank": rank, **json.loads(line)} for line in path.read_text().splitlines()]
        return sorted(found, key=lambda line: line["restart"])

    def await_line(self, key: str, at_least: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not any(line.get(key, -1) >= at_least for line in self.lines()):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)


def assert_each_sample_once(
    lines: list[dict[str, Any]], resumed_at: int, is_later: Callable[[dict[str, Any]], bool]
) -> None:
    """Checks that each epoch had each sample once, but for the steps that were repeated after a restart."""
    counted: Counter[tuple[int, int]] = Counter()
    for line in lines:
        if "step" in line and (is_later(line) or line["step"] <= resumed_at):
            counted.update((line["epoch"], sample) for sample in line["samples"])
    assert set(counted) == {(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)}
    assert set(counted.values()) == {1}


@pytest.mark.parametrize(("victim", "every"), [(1, None), (0, None), (1, 3)])
def test_torchrun_restarts_after_a_kill(tmp_path: Path, victim: int, every: int | None) -> None:
    kills = [{"restart": 0, "step": 8, "rank": victim}]
    with Agents(tmp_path, "1", kills=kills, every=every) as agents:
        agent = agents.start(nproc=2)
        assert agent.wait(LIMIT_S) == 0, agents.output()
        lines = agents.lines()
    begins = {line["restart"]: line["begin"] for line in lines if "begin" in line}
    assert begins[0] == 0
    # Without `every` each step is saved before the next one begins: step 8 was in progress. With it, a save that is due
    # while the one before is being written comes a step later.
    assert begins[1] in ((7,) if every is None else (3, 6, 7)), agents.output()
    assert_each_sample_once(lines, begins[1], lambda line: line["restart"] == 1)
    ends = [line for line in lines if "end" in line]
    assert [line["end"] for line in ends] == [EPOCHS * SAMPLES // (2 * BATCH)] * 2
    assert ends[0]["weight"] == ends[1]["weight"]


def test_a_host_leaves(tmp_path: Path) -> None:
    """The agent and the rank of a second host vanish, and the first one continues alone."""
    with Agents(tmp_path, "1:2", pause_s=0.1) as agents:
        # A fork is another process than its program, and this test looks for what its agents have opened.
        first, second = agents.start(python=sys.executable), agents.start(python=sys.executable)
        agents.await_line("step", 5)
        if agents.serves_the_rendezvous(second):  # torchrun survives the loss of any other agent only
            first, second = second, first
        (pid,) = (line["pid"] for line in agents.lines() if line.get("begin") == 0 and line["rank"] == 1)
        is_of_second = str(second.pid) in Path(f"/proc/{pid}/stat").read_text().split()[3]
        os.killpg(second.pid, signal.SIGKILL)
        rank = pid if is_of_second else next(line["pid"] for line in agents.lines() if line["rank"] == 0)
        os.kill(rank, signal.SIGKILL)
        assert first.wait(LIMIT_S) == 0, agents.output()
        lines = agents.lines()
    (alone,) = (line for line in lines if "begin" in line and line["world_size"] == 1)
    done = max(line["step"] for line in lines if "step" in line and line["world_size"] == 2)
    assert done - 1 <= alone["begin"] <= done
    assert_each_sample_once(lines, alone["begin"], lambda line: line["world_size"] == 1)


def test_a_host_joins(tmp_path: Path) -> None:
    """torchrun ends the ranks with SIGTERM, and all three continue with the step that was saved then."""
    with Agents(tmp_path, "1:3", hold=(2, 6)) as agents:
        for _ in range(2):
            agents.start()
        agents.await_line("step", 6)
        agents.start()
        for agent in agents._agents:
            assert agent.wait(LIMIT_S) == 0, agents.output()
        lines = agents.lines()
    begins = {line["rank"]: line["begin"] for line in lines if "begin" in line and line["world_size"] == 3}
    assert set(begins) == {0, 1, 2}
    assert len(set(begins.values())) == 1
    # The second host may join only with the third.
    done = max(line["step"] for line in lines if "step" in line and line["world_size"] < 3)
    assert begins[0] in (done, done + 1)  # the last step was saved, and may not have been told any more
    steps = {line["step"] for line in lines if "step" in line and line["world_size"] == 3}
    assert min(steps) == begins[0] + 1
