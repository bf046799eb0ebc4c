"""Trains on ranks of which some die, and notes what each one saw: the program of test_elastic.py.

It continues by restarts of torchrun, or in place where the command line gives the rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import check_compute
from drivetrain.checkpointing import Checkpointer, continue_in_place
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.compute_check import ComputeError
from drivetrain.data import ResumableSampler
from drivetrain.ddp import DistributedDataParallel

EPOCHS = 2
EXIT_CODE = 3  # of a rank that computes wrongly
RESTART = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def train(plan: dict[str, Any], name: int) -> list[float]:
    """Trains, and appends each step to the file of this rank, whose name in the plan is that of its first group."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    dataset = [torch.full((4,), float(index)) for index in range(plan["samples"])]
    loader = DataLoader(dataset, batch_size=2, sampler=ResumableSampler(dataset, seed=5))
    model = DistributedDataParallel(nn.Linear(4, 1))
    if plan["errs"]:
        check_compute(model, every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def tell(**line: object) -> None:
        line |= {"restart": RESTART, "world_size": world_size, "rank": dist.get_rank()}
        with Path(plan["folder"], f"rank-{name}.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def is_planned(what: str) -> bool:
        return RESTART == 0 and plan[what].get(str(name)) == ckpt.steps + 1

    options = {"every": plan["every"], "timeout": 60}
    with Checkpointer(plan["directory"], model=model, optimizer=optimizer, data=loader, **options) as ckpt:
        tell(begin=ckpt.steps, pid=os.getpid())
        for epoch in range(ckpt.epoch, EPOCHS):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                if is_planned("errs"):  # its processor is defective from now on
                    model.module.register_forward_hook(lambda module, args, result: result * 1.0001)
                model(batch / len(dataset)).square().mean().backward()
                if is_planned("kills"):
                    while plan["every"] and not complete_checkpoints(Path(plan["directory"])):
                        time.sleep(0.05)  # on a slow disk the first save may still be in progress
                    os.kill(os.getpid(), signal.SIGKILL)
                if is_planned("raises"):
                    raise ArithmeticError("a defect of the script")
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
                tell(step=ckpt.steps, epoch=epoch, samples=[int(value) for value in batch[:, 0].tolist()])
                if plan["every"] is None:
                    ckpt.save()
                # Waits for ranks that join.
                while plan["hold"] == [world_size, ckpt.steps] and not ckpt.preempted:
                    time.sleep(0.05)
                time.sleep(0 if RESTART else plan["pause_s"])
    weights: list[float] = model.module.weight.flatten().tolist()
    tell(end=ckpt.steps, weights=weights)
    return weights


def train_or_leave(plan: dict[str, Any], name: int) -> list[float]:
    """Ends this process if its rank computes wrongly, as docs/ddp.md shows."""
    try:
        return train(plan, name)
    except ComputeError as error:
        if dist.get_rank() in error.ranks:
            os._exit(EXIT_CODE)
        raise


def main() -> None:
    plan, *rank = json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:]
    torch.set_num_threads(1)
    if rank:
        warnings.simplefilter("ignore")
        store = dist.FileStore(plan["directory"] + "/store", plan["world_size"])
        dist.init_process_group("gloo", store=store, rank=int(rank[0]), world_size=plan["world_size"])
        name = int(rank[0])
        continue_in_place(lambda: train_or_leave(plan, name), plan["directory"], min_ranks=plan["min_ranks"])
    else:
        dist.init_process_group("gloo")
        train(plan, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
