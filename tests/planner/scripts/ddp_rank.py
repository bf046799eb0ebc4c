"""Trains with DistributedDataParallel where a launcher has set RANK, and in one process otherwise."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{ddp_local_rank}" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
else:
    master_process, ddp_rank, device = True, 0, "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337 + ddp_rank)
model = nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Dropout(0.1), nn.Linear(768, 20)).to(device)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model
dataset = TensorDataset(torch.randn(128, 512), torch.randint(0, 20, (128,)))
sampler = DistributedSampler(dataset) if ddp else None
loader = DataLoader(dataset, batch_size=32, sampler=sampler, shuffle=sampler is None, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=False)
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if ddp:
            dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG if torch.cuda.is_available() else dist.ReduceOp.SUM)
        if master_process:
            print(f"epoch {epoch} loss {loss.item():.5f}")
    if master_process:
        torch.save(raw_model.state_dict(), "snapshot.pt")
if ddp:
    dist.destroy_process_group()
