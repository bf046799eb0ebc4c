"""Trains a Wasserstein GAN with five steps of the critic for one of the generator, and clipped weights."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
n_critic, clip_value, latent_dim = 5, 0.01, 100
generator = nn.Sequential(
    nn.Linear(latent_dim, 128), nn.LeakyReLU(0.2, inplace=True), nn.Linear(128, 256), nn.BatchNorm1d(256, 0.8),
    nn.LeakyReLU(0.2, inplace=True), nn.Linear(256, 784), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Linear(784, 512), nn.LeakyReLU(0.2, inplace=True), nn.Linear(512, 256), nn.LeakyReLU(0.2, inplace=True),
    nn.Linear(256, 1),
)  # fmt: skip
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=0.00005)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=0.00005)
dataloader = DataLoader(TensorDataset(torch.rand(264, 1, 28, 28)), batch_size=24, shuffle=True)
batches_done = 0
for epoch in range(1):
    for i, (imgs,) in enumerate(dataloader):
        optimizer_D.zero_grad()
        real = imgs.view(imgs.size(0), -1)
        z = torch.randn(imgs.shape[0], latent_dim)
        loss_D = -torch.mean(discriminator(real)) + torch.mean(discriminator(generator(z).detach()))
        loss_D.backward()
        optimizer_D.step()
        for p in discriminator.parameters():
            p.data.clamp_(-clip_value, clip_value)
        if i % n_critic == 0:
            optimizer_G.zero_grad()
            loss_G = -torch.mean(discriminator(generator(z)))
            loss_G.backward()
            optimizer_G.step()
            print(f"[Epoch {epoch}] [Batch {batches_done}] [D loss: {loss_D.item():f}] [G loss: {loss_G.item():f}]")
        batches_done += 1
