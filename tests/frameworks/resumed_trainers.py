"""Trains under HF's Trainer, Lightning and Accelerate in real processes that are killed, and records every loss."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.checkpointing.store.reading import complete_checkpoints
from drivetrain.data import ResumableSampler
from warm_python import warm_context

SAMPLES, BATCH_SIZE = 62, 4  # 16 batches per epoch of one rank, the last of two samples
ACCUMULATE = 2
LIMIT_S = 150
SAVED_WITHIN_S = 30


class Rows(Dataset[Any]):
    """Random rows. Each read adds noise from the default generators, as augmentations do."""

    def __init__(self, as_dict: bool) -> None:
        self._rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self._as_dict = as_dict

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index] + 0.1 * torch.randn(6) + 0.1 * random.random()
        return {"rows": row, "labels": self._rows[index, :2]} if self._as_dict else row


class Model(nn.Module):
    """Has dropout, which draws random numbers, and batch normalization, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 30), nn.BatchNorm1d(30), nn.Linear(30, 2)

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.norm(self.first(rows)).relu()
        found = self.last(nn.functional.dropout(hidden, 0.2, self.training))
        return {"loss": (found - (rows[:, :2] if labels is None else labels)).square().mean(), "logits": found}


class Journal:
    """Writes a line per event of one rank, and kills the process at a step whose predecessors are saved."""

    def __init__(self, folder: Path, rank: int, death: int | None) -> None:
        self._folder, self._death, self._rank = folder, death, rank
        self._stream = (folder / f"log-{rank}").open("a", buffering=1)

    def note(self, step: int, **values: Any) -> None:
        self._stream.write(json.dumps({"step": step, **values}) + "\n")

    def die_at(self, step: int) -> None:
        if self._death is None or step < self._death or self._rank != 0:
            return
        deadline = time.monotonic() + SAVED_WITHIN_S
        while not complete_checkpoints(self._folder / "checkpoints"):
            assert time.monotonic() < deadline, "no checkpoint before the kill"
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def huggingface(folder: Path, total: int, journal: Journal, options: dict[str, Any]) -> None:
    """Trains `total` optimizer steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from drivetrain.checkpointing.frameworks.huggingface import CheckpointCallback

    class Events(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "train_loss" not in logs:
                kept = {
                    name: value for name, value in logs.items() if "runtime" not in name and "per_second" not in name
                }
                journal.note(state.global_step, **kept)

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            journal.die_at(state.global_step)

    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder / "trainer"),
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=total,
        learning_rate=1e-2,
        lr_scheduler_type="inverse_sqrt",  # depends on no total
        warmup_steps=3,
        logging_steps=2,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=Rows(True), eval_dataset=Rows(True), callbacks=[Events()])
    CheckpointCallback(folder / "checkpoints", **{"every": 1, "timeout": 60.0, **options}).train(trainer)
    journal.note(total, weights=bits_of(trainer.model))


def lightning(folder: Path, total: int, journal: Journal, options: dict[str, Any]) -> None:
    """Trains `total` epochs."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping

    from drivetrain.checkpointing.frameworks.lightning import CheckpointCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss = self.net(rows)["loss"]
            loops = self.trainer.fit_loop.epoch_loop
            journal.note(
                loops.total_batch_idx,
                index=index,
                epoch=self.trainer.current_epoch,
                optimizer_step=self.global_step,
                logged_step=loops._batches_that_stepped,
                loss=loss.item(),
                lr=self.trainer.optimizers[0].param_groups[0]["lr"],
            )
            return loss

        def on_after_backward(self) -> None:
            journal.die_at(self.trainer.fit_loop.epoch_loop.total_batch_idx)

        def validation_step(self, rows: Tensor, index: int) -> None:
            loss = self.net(rows)["loss"]
            self.log("loss", loss)
            journal.note(-1, validated=loss.item(), optimizer_step=self.global_step, drawn=torch.rand(1).item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    torch.manual_seed(0)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    callback = CheckpointCallback(folder / "checkpoints", **{"every": 1, "timeout": 60.0, **options})
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=total,
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=5,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[callback, EarlyStopping("loss", patience=100)],
    )
    rows, module = Rows(False), Module()
    rank = {"num_replicas": world_size, "rank": int(os.environ.get("RANK", "0"))}
    loader = DataLoader(rows, BATCH_SIZE, sampler=ResumableSampler(rows, **rank))
    trainer.fit(module, loader, DataLoader(rows, batch_size=31))
    journal.note(-2, weights=bits_of(module))


