"""WGAN-GP (Gulrajani et al., 2017) with residual networks: a critic with a penalty on its gradients.

`python gradient_penalty_script.py [--fused] [--channels-last] [--graph] [--steps N]`; `--graph` captures both steps by hand.
A step is five of the critic and one of the generator. The last line is the mean step after the first third of the steps, by this
script's own clock.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--pixels", type=int, default=64)
parser.add_argument("--critics", type=int, default=5)
parser.add_argument("--steps", type=int, default=45)
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--graph", action="store_true", help="capture a step of the critic and one of the generator by hand")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, inner, outer, scale):
        super().__init__()
        self.scale = scale
        self.norm = nn.InstanceNorm2d(inner, affine=True) if scale < 1 else nn.BatchNorm2d(inner)
        self.one, self.two = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.short = nn.Conv2d(inner, outer, 1)

    def resized(self, x):
        return F.avg_pool2d(x, 2) if self.scale < 1 else F.interpolate(x, scale_factor=2)

    def forward(self, x):
        h = F.relu(self.norm(x))
        h = self.one(self.resized(h) if self.scale > 1 else h)
        h = self.two(F.relu(h))
        return (h if self.scale > 1 else self.resized(h)) + self.short(self.resized(x))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width
        self.first = nn.Conv2d(3, width, 3, padding=1)
        widths = [width, 2 * width, 4 * width, 8 * width, 8 * width]
        self.blocks = nn.Sequential(*(Block(*pair, 0.5) for pair in pairwise(widths)))
        self.last = nn.Linear(8 * width * (args.pixels // 16) ** 2, 1)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)).flatten(1))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.width, self.side = args.width, args.pixels // 16
        self.first = nn.Linear(128, 8 * self.width * self.side**2)
        widths = [8 * self.width, 8 * self.width, 4 * self.width, 2 * self.width, self.width]
        self.blocks = nn.Sequential(*(Block(*pair, 2) for pair in pairwise(widths)))
        self.last = nn.Conv2d(self.width, 3, 3, padding=1)

    def forward(self, z):
        h = self.first(z).view(-1, 8 * self.width, self.side, self.side)
        return torch.tanh(self.last(F.relu(self.blocks(h))))


critic, generator = Critic().to(device), Generator().to(device)
if args.channels_last:
    critic, generator = (one.to(memory_format=torch.channels_last) for one in (critic, generator))
adam = {"lr": 1e-4, "betas": (0.0, 0.9), "fused": args.fused or None, "capturable": args.graph}
of_critic, of_generator = torch.optim.Adam(critic.parameters(), **adam), torch.optim.Adam(generator.parameters(), **adam)


def critic_step(real):
    of_critic.zero_grad()
    with torch.no_grad():
        made = generator(torch.randn(len(real), 128, device=device))
    share = torch.rand(len(real), 1, 1, 1, device=device)
    between = (share * real + (1 - share) * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss = critic(made).mean() - critic(real).mean() + 10 * penalty
    loss.backward()
    of_critic.step()


def generator_step():
    of_generator.zero_grad()
    loss = -critic(generator(torch.randn(args.batch, 128, device=device))).mean()
    loss.backward()
    of_generator.step()


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


def captured(step, *given):
    """Returns a function that replays a step."""
    fixed = [one.clone() for one in given]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*fixed)
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(*fixed)

    def replay(*given):
        for place, one in zip(fixed, given, strict=True):
            place.copy_(one)
        graph.replay()

    return replay


images = torch.rand(16, args.batch, 3, args.pixels, args.pixels, device=device) * 2 - 1
if args.graph:
    critic_step, generator_step = captured(critic_step, images[0]), captured(generator_step)
began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    for number in range(args.critics):
        critic_step(images[(step * args.critics + number) % len(images)])
    generator_step()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
