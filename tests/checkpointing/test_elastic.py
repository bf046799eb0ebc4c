"""Tests trainings whose ranks are killed, join or leave: restarts by torchrun, and ranks that continue in place."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_training import EPOCHS, EXIT_CODE

from drivetrain.checkpointing import continue_in_place
from ports import free_port
from warm_python import warm_environ, warm_python

PROGRAM = Path(__file__).with_name("elastic_training.py")
LIMIT_S = 240.0
SAMPLES, BATCH = 48, 2


def written_plan(folder: Path, **options: Any) -> Path:
    """Writes what happens in a training. `kills`, `raises` and `errs` have the step by rank."""
    defaults = {"kills": {}, "raises": {}, "errs": {}, "every": None, "hold": None, "pause_s": 0.0}
    plan = folder / "plan.json"
    plan.write_text(json.dumps(defaults | options | {"folder": str(folder), "directory": str(folder / "runs")}))
    return plan


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Returns what all ranks have told, ordered by restart."""
    texts = [path.read_text() for path in sorted(folder.glob("rank-*.jsonl"))]
    return sorted((json.loads(line) for text in texts for line in text.splitlines()), key=lambda line: line["restart"])


class Agents:
    """Starts torchrun's agents on this host as if each were a node, and ends what is left of them."""

    def __init__(self, folder: Path, nodes: str, **options: Any) -> None:
        self._plan = written_plan(folder, samples=SAMPLES, **options)
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
        return lines_of(self._folder)

    def await_line(self, key: str, at_least: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not any(line.get(key, -1) >= at_least for line in self.lines()):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)


def assert_each_sample_once(
    lines: list[dict[str, Any]], last: Mapping[int, int], key: str = "world_size", samples: int = SAMPLES
) -> None:
    """Checks that each epoch had each sample once, but for the steps that were repeated: those after `last` by key."""
    counted: Counter[tuple[int, int]] = Counter()
    for line in lines:
        if "step" in line and line["step"] <= last.get(line[key], 1000):
            counted.update((line["epoch"], sample) for sample in line["samples"])
    assert set(counted) == {(epoch, sample) for epoch in range(EPOCHS) for sample in range(samples)}
    assert set(counted.values()) == {1}


@pytest.mark.parametrize(("victim", "every"), [(1, None), (0, None), (1, 3)])
def test_torchrun_restarts_after_a_kill(tmp_path: Path, victim: int, every: int | None) -> None:
    with Agents(tmp_path, "1", kills={victim: 8}, every=every) as agents:
        agent = agents.start(nproc=2)
        assert agent.wait(LIMIT_S) == 0, agents.output()
        lines = agents.lines()
    begins = {line["restart"]: line["begin"] for line in lines if "begin" in line}
    assert begins[0] == 0
    # Without `every` each step is saved before the next one begins: step 8 was in progress. With it, a save that is due
    # while the one before is being written comes a step later.
    assert begins[1] in ((7,) if every is None else (3, 6, 7)), agents.output()
    assert_each_sample_once(lines, {0: begins[1]}, "restart")
    ends = [line for line in lines if "end" in line]
    assert [line["end"] for line in ends] == [EPOCHS * SAMPLES // (2 * BATCH)] * 2
    assert ends[0]["weights"] == ends[1]["weights"]


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
    assert_each_sample_once(lines, {2: alone["begin"]})


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


# ---- Ranks that continue in place.

FEW = 36  # samples


def run(folder: Path, *, world_size: int = 4, min_ranks: int = 1, **options: Any) -> list[tuple[int, str]]:
    """Runs the program on each rank, and returns exit codes and errors."""
    (folder / "runs").mkdir()
    plan = written_plan(folder, samples=FEW, world_size=world_size, min_ranks=min_ranks, **options)
    command = [warm_python(), str(PROGRAM), str(plan)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(world_size)]
    try:
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, errors, strict=True)]


def begins_of(folder: Path, name: int) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / f"rank-{name}.jsonl").read_text().splitlines())
    return [line for line in lines if "begin" in line]


def test_the_ranks_that_are_left_continue(tmp_path: Path) -> None:
    """First the rank that leads dies, then another one: 4, 3 and 2 ranks."""
    ranks = run(tmp_path, kills={0: 3, 2: 6})
    assert [code for code, _ in ranks] == [-9, 0, -9, 0], ranks
    begins = begins_of(tmp_path, 3)
    assert [line["world_size"] for line in begins] == [4, 3, 2]
    assert [line["rank"] for line in begins] == [3, 2, 1]
    assert [line["begin"] for line in begins[1:]] == [2, 5]  # no complete step is repeated
    lines = lines_of(tmp_path)
    assert_each_sample_once(lines, {4: begins[1]["begin"], 3: begins[2]["begin"]}, samples=FEW)
    weights = [line["weights"] for line in lines if "end" in line]
    assert weights == weights[:1] * 2
    errors = ranks[3][1]
    assert "rank 0 (process " in errors
    assert "3 of 4 ranks continue" in errors
    assert "2 of 3 ranks continue" in errors
    assert not list((tmp_path / "runs").glob(".survivors-*"))


def test_the_others_continue_without_a_rank_that_computes_wrongly(tmp_path: Path) -> None:
    ranks = run(tmp_path, errs={2: 4})
    assert [code for code, _ in ranks] == [0, 0, EXIT_CODE, 0], ranks
    begins = begins_of(tmp_path, 3)
    assert [line["world_size"] for line in begins] == [4, 3]
    assert 3 <= begins[1]["begin"] <= 3 + 4  # each rank repeats passes, and has its own repeated, within four checks
    errors = ranks[3][1]
    assert "rank 2 (process " in errors
    assert "it saw: gradients of one pass differ between ranks in step " in errors
    weights = [line["weights"] for line in lines_of(tmp_path) if "end" in line]
    assert weights == weights[:1] * 3


def test_a_rank_raises_an_error_of_its_own_and_too_few_ranks_raise(tmp_path: Path) -> None:
    """Rank 1 raises, ranks 0 and 2 continue, and once rank 2 has died, rank 0 is alone, which is too few."""
    ranks = run(tmp_path, raises={1: 3}, kills={2: 6}, world_size=3, min_ranks=2)
    assert [code for code, _ in ranks] == [1, 1, -9], ranks
    assert "ArithmeticError: a defect of the script" in ranks[1][1]
    assert [line["world_size"] for line in begins_of(tmp_path, 0)] == [3, 2]
    assert "2 of 3 ranks continue" in ranks[0][1]
    assert "1 of 2 ranks continue" not in ranks[0][1]


def test_a_process_without_a_group_is_told_what_to_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'no process group: call torch\.distributed\.init_process_group\("gloo"\)'):
        continue_in_place(lambda: None, tmp_path)
