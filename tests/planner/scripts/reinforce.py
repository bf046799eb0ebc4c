"""Trains an actor and a critic with one optimizer in the shape of PyTorch's example "actor_critic"."""

import random

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

random.seed(543)
torch.manual_seed(543)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(64, 1024)
        self.action_head, self.value_head = nn.Linear(1024, 2), nn.Linear(1024, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = Policy()
optimizer = optim.Adam(model.parameters(), lr=3e-2)
running_reward = 10
for i_episode in range(3):
    state, ep_reward = torch.randn(64), 0
    for _t in range(1, 7):
        probs, state_value = model(state)
        m = Categorical(probs)
        action = m.sample()
        model.saved_actions.append((m.log_prob(action), state_value))
        state, reward = torch.randn(64), random.random() + action.item()
        model.rewards.append(reward)
        ep_reward += reward
    running_reward = 0.05 * ep_reward + 0.95 * running_reward
    R, returns, policy_losses, value_losses = 0, [], [], []
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
        policy_losses.append(-log_prob * (R - value.item()))
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    print(f"Episode {i_episode}\tLoss: {loss.item():.5f}")
