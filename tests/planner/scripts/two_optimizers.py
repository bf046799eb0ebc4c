"""Trains an encoder and a classifier with an optimizer each, which step at different intervals."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256))
head = nn.Sequential(nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
opt_encoder = torch.optim.AdamW(encoder.parameters(), lr=1e-3, weight_decay=0.05)
opt_head = torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt_encoder, T_max=20)
loader = DataLoader(TensorDataset(torch.randn(256, 256), torch.randint(10, (256,))), 32, shuffle=True)
running = 0.0
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(head(encoder(x)), y, label_smoothing=0.1) / 2
    loss.backward()
    running += loss.item()
    opt_head.step()
    opt_head.zero_grad(set_to_none=True)
    if (i + 1) % 2 == 0:
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        opt_encoder.step()
        opt_encoder.zero_grad(set_to_none=True)
        scheduler.step()
        print(f"step {i + 1} loss {running:.5f} lr {scheduler.get_last_lr()[0]:.2e}")
        running = 0.0
