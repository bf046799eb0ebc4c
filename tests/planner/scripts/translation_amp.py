"""Trains an encoder-decoder transformer with autocast, a gradient scaler and workers that make sentences."""

import logging
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(filename="train.log", level=logging.INFO)
PAD, VOCAB, WIDTH = 0, 300, 96


class Pairs(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return tuple(torch.randint(1, VOCAB, (20,), generator=generator) for _ in range(2))


def collate_fn(batch):
    src, tgt = zip(*batch, strict=True)
    return pad_sequence(src, True, PAD), pad_sequence(tgt, True, PAD)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, WIDTH, PAD), nn.Embedding(VOCAB, WIDTH, PAD)
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 192, 0.1, batch_first=True)
        self.generator = nn.Linear(WIDTH, VOCAB)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.generator(self.transformer(self.src(src), self.tgt(tgt), tgt_mask=mask))


random.seed(0)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Seq2Seq().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
loader = DataLoader(Pairs(), 8, shuffle=True, collate_fn=collate_fn, num_workers=2, persistent_workers=True)
for epoch in range(2):
    for src, tgt in loader:
        src, tgt = src.to(device), tgt.to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(src, tgt[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        logging.info("epoch %d loss %.5f", epoch, loss.item())
        print(f"epoch {epoch} loss {loss.item():.5f}")
