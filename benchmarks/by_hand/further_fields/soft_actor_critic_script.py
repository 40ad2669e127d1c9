"""Soft actor-critic on a simulated environment: a replay buffer on the device, two critics, targets that follow, a temperature.

`python soft_actor_critic_script.py [--compile [--mode MODE]] [--fused] [--steps N]`; the last line is the mean step after the
first third of the steps, by this script's own clock.
"""

import argparse
import copy
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--observation", type=int, default=64)
parser.add_argument("--action", type=int, default=12)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--environments", type=int, default=64)
parser.add_argument("--buffer", type=int, default=100_000)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


def mlp(inputs, outputs):
    w = args.width
    return nn.Sequential(nn.Linear(inputs, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, outputs))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(args.observation, 2 * args.action)

    def forward(self, observation):
        mean, log_std = self.net(observation).chunk(2, -1)
        std = log_std.clamp(-5, 2).exp()
        normal = torch.distributions.Normal(mean, std)
        raw = normal.rsample()
        action = raw.tanh()
        log_chance = normal.log_prob(raw) - torch.log(1 - action.square() + 1e-6)
        return action, log_chance.sum(-1, keepdim=True)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(args.observation + args.action, 1), mlp(args.observation + args.action, 1)

    def forward(self, observation, action):
        x = torch.cat([observation, action], -1)
        return self.first(x), self.second(x)


class Environments:
    """Linear dynamics with noise; a reward for staying near zero."""

    def __init__(self):
        self.moves = torch.randn(args.observation, args.observation, device=device) / args.observation**0.5 * 0.9
        self.pushes = torch.randn(args.action, args.observation, device=device) * 0.1
        self.now = torch.randn(args.environments, args.observation, device=device)

    def step(self, action):
        self.now = self.now @ self.moves + action @ self.pushes + 0.1 * torch.randn_like(self.now)
        return self.now, -self.now.square().mean(-1, keepdim=True)


class Agent:
    def __init__(self):
        self.actor, self.critic = Actor().to(device), Critic().to(device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros(1, device=device, requires_grad=True)
        if args.compile:
            self.actor.compile(mode=args.mode)
            self.critic.compile(mode=args.mode)
        fused = args.fused or None
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4, fused=fused)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4, fused=fused)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-4, fused=fused)

    def update(self, observation, action, reward, following):
        with torch.no_grad():
            next_action, log_chance = self.actor(following)
            one, other = self.target(following, next_action)
            wanted = reward + 0.99 * (torch.min(one, other) - self.log_alpha.exp() * log_chance)
        one, other = self.critic(observation, action)
        critic_loss = F.mse_loss(one, wanted) + F.mse_loss(other, wanted)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        chosen, log_chance = self.actor(observation)
        one, other = self.critic(observation, chosen)
        actor_loss = (self.log_alpha.exp().detach() * log_chance - torch.min(one, other)).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        alpha_loss = -(self.log_alpha * (log_chance.detach() - args.action)).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        with torch.no_grad():
            for followed, weight in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                followed.lerp_(weight, 0.005)
        return critic_loss


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


environments, agent = Environments(), Agent()
width = 2 * args.observation + args.action + 1
buffer, place, filled = torch.zeros(args.buffer, width, device=device), 0, 0
began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    observation = environments.now
    with torch.no_grad():
        action, _ = agent.actor(observation)
    following, reward = environments.step(action)
    buffer[place : place + args.environments] = torch.cat([observation, action, reward, following], -1)
    place = (place + args.environments) % (args.buffer - args.environments)
    filled = max(filled, place)
    picked = buffer[torch.randint(filled, (args.batch,), device=device)]
    o, a = args.observation, args.action
    loss = agent.update(picked[:, :o], picked[:, o : o + a], picked[:, o + a : o + a + 1], picked[:, o + a + 1 :])
    if step % 200 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
