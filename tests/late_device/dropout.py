"""Checks an activation budget and checkpoints with dropout where torch has an accelerator.

Only torch's Python code knows whether a script has used the accelerator, and so whether its random state must be saved.
Operations run without the GIL, so the native code has to acquire it to ask.

Usage: python dropout.py FOLDER, where FOLDER holds the built late_device.
"""

import importlib
import sys

import torch
from torch import Tensor, nn

import drivetrain

sys.path.insert(0, sys.argv[1])
importlib.import_module("late_device")  # needs torch's libraries, so torch is imported first
assert torch.accelerator.current_accelerator() is not None


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = drivetrain.checkpoint(layer, x)
        return x


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))]


def gradients(model: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.ones(8, 16)).square().mean().backward()
    return [param.grad for param in model.parameters()]


expected = gradients(nn.Sequential(*layers()))
model = nn.Sequential(*layers())
plan = drivetrain.activation_budget(model, lambda: gradients(model), "40%")
for found in (gradients(model), gradients(Checkpointed(*layers()))):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
assert plan.replay_seconds > 0
print("the same bits")
