"""Runs saves in forked processes under the shim. A server process imports torch once and forks for every round."""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpoint_crashes.contents import KEEP, KEYS, problems_of, step_of, tensors_of
from drivetrain.checkpointing import Coordinator, Store

ROUND_LIMIT_S = 120.0
SAVES = 3  # per round
PHASES = {"before": 1, "within": 2, "after": 3}

shim: Any = ctypes.CDLL(None)


def train(plan: dict[str, Any], rank: int, answer: int) -> None:
    """Opens a store as a restarted run does, checks what it finds, and saves until it is killed."""
    directory, world_size = Path(plan["directory"]), plan["world_size"]

    def tell(**message: Any) -> None:
        os.write(answer, (json.dumps({"rank": rank, **message}) + "\n").encode())

    shim.shim_arm(str(directory).encode(), plan.get("trace", "").encode())
    kill = plan.get("kill")
    mine = kill is not None and kill["rank"] == rank
    if mine and kill["early"]:
        shim.shim_kill(kill["at"], PHASES[kill["phase"]])
    coordinator = None
    if world_size > 1:
        coordinator = Coordinator(dist.FileStore(plan["store"], world_size), rank, world_size)
    encryption = KEYS if plan.get("is_encrypted") else None
    with Store(
        directory,
        rank=rank,
        world_size=world_size,
        coordinator=coordinator,
        keep=KEEP,
        timeout=30,
        lock_timeout=30,
        encryption=encryption,
    ) as store:
        if rank == 0:
            for problem in problems_of(directory, plan["acknowledged"], world_size, encryption):
                tell(problem=problem)
        if mine and not kill["early"]:
            shim.shim_kill(kill["at"], PHASES[kill["phase"]])
        before = shim.shim_calls()
        for count in range(plan["first"], plan["first"] + SAVES):
            save = store.save(step_of(count), tensors_of(count, rank), {"count": count})
            save.result(30)
            shim.shim_mark(count)
            tell(acknowledged=count)
        tell(calls=shim.shim_calls() - before)


def run_round(plan: dict[str, Any]) -> dict[str, Any]:
    """Forks one process per rank, ends all of them when one ends by a signal, and returns what they told."""
    draw = random.Random(plan.get("seed"))
    readers, pids = [], []
    for rank in range(plan["world_size"]):
        reader, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                train(plan, rank, answer)
                status = 0
            except BaseException:
                os.write(answer, (json.dumps({"rank": rank, "problem": traceback.format_exc()}) + "\n").encode())
            os._exit(status)
        os.close(answer)
        readers.append(reader)
        pids.append(pid)
    after_s = plan.get("kill_after_s")
    if after_s is not None:
        select.select([], [], [], after_s * draw.random())
        os.kill(pids[0], signal.SIGKILL)
    statuses = _await_all(pids)
    told: list[dict[str, Any]] = []
    for reader in readers:
        with os.fdopen(reader, "rb") as stream:
            told += [json.loads(line) for line in stream.read().splitlines()]
    killed = [status for status in statuses if status == -signal.SIGKILL]
    # A rank that outlives another reports that as a failed save; its own death follows at once.
    problems = [one["problem"] for one in told if "problem" in one and not (killed and "not saved" in one["problem"])]
    return {
        "killed": len(killed),
        "acknowledged": max((one["acknowledged"] for one in told if "acknowledged" in one), default=0),
        "calls": max((one["calls"] for one in told if "calls" in one), default=0),
        "problems": problems,
    }


def _await_all(pids: list[int]) -> list[int]:
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + ROUND_LIMIT_S
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] < 0:  # the host of this rank is gone, and its peers with it
                    for other in set(pids) - set(statuses):
                        os.kill(other, signal.SIGKILL)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(statuses):
                os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"a round did not end within {ROUND_LIMIT_S:g} s")
        time.sleep(1e-3)
    return [statuses[pid] for pid in pids]


def main() -> None:
    """Answers one line of JSON on stdout for each plan on stdin."""
    for line in sys.stdin:
        try:
            answer = run_round(json.loads(line))
        except Exception:
            answer = {"problems": [traceback.format_exc()], "killed": 0, "acknowledged": 0, "calls": 0}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
