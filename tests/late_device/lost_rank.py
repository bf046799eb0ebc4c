"""Checks what a rank says whose device waits for another rank, as under NCCL.

Usage: python lost_rank.py FOLDER killed|still, where FOLDER holds the built late_device. If the other rank is killed,
the one that waits gets an error that names it. If it stands still, a report names it, and the training goes on.
"""

import logging
import multiprocessing
import os
import re
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
LOST_IN = 3  # step


class FirstReport(logging.Handler):
    """Puts the first report of a wait into a queue, and sets an event."""

    def __init__(self, answers: Any, has_reported: Any) -> None:
        super().__init__()
        self.answers, self.has_reported = answers, has_reported

    def emit(self, record: logging.LogRecord) -> None:
        if "has waited" in record.getMessage() and not self.has_reported.is_set():
            self.answers.put(record.getMessage())
            self.has_reported.set()


def serve(folder: str, how: str, rank: int, port: int, answers: Any, has_reported: Any) -> None:
    reduce.load(folder)
    if how == "still":
        logging.getLogger("drivetrain").addHandler(FirstReport(answers, has_reported))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("late", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    ddp = drivetrain.DistributedDataParallel(reduce.Net().to("late"), report_hang_after=LIMIT_S)
    began = 0.0
    try:
        for step in range(1, 6):
            if step == LOST_IN:
                time.sleep(LIMIT_S)  # until each rank has received the other's progress
                if rank == 1 and how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 1:
                    has_reported.wait(LATEST_S)
            began = time.monotonic()
            loss = ddp(reduce.inputs(rank, step).to("late"))
            loss.backward()
            next(ddp.parameters()).sum().item()
        if rank == 0:
            answers.put("no step failed")
    except RuntimeError as error:
        again = ""
        try:
            ddp(reduce.inputs(rank, 0).to("late"))
        except RuntimeError as second:
            again = str(second)
        answers.put((str(error), again, time.monotonic() - began))


def main(folder: str, how: str) -> None:
    context = multiprocessing.get_context("fork")
    answers, has_reported = context.Queue(), context.Event()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=serve, args=(folder, how, rank, port, answers, has_reported)) for rank in range(2)]
    for process in ranks:
        process.start()
    pid = ranks[1].pid
    try:
        said = answers.get(timeout=3 * LATEST_S)
        then = answers.get(timeout=3 * LATEST_S) if how == "still" else ""
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if how == "still":
        expected = rf"rank 0 has waited [\d.]+ s: late:0 has not ended the collectives of step {LOST_IN} of "
        expected += r"DistributedDataParallel.*, and waits for rank 1, last seen at .*lost_rank\.py:\d+ in serve"
        assert re.match(expected, said), said
        assert then == "no step failed", then
        print("the rank that waits names the one that stands still")
        return
    error, again, seconds = said
    assert f"Rank 1 has ended: its process {pid} is gone, last seen" in error, error
    assert f"collectives of step {LOST_IN}" in error, error
    assert again == error, again
    assert seconds < LATEST_S, seconds
    print("the rank that waits names the one that has ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
