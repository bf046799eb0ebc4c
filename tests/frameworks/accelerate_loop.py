"""Trains with Accelerate: accumulate() as in its guide, and trigger_sync_in_backward()."""

from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from job import ACCUMULATE, COLLECTIVE_TIMEOUT_S, MICRO_BATCH, Notes, classifier, digits, sgd, start
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

out = start()
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=ACCUMULATE,
    kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))],
)
rank = accelerator.process_index


def report(name: str, notes: Notes, model: nn.Module) -> None:
    accelerator.save_state(str(out / name))
    accelerator.wait_for_everyone()
    with torch.no_grad():
        next(model.parameters()).zero_()
    accelerator.load_state(str(out / name))  # must restore the wrapped parameters
    accelerator.save_model(model, out / name)
    accelerator.wait_for_everyone()
    assert accelerator.unwrap_model(model) is model.module
    notes.report(out / f"{name}-{rank}.pt", model, load_file(out / name / "model.safetensors"))
    accelerator.free_memory()


def accumulate() -> None:
    notes = Notes()
    model = classifier(rank)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(digits(), batch_size=MICRO_BATCH))
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            notes.losses.append(loss.item())
            notes.gradient(model, is_reduced=accelerator.sync_gradients)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    report("accumulate", notes, model)


def trigger_sync() -> None:
    """Runs all forwards of a step before its backwards, so that only the last backward can request synchronization."""
    notes = Notes()
    accelerator.gradient_accumulation_steps = 1
    model = classifier(rank)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(digits(), batch_size=MICRO_BATCH))
    batches = iter(loader)
    for first, second in zip(batches, batches, strict=True):
        with accelerator.no_sync(model):
            first_loss, second_loss = (F.cross_entropy(model(images), labels) for images, labels in (first, second))
            accelerator.backward(first_loss)
            notes.gradient(model, is_reduced=False)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second_loss)
        notes.gradient(model, is_reduced=True)
        notes.losses += [first_loss.item(), second_loss.item()]
        optimizer.step()
        optimizer.zero_grad()
    report("trigger_sync", notes, model)


accumulate()
trigger_sync()
accelerator.end_training()
