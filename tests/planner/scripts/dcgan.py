"""Trains a generator and a discriminator in the shape of PyTorch's example "dcgan"."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
nz, ngf, ndf, nc = 100, 32, 32, 3
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def up(into, out, stride, padding):
    return nn.ConvTranspose2d(into, out, 4, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU(True)


netG = nn.Sequential(
    *up(nz, ngf * 4, 1, 0), *up(ngf * 4, ngf * 2, 2, 1), *up(ngf * 2, ngf, 2, 1),
    nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False), nn.Tanh(),
).to(device)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 4), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
).to(device)  # fmt: skip
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(16, nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
dataloader = DataLoader(TensorDataset(torch.rand(96, nc, 32, 32)), batch_size=16, shuffle=True)
for i, (data,) in enumerate(dataloader):
    netD.zero_grad()
    real = data.to(device)
    label = torch.full((real.size(0),), 1.0, dtype=real.dtype, device=device)
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    fake = netG(torch.randn(real.size(0), nz, 1, 1, device=device))
    errD_fake = criterion(netD(fake.detach()), label.fill_(0.0))
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    errG = criterion(netD(fake), label.fill_(1.0))
    errG.backward()
    optimizerG.step()
    print(f"[{i}/{len(dataloader)}] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
    if i % 3 == 0:
        torch.save(netG(fixed_noise).detach(), f"fake_samples_{i:03d}.pt")
torch.save(netG.state_dict(), "netG.pth")
torch.save(netD.state_dict(), "netD.pth")