def accelerate(folder: Path, total: int, journal: Journal, options: dict[str, Any]) -> None:
    """Trains `total` epochs with `accelerator.accumulate()`."""
    from accelerate import Accelerator

    from drivetrain.checkpointing import Checkpointer

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    rows = Rows(False)
    rank = {"num_replicas": accelerator.num_processes, "rank": accelerator.process_index}
    loader = DataLoader(rows, BATCH_SIZE, sampler=ResumableSampler(rows, **rank))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    with Checkpointer(folder / "checkpoints", **objects, **{"every": 1, "timeout": 60.0, **options}) as ckpt:
        accelerator.step = ckpt.steps  # the place in the accumulation, which Accelerate counts by itself
        for epoch in range(ckpt.epoch, total):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch)["loss"]
                    accelerator.backward(loss)
                    journal.die_at(ckpt.steps)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                journal.note(ckpt.steps, loss=loss.item(), epoch=epoch)
                ckpt.step()
    journal.note(-2, weights=bits_of(accelerator.unwrap_model(model)))


def bits_of(model: nn.Module) -> str:
    return b"".join(one.detach().contiguous().numpy().tobytes() for one in model.state_dict().values()).hex()


Train = Callable[[Path, int, Journal, dict[str, Any]], None]
TRAINERS: dict[str, tuple[Train, str, int]] = {  # how, which package, optimizer steps or epochs
    "huggingface": (huggingface, "transformers", 30),
    "lightning": (lightning, "lightning", 4),
    "accelerate": (accelerate, "accelerate", 4),
}
_servers: dict[str, tuple[BaseProcess, Connection]] = {}  # by the package that they have imported


def run(
    train: Train, needs: str, runs: list[tuple[Path, int, int | None]], world_size: int = 1, **options: Any
) -> list[list[int]]:
    """Makes one training after the other, each in new processes, and returns the exit codes of their ranks.

    Args:
        train: One of the functions above.
        needs: The package that all of them import first. One process imports it for all calls.
        runs: Folder, total and the step at which the process of rank 0 is killed, for each.
        world_size: Number of ranks.
        options: Options of the callback.
    """
    if needs not in _servers:
        context = warm_context()
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(needs, there), daemon=True)
        process.start()
        there.close()
        _servers[needs] = process, here
    process, here = _servers[needs]
    here.send((train, runs, world_size, options))
    codes: list[list[int]] = []
    try:
        for _ in runs:
            codes.append(here.recv() if here.poll(LIMIT_S) else [])
    finally:
        if [] in codes or len(codes) < len(runs):  # a late answer would be taken for the next call's
            process.kill()
            process.join(LIMIT_S)
            del _servers[needs]
    return codes


def _serve(needs: str, connection: Connection) -> None:
    """Imports the package, which takes seconds, and forks each rank of each run of each call of run()."""
    torch.set_num_threads(1)
    warnings.simplefilter("default")  # those of the frameworks cannot be mended here
    importlib.import_module({"transformers": "transformers.trainer"}.get(needs, needs))  # transformers loads it late
    while True:
        try:
            train, runs, world_size, options = connection.recv()
        except EOFError:
            return
        for folder, total, death in runs:
            connection.send(_codes_of_ranks(train, folder, total, death, world_size, options))


def _codes_of_ranks(
    train: Train, folder: Path, total: int, death: int | None, world_size: int, options: dict[str, Any]
) -> list[int]:
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids: list[int] = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _train_as(train, folder, total, death, rank, world_size, port, options)
        pids.append(pid)
    codes = []
    for pid in pids:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if codes[-1] == -signal.SIGKILL:  # the other ranks end with their host
            for other in pids[len(codes) :]:
                os.kill(other, signal.SIGKILL)
    return codes


def _train_as(
    train: Train, folder: Path, total: int, death: int | None, rank: int, world_size: int, port: int, options: Any
) -> None:
    code = 1
    errors = (folder / f"errors-{rank}").open("a", buffering=1)
    os.dup2(errors.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    if world_size > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    random.seed(rank)  # a fork draws a new seed
    try:
        train(folder, total, Journal(folder, rank, death), options)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        errors.write(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


def lines_of(folder: Path, rank: int = 0) -> list[str]:
    """Returns the lines of a rank, in order. The last of a killed run may be torn."""
    return [line for line in (folder / f"log-{rank}").read_text().splitlines() if line.endswith("}")]


def errors_of(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("errors-*")))
