"""Trains a deep Q-network in the shape of PyTorch's tutorial, in an environment of random numbers."""

import math
import random
from collections import deque, namedtuple

import torch
from torch import nn, optim

random.seed(0)
torch.manual_seed(0)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, TAU = 32, 0.99, 0.005


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 256)
        self.layer2 = nn.Linear(256, 256)
        self.layer3 = nn.Linear(256, n_actions)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


class Env:
    def reset(self):
        self.left = 20
        return [random.random() for _ in range(4)]

    def step(self, action):
        self.left -= 1
        return [random.random() + action for _ in range(4)], 1.0, self.left == 0


env = Env()
policy_net, target_net = DQN(4, 2), DQN(4, 2)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True)
memory = deque([], maxlen=1000)
steps_done = 0
for _episode in range(2):
    state, done = torch.tensor(env.reset(), dtype=torch.float32).unsqueeze(0), False
    while not done:
        threshold = 0.05 + 0.85 * math.exp(-steps_done / 1000)
        steps_done += 1
        if random.random() > threshold:
            with torch.no_grad():
                action = policy_net(state).max(1).indices.view(1, 1)
        else:
            action = torch.tensor([[random.randrange(2)]], dtype=torch.long)
        observation, reward, done = env.step(action.item())
        next_state = None if done else torch.tensor(observation, dtype=torch.float32).unsqueeze(0)
        memory.append(Transition(state, action, next_state, torch.tensor([reward])))
        state = next_state
        if len(memory) < BATCH_SIZE:
            continue
        batch = Transition(*zip(*random.sample(memory, BATCH_SIZE), strict=True))
        mask = torch.tensor([s is not None for s in batch.next_state], dtype=torch.bool)
        next_states = torch.cat([s for s in batch.next_state if s is not None])
        values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
        next_values = torch.zeros(BATCH_SIZE)
        with torch.no_grad():
            next_values[mask] = target_net(next_states).max(1).values
        loss = nn.SmoothL1Loss()(values, ((next_values * GAMMA) + torch.cat(batch.reward)).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        target, policy = target_net.state_dict(), policy_net.state_dict()
        for key in policy:
            target[key] = policy[key] * TAU + target[key] * (1 - TAU)
        target_net.load_state_dict(target)
        print(f"{steps_done} loss {loss.item():.6f}")
