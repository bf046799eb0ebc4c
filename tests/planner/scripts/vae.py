"""Trains a variational autoencoder in the shape of PyTorch's example "vae", on data of NumPy."""

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1)


class Images(Dataset):
    """Images of bytes, which become floats one at a time, as torchvision's data sets do."""

    def __init__(self, count):
        self.images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return torch.from_numpy(self.images[index]).unsqueeze(0).float().div(255), index % 10


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x):
        h1 = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


train_loader = DataLoader(Images(128), batch_size=32, shuffle=True)
test_loader = DataLoader(Images(32), batch_size=32)
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1, 3):
    model.train()
    train_loss = 0
    for _batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        print(f"Train Epoch: {epoch} Loss: {loss.item() / len(data):.6f}")
    model.eval()
    with torch.no_grad():
        test_loss = sum(loss_function(*((model(x))[:1]), x, *model(x)[1:]).item() for x, _ in test_loader)
    print(f"====> Test set loss: {test_loss / len(test_loader.dataset):.4f}")
os.makedirs("results", exist_ok=True)
np.save("results/means.npy", mu.detach().numpy())
