"""Proximal policy optimization: rollouts without gradients in 2,048 simulated environments, then epochs of minibatches.

`python ppo_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: 16 moves each, four epochs of four minibatches of 8,192
in float32, so that the GPU waits for launches. The last line is the mean step after the first third of the steps, each with 16
updates, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.distributions import Normal

parser = argparse.ArgumentParser()
parser.add_argument("--environments", type=int, default=2048)
parser.add_argument("--horizon", type=int, default=16)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--observation", type=int, default=64)
parser.add_argument("--actions", type=int, default=12)
parser.add_argument("--minibatches", type=int, default=4)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
n, t, o, a = args.environments, args.horizon, args.observation, args.actions


def layer(i, k, gain=2**0.5):
    """A linear layer with orthogonal weights."""
    linear = nn.Linear(i, k)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """A critic and an actor whose deviations are parameters."""

    def __init__(self):
        super().__init__()
        w = args.width
        self.critic = nn.Sequential(
            layer(o, w), nn.ELU(), layer(w, w), nn.ELU(), layer(w, w // 2), nn.ELU(), layer(w // 2, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(o, w), nn.ELU(), layer(w, w), nn.ELU(), layer(w, w // 2), nn.ELU(), layer(w // 2, a, 0.01)
        )
        self.log_std = nn.Parameter(torch.zeros(1, a))

    def act(self, x, action=None):
        mean = self.actor(x)
        policy = Normal(mean, self.log_std.expand_as(mean).exp(), validate_args=False)
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), self.critic(x).squeeze(1)


agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5, fused=args.fused or None)
if args.compile:
    agent.act = torch.compile(agent.act, mode=args.mode)
weights = torch.randn(o, o, device=device) / o**0.5
pull = torch.randn(a, o, device=device) / a**0.5
state = torch.randn(n, o, device=device)


def wait():
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    seen, acted, log_probs, values, rewards = [], [], [], [], []
    with torch.no_grad():
        for _ in range(t):
            action, log_prob, _, value = agent.act(state)
            seen.append(state)
            acted.append(action)
            log_probs.append(log_prob)
            values.append(value)
            state = torch.tanh(state @ weights + action @ pull)
            rewards.append(-state.square().mean(1))
        last = agent.critic(state).squeeze(1)
        advantage, advantages = torch.zeros(n, device=device), []
        for k in reversed(range(t)):
            following = last if k == t - 1 else values[k + 1]
            advantage = rewards[k] + 0.99 * following - values[k] + 0.99 * 0.95 * advantage
            advantages.insert(0, advantage)
        x, act, old, adv = torch.cat(seen), torch.cat(acted), torch.cat(log_probs), torch.cat(advantages)
        returns = adv + torch.cat(values)
    for _ in range(args.epochs):
        for rows in torch.randperm(n * t, device=device).chunk(args.minibatches):
            _, new, entropy, value = agent.act(x[rows], act[rows])
            ratio = (new - old[rows]).exp()
            gain = adv[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            loss = policy_loss - 0.01 * entropy.mean() + 0.5 * (value - returns[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{n * t / took:.0f} samples/s, {1e3 * took:.3f} ms a step")
