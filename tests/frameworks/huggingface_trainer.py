"""Trains a tiny GPT-2 on digits, pixel by pixel, with the Hugging Face Trainer, with and without checkpointing."""

from pathlib import Path

import torch
from job import ACCUMULATE, COLLECTIVE_TIMEOUT_S, MICRO_BATCH, STEPS, Notes, digits, start
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class TakeNotes(TrainerCallback):
    """Records gradients. The Trainer calls every micro-batch of a step except the last a substep."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object
    ) -> None:
        self.notes.gradient(model, is_reduced=False)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object
    ) -> None:
        self.notes.gradient(model, is_reduced=True)


def train(out: Path, name: str, gradient_checkpointing: bool) -> None:
    arguments = TrainingArguments(
        output_dir=str(out / name),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_timeout=COLLECTIVE_TIMEOUT_S,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        gradient_checkpointing=gradient_checkpointing,
        num_train_epochs=1,
        optim="sgd",  # as in job.sgd
        optim_args="momentum=0.9",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(arguments.process_index)  # each rank has other weights, which the wrapper must synchronize
    config = GPT2Config(vocab_size=17, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0)
    config.embd_pdrop = config.attn_pdrop = 0.0
    pixels = [image.long() for image, _ in digits()]
    model = GPT2LMHeadModel(config)
    block_passes: list[None] = []
    model.transformer.h[0].ln_1.register_forward_hook(lambda *_: block_passes.append(None))
    notes = Notes()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": image, "labels": image} for image in pixels],
        callbacks=[TakeNotes(notes)],
    )
    trainer.train()
    assert len(block_passes) == STEPS * ACCUMULATE * (2 if gradient_checkpointing else 1)
    notes.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(str(out / name))
    torch.distributed.barrier()
    saved = GPT2LMHeadModel.from_pretrained(out / name).state_dict()
    notes.report(out / f"{name}-{arguments.process_index}.pt", trainer.model_wrapped, saved)


out = start()
train(out, "plain", gradient_checkpointing=False)
train(out, "checkpointing", gradient_checkpointing=True)
torch.distributed.destroy_process_group()
