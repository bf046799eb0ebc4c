"""Trains with Lightning Fabric, which starts its second rank itself: no_backward_sync, clip, save and load."""

from datetime import timedelta

import torch
from job import ACCUMULATE, COLLECTIVE_TIMEOUT_S, MICRO_BATCH, Notes, classifier, digits, sgd, start
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.nn import functional as F
from torch.utils.data import DataLoader

out = start()
strategy = DDPStrategy(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
notes = Notes()
model = classifier(fabric.global_rank)
model, optimizer = fabric.setup(model, sgd(model))
loader = fabric.setup_dataloaders(DataLoader(digits(), batch_size=MICRO_BATCH))

for index, (images, labels) in enumerate(loader, start=1):
    is_reduced = index % ACCUMULATE == 0
    with fabric.no_backward_sync(model, enabled=not is_reduced):
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss / ACCUMULATE)
    notes.losses.append(loss.item())
    notes.gradient(model, is_reduced)
    if is_reduced:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

path = out / "state.ckpt"
fabric.save(path, {"model": model, "optimizer": optimizer})
with torch.no_grad():
    next(model.parameters()).zero_()
fabric.load(path, {"model": model, "optimizer": optimizer})  # must restore the wrapped parameters
saved = torch.load(path, weights_only=True)["model"]
# Fabric's wrapper contains torch's.
notes.report(out / f"no_backward_sync-{fabric.global_rank}.pt", model._forward_module, saved)
