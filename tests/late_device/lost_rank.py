"""Checks that a rank whose device waits for a killed rank, as under NCCL, gets an error that names the killed rank.

Usage: python lost_rank.py FOLDER, where FOLDER holds the built late_device.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import reduce
import torch.distributed as dist

import drivetrain

LIMIT_S = 1.0
LATEST_S = 30.0
KILLED_IN = 3  # step


def serve(folder: str, rank: int, port: int, answers: Any) -> None:
    reduce.load(folder)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("late", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    ddp = drivetrain.DistributedDataParallel(reduce.Net().to("late"), report_hang_after=LIMIT_S)
    began = 0.0
    try:
        for step in range(1, 6):
            if step == KILLED_IN:
                time.sleep(LIMIT_S)  # until each rank has received the other's progress
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            loss = ddp(reduce.inputs(rank, step).to("late"))
            loss.backward()
            next(ddp.parameters()).sum().item()
        answers.put("no step failed")
    except RuntimeError as error:
        again = ""
        try:
            ddp(reduce.inputs(rank, 0).to("late"))
        except RuntimeError as second:
            again = str(second)
        answers.put((str(error), again, time.monotonic() - began))


def main() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=serve, args=(sys.argv[1], rank, port, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    pid = ranks[1].pid
    try:
        error, again, seconds = answers.get(timeout=3 * LATEST_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert f"Rank 1 has ended: its process {pid} is gone, last seen" in error, error
    assert f"collectives of step {KILLED_IN}" in error, error
    assert again == error, again
    assert seconds < LATEST_S, seconds
    print("the rank that waits names the one that has ended")


if __name__ == "__main__":
    main()
