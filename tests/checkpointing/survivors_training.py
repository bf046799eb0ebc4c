"""Trains on ranks of which some die, and tells what each one saw: the program of test_survivors.py."""

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
from drivetrain.compute_check import ComputeError
from drivetrain.data import ResumableSampler
from drivetrain.ddp import DistributedDataParallel

SAMPLES, EPOCHS = 36, 2
EXIT_CODE = 3  # of a rank that computes wrongly


def train(plan: dict[str, Any], first_rank: int, told: list[dict[str, Any]]) -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = [torch.full((4,), float(index)) for index in range(SAMPLES)]
    loader = DataLoader(dataset, batch_size=2, sampler=ResumableSampler(dataset, seed=5))
    model = DistributedDataParallel(nn.Linear(4, 1))
    if plan["errs"]:
        check_compute(model, every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": loader}
    with Checkpointer(plan["directory"], every=None, timeout=60, signals=(), **objects) as ckpt:
        told.append({"begin": ckpt.steps, "world_size": world_size, "rank": rank, "at": time.monotonic()})
        for epoch in range(ckpt.epoch, EPOCHS):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                if plan["errs"].get(str(first_rank)) == ckpt.steps + 1:  # its processor is defective from now on
                    model.module.register_forward_hook(lambda module, args, result: result * 1.0001)
                model(batch / SAMPLES).square().mean().backward()
                if plan["kills"].get(str(first_rank)) == ckpt.steps + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if plan["raises"].get(str(first_rank)) == ckpt.steps + 1:
                    raise ArithmeticError("a defect of the script")
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
                samples = [int(value) for value in batch[:, 0].tolist()]
                told.append({"step": ckpt.steps, "epoch": epoch, "samples": samples, "world_size": world_size})
                told[-1]["at"] = time.monotonic()
                Path(plan["directory"], f"told-{first_rank}.json").write_text(json.dumps(told))
                ckpt.save()
    weights: list[float] = model.module.weight.flatten().tolist()
    return weights


def train_or_leave(plan: dict[str, Any], first_rank: int, told: list[dict[str, Any]]) -> list[float]:
    """Ends this process if its rank computes wrongly, as docs/ddp.md shows."""
    try:
        return train(plan, first_rank, told)
    except ComputeError as error:
        if dist.get_rank() in error.ranks:
            os._exit(EXIT_CODE)
        raise


def main() -> None:
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(plan["directory"] + "/store", plan["world_size"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan["world_size"])
    told: list[dict[str, Any]] = []
    weights = continue_in_place(
        lambda: train_or_leave(plan, rank, told), plan["directory"], min_ranks=plan["min_ranks"]
    )
    print(json.dumps({"pid": os.getpid(), "weights": weights}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
