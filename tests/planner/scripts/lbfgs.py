"""Fits sine waves with LBFGS and a closure, in the shape of PyTorch's example "time_sequence_prediction"."""

import numpy as np
import torch
from torch import nn, optim

np.random.seed(2)
torch.manual_seed(0)
T, L, N = 20, 200, 40
wave = np.empty((N, L), "int64")
wave[:] = np.array(range(L)) + np.random.randint(-4 * T, 4 * T, N).reshape(N, 1)
data = np.sin(wave / 1.0 / T).astype("float32")


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(199, 256), nn.Tanh(), nn.Linear(256, 199))

    def forward(self, input):
        return self.net(input)


input, target = torch.from_numpy(data[3:, :-1]), torch.from_numpy(data[3:, 1:])
test_input, test_target = torch.from_numpy(data[:3, :-1]), torch.from_numpy(data[:3, 1:])
seq = Sequence()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4, history_size=4)
for i in range(6):
    print("STEP: ", i)

    def closure():
        optimizer.zero_grad()
        out = seq(input)
        loss = criterion(out, target)
        print("loss:", loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        pred = seq(test_input)
        print("test loss:", criterion(pred, test_target).item())
        y = pred.detach().numpy()
np.savetxt("predict.csv", y)
