"""Trains under torchrun, records each step, and kills one of its ranks with SIGKILL: the program of test_elastic.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.data import ResumableSampler
from drivetrain.ddp import DistributedDataParallel

SAMPLES, EPOCHS = 48, 2


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kills = {(k["restart"], k["step"]): k["rank"] for k in plan["kills"]}
    torch.manual_seed(0)
    dataset = [torch.full((4,), float(index)) for index in range(SAMPLES)]
    loader = DataLoader(dataset, batch_size=2, sampler=ResumableSampler(dataset, seed=5))
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = Path(plan["folder"]) / f"rank-{rank}.jsonl"

    def tell(**line: object) -> None:
        with log.open("a") as stream:
            stream.write(json.dumps({"restart": restart, "world_size": world_size, **line}) + "\n")

    with Checkpointer(
        plan["directory"],
        model=model,
        optimizer=optimizer,
        data=loader,
        every=plan["every"],
        timeout=60,
    ) as ckpt:
        tell(begin=ckpt.steps, pid=os.getpid(), source=str(ckpt.restored.path) if ckpt.restored else None)
        for epoch in range(ckpt.epoch, EPOCHS):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                loss = model(batch / SAMPLES).square().mean()
                loss.backward()
                if kills.get((restart, ckpt.steps + 1)) == rank:
                    while plan["every"] and not complete_checkpoints(Path(plan["directory"])):
                        time.sleep(0.05)  # on a slow disk the first save may still be in progress
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
                tell(step=ckpt.steps, epoch=epoch, samples=[int(value) for value in batch[:, 0].tolist()])
                if plan["every"] is None:
                    ckpt.save()
                # Waits for ranks that join.
                while plan["hold"] == [world_size, ckpt.steps] and not ckpt.preempted:
                    time.sleep(0.05)
                time.sleep(0 if restart else plan["pause_s"])
    tell(end=ckpt.steps, weight=model.module.weight.flatten().tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
