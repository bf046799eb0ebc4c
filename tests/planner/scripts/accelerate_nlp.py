"""Trains a text classifier in the shape of Accelerate's example "nlp_example", with accumulation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(128, 2)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
set_seed(42)
train_set = TensorDataset(torch.randint(0, 1000, (64, 32)), torch.randint(0, 2, (64,)))
eval_set = TensorDataset(torch.randint(0, 1000, (8, 32)), torch.randint(0, 2, (8,)))
train_dataloader = DataLoader(train_set, shuffle=True, batch_size=8, drop_last=True)
eval_dataloader = DataLoader(eval_set, batch_size=8)
model = Classifier()
optimizer = AdamW(params=model.parameters(), lr=2e-5)
lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 12))
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
for epoch in range(2):
    model.train()
    for ids, labels in train_dataloader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(ids), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.6f}")
    model.eval()
    correct = 0
    for ids, labels in eval_dataloader:
        with torch.no_grad():
            predictions = model(ids).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == references).sum().item()
    accelerator.print(f"epoch {epoch}: accuracy {correct / len(eval_set):.3f}")
    accelerator.save_state(f"epoch_{epoch}")
