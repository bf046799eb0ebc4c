"""Trains a network that removes noise from scikit-learn's digits, with a limit on the memory of its activations.

python examples/activation_budget.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import drivetrain
from drivetrain.optim import AdamW

WIDTH, BLOCKS, BATCH_SIZE, STEPS = 32, 6, 32, 40


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, WIDTH),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.GroupNorm(4, WIDTH),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def main() -> None:
    torch.manual_seed(0)
    digits = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
    blocks = [Block() for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), *blocks, nn.Conv2d(WIDTH, 1, 3, padding=1))
    optimizer = AdamW(model.parameters(), lr=2e-3)

    def backward() -> Tensor:
        """Runs forward, loss and backward on one batch."""
        images = digits[torch.randint(len(digits), (BATCH_SIZE,))]
        loss = F.mse_loss(model(images + 0.5 * torch.randn_like(images)), images)
        loss.backward()
        return loss.detach()

    plan = drivetrain.activation_budget(model, backward, "50%")  # or bytes, such as "2GiB"
    print(plan)  # per block: what is kept and what runs again
    for step in range(STEPS):
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"activations: {plan.planned_bytes / 2**20:.1f} MiB of {plan.unplanned_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
