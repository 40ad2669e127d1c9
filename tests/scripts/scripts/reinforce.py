"""Policy gradients with a critic on a small walk: the model is called for each action, and a step is an episode."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(3, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state):
        hidden = torch.relu(self.body(state))
        return torch.softmax(self.actor(hidden), dim=-1), self.critic(hidden)


class Walk:
    def reset(self):
        self.place, self.moves = 0.0, 0
        return torch.tensor([self.place, 0.0, 1.0])

    def step(self, action):
        self.place += 1.0 if action == 1 else -1.0
        self.moves += 1
        return torch.tensor([self.place / 10, self.moves / 12, 1.0]), float(self.place > 0), self.moves >= 12


model, walk = ActorCritic(), Walk()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
while True:
    state, done, kept, rewards = walk.reset(), False, [], []
    while not done:
        chances, value = model(state)
        choice = Categorical(chances)
        action = choice.sample()
        state, reward, done = walk.step(action.item())
        kept.append((choice.log_prob(action), value))
        rewards.append(reward)
    total, losses = 0.0, []
    for (log_chance, value), reward in zip(reversed(kept), reversed(rewards)):
        total = reward + 0.99 * total
        losses.append(-log_chance * (total - value.item()) + (value - total).square())
    optimizer.zero_grad()
    torch.stack([loss.squeeze() for loss in losses]).sum().backward()
    optimizer.step()
