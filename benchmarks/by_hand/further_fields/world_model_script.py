"""A world model as Dreamer's (Hafner et al., 2020): images, a recurrent state in a Python loop, Adam, clipping.

`python world_model_script.py [--compile] [--mode M] [--fused] [--tf32] [--steps N]`. The last line is the mean step
after the first third of the steps, by this script's own clock.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--length", type=int, default=50)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--state", type=int, default=200)
parser.add_argument("--stochastic", type=int, default=30)
parser.add_argument("--actions", type=int, default=6)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--tf32", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
if args.tf32:
    torch.set_float32_matmul_precision("high")
device = "cuda" if torch.cuda.is_available() else "cpu"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, args.width, 2 * args.width, 4 * args.width, 8 * args.width]
        self.layers = nn.ModuleList(nn.Conv2d(*pair, 4, stride=2) for pair in pairwise(widths))

    def forward(self, images):
        h = images.flatten(0, 1)
        for layer in self.layers:
            h = F.relu(layer(h))
        return h.flatten(1).view(*images.shape[:2], -1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width
        self.first = nn.Linear(args.state + args.stochastic, 32 * width)
        shapes = [(32 * width, 4 * width, 5), (4 * width, 2 * width, 5), (2 * width, width, 6), (width, 3, 6)]
        self.layers = nn.ModuleList(nn.ConvTranspose2d(*shape, stride=2) for shape in shapes)

    def forward(self, features):
        h = self.first(features.flatten(0, 1))[:, :, None, None]
        for number, layer in enumerate(self.layers):
            h = layer(h)
            h = F.relu(h) if number < 3 else h
        return h.view(*features.shape[:2], 3, 64, 64)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        size, stochastic = args.state, args.stochastic
        self.inner = nn.Linear(stochastic + args.actions, size)
        self.cell = nn.GRUCell(size, size)
        self.prior = nn.Sequential(nn.Linear(size, size), nn.ELU(), nn.Linear(size, 2 * stochastic))
        self.posterior = nn.Sequential(nn.Linear(size + 32 * args.width, size), nn.ELU(), nn.Linear(size, 2 * stochastic))

    def forward(self, seen, actions):
        state = seen.new_zeros(seen.shape[1], args.state)
        sample = seen.new_zeros(seen.shape[1], args.stochastic)
        states, samples, priors, posteriors = [], [], [], []
        for step in range(len(seen)):
            state = self.cell(F.elu(self.inner(torch.cat([sample, actions[step]], dim=1))), state)
            prior, posterior = self.prior(state), self.posterior(torch.cat([state, seen[step]], dim=1))
            mean, spread = posterior.chunk(2, dim=1)
            sample = mean + (F.softplus(spread) + 0.1) * torch.randn_like(mean)
            states.append(state)
            samples.append(sample)
            priors.append(prior)
            posteriors.append(posterior)
        return torch.cat([torch.stack(states), torch.stack(samples)], dim=2), torch.stack(priors), torch.stack(posteriors)


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.recurrent, self.decoder = Encoder(), Recurrent(), Decoder()
        features = args.state + args.stochastic
        self.reward = nn.Sequential(nn.Linear(features, 200), nn.ELU(), nn.Linear(200, 200), nn.ELU(), nn.Linear(200, 1))

    def forward(self, images, actions):
        features, priors, posteriors = self.recurrent(self.encoder(images), actions)
        return self.decoder(features), self.reward(features)[..., 0], priors, posteriors


model = WorldModel().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=6e-4, eps=1e-5, fused=args.fused or None)
forward = torch.compile(model, mode=args.mode) if args.compile else model


def normal(parameters):
    mean, spread = parameters.chunk(2, dim=2)
    return Normal(mean, F.softplus(spread) + 0.1)


def train_step(images, actions, rewards):
    made, found, priors, posteriors = forward(images, actions)
    divergence = kl_divergence(normal(posteriors), normal(priors)).sum(2).mean()
    loss = (
        0.5 * (made - images).square().sum((2, 3, 4)).mean() + 0.5 * (found - rewards).square().mean() + divergence.clamp(min=3.0)
    )
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    return loss


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


batches = [
    (
        torch.rand(args.length, args.batch, 3, 64, 64, device=device) - 0.5,
        torch.randn(args.length, args.batch, args.actions, device=device),
        torch.randn(args.length, args.batch, device=device),
    )
    for _ in range(8)
]
began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    loss = train_step(*batches[step % len(batches)])
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
