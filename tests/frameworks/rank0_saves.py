"""Stock training loops that save on rank 0 alone, for `drivetrain run`: nothing here knows of drivetrain.

rank0_saves.py LOOP FOLDER STEPS [DEATH]    writes a line per step to FOLDER/losses-RANK

DEATH is the step after which rank 0 kills itself.
"""

import io
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

SAVE_EVERY = 3


class Model(nn.Module):
    """Learns which byte follows another. Rows of its weights do not divide evenly by ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(97, 24), nn.LayerNorm(24), nn.Linear(24, 97)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.embed(tokens)).relu())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def samples(count: int) -> list[dict[str, Tensor]]:
    text = Path(__file__).read_bytes()
    tokens = torch.tensor(list(text[:1200])) % 97
    return [{"tokens": tokens[at : at + 16], "labels": tokens[at + 1 : at + 17]} for at in range(0, 16 * count, 16)]


def batch_of(step: int, rank: int) -> dict[str, Tensor]:
    """Draws a batch by the number of the step, as loops do that seed each step."""
    drawn = torch.randperm(64, generator=torch.Generator().manual_seed(1000 * step + rank))[:4]
    chosen = [samples(64)[at] for at in drawn]
    return {name: torch.stack([each[name] for each in chosen]) for name in ("tokens", "labels")}


class Notes:
    """Writes each step's loss, and kills the process after a step."""

    def __init__(self, folder: Path, rank: int, death: int) -> None:
        self.rank, self._death = rank, death
        self._stream = (folder / f"losses-{rank}").open("a", buffering=1)

    def step(self, step: int, loss: float) -> None:
        self._stream.write(f"{step} {loss!r}\n")

    def die(self, step: int) -> None:
        if step == self._death and self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def nanogpt(folder: Path, steps: int, death: int, in_memory: bool = False) -> None:
    """Trains as nanoGPT: groups with and without decay, a clipped norm, and a file of rank 0 every few steps.

    minGPT's trainer differs in that it writes the file by way of memory.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    model: nn.Module = Model()
    decayed = [param for param in model.parameters() if param.dim() >= 2]
    others = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    path, first = folder / "ckpt.pt", 0
    if path.exists():
        checkpoint = torch.load(path, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["iter_num"]
        checkpoint = None
    raw_model, model = model, DDP(model)
    notes = Notes(folder, rank, death)
    for step in range(first, steps):
        if step % SAVE_EVERY == 0 and step > first and rank == 0:
            checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}
            target = io.BytesIO() if in_memory else folder / "ckpt.tmp"
            torch.save(checkpoint, target)
            if in_memory:
                (folder / "ckpt.tmp").write_bytes(target.getvalue())
            (folder / "ckpt.tmp").replace(path)
        loss = model(**batch_of(step, rank))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        notes.step(step, loss.item())
        notes.die(step)
    dist.destroy_process_group()


def mingpt(folder: Path, steps: int, death: int) -> None:
    nanogpt(folder, steps, death, in_memory=True)


def accelerate(folder: Path, steps: int, death: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    notes = Notes(folder, accelerator.process_index, death)
    saved = sorted(folder.glob("state-*"), key=lambda path: int(path.name[6:]))
    first = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        first = int(saved[-1].name[6:])
    for step in range(first, steps):
        if step % SAVE_EVERY == 0 and step > first:
            accelerator.save_state(str(folder / f"state-{step}"))
        with accelerator.accumulate(model):
            loss = model(**batch_of(step, accelerator.process_index))["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        notes.step(step, loss.item())
        notes.die(step)
    accelerator.end_training()


def huggingface(folder: Path, steps: int, death: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=SAVE_EVERY,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    notes = Notes(folder, arguments.process_index, death)

    class Watch(TrainerCallback):
        def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
            if "loss" in logs:
                notes.step(state.global_step, logs["loss"])  # type: ignore[attr-defined]

        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            notes.die(state.global_step)  # type: ignore[attr-defined]

    torch.manual_seed(1)
    trainer = Trainer(Model(), arguments, train_dataset=samples(64), callbacks=[Watch()])
    found = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop, where, count, *rest = sys.argv[1:]
    globals()[loop](Path(where), int(count), int(rest[0]) if rest else -1)
