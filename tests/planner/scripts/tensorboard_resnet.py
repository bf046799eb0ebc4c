"""Trains a small residual net with TensorBoard's SummaryWriter: scalars, histograms, images and a learning rate."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter


class Images(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 24, 24, generator=generator), index % 5


class Residual(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


torch.manual_seed(0)
writer = SummaryWriter("runs/exp1", comment="resnet")
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, 1, 1), Residual(16, 32, 2), Residual(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(64, 5),
)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=13)
loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=1, pin_memory=torch.cuda.is_available())
step = 0
for _epoch in range(2):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        writer.add_scalar("Loss/train", loss.item(), step)
        writer.add_scalar("lr", scheduler.get_last_lr()[0], step)
        print(f"step {step} loss {loss.item():.5f}")
        step += 1
    writer.add_image("first", images[0], step)
    for name, parameter in net.named_parameters():
        writer.add_histogram(name, parameter, step)
writer.add_hparams({"lr": 0.1}, {"loss": loss.item()})
writer.close()
