"""Trains a character model with a Trainer class and callbacks, in the shape of minGPT's chargpt.py."""

import os
import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class CharDataset(Dataset):
    def __init__(self, data, block_size):
        chars = sorted(set(data))
        self.stoi, self.block_size, self.data = {ch: i for i, ch in enumerate(chars)}, block_size, data

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        dix = [self.stoi[s] for s in self.data[idx : idx + self.block_size + 1]]
        return torch.tensor(dix[:-1], dtype=torch.long), torch.tensor(dix[1:], dtype=torch.long)


class Trainer:
    def __init__(self, model, train_dataset, max_iters):
        self.model, self.train_dataset, self.max_iters = model, train_dataset, max_iters
        self.optimizer, self.callbacks, self.iter_num = None, defaultdict(list), 0

    def run(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        sampler = torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10))
        loader = DataLoader(self.train_dataset, sampler=sampler, shuffle=False, batch_size=16, num_workers=0)
        self.model.train()
        data_iter, self.iter_time = iter(loader), time.time()
        while self.iter_num < self.max_iters:
            try:
                x, y = next(data_iter)
            except StopIteration:
                data_iter = iter(loader)
                x, y = next(data_iter)
            logits = self.model(x)
            self.loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


def batch_end_callback(trainer):
    print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")
    if trainer.iter_num % 4 == 0:
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 24, dtype=torch.long))
        os.makedirs("out", exist_ok=True)
        torch.save(model.state_dict(), os.path.join("out", "model.pt"))
        model.train()


torch.manual_seed(3407)
text = open("input.txt").read()
dataset = CharDataset(text, 24)
model = nn.Sequential(
    nn.Embedding(len(dataset.stoi), 192), nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 192), nn.LayerNorm(192),
    nn.Linear(192, len(dataset.stoi)),
)  # fmt: skip
trainer = Trainer(model, dataset, max_iters=9)
trainer.callbacks["on_batch_end"].append(batch_end_callback)
trainer.run()
