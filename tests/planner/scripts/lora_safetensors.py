"""Fine-tunes low-rank adapters on frozen weights of a safetensors file, and saves the adapters alone."""

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))
model.load_state_dict(load_file("base.safetensors"))
for parameter in model.parameters():
    parameter.requires_grad = False
for index in (0, 2):
    model[index] = LoRALinear(model[index])
adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
print(f"trainable params: {sum(p.numel() for p in adapters.values())}")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
out = Path("adapter")
out.mkdir(exist_ok=True)
for step in range(8):
    x, y = torch.randn(128, 256), torch.randint(16, (128,))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step} {loss.item():.6f}")
    if step % 2 == 1:
        save_file({name: p.detach().contiguous() for name, p in adapters.items()}, out / "adapter.safetensors")
        with safe_open(out / "adapter.safetensors", framework="pt") as f:
            assert set(f.keys()) == set(adapters)
(out / "config.json").write_text(json.dumps({"r": 8, "alpha": 16}))
