"""CycleGAN: two generators and two critics, pictures of earlier steps for the critics, cycle and identity losses.

`python cyclegan_script.py [--compile [--mode MODE]] [--channels-last] [--fused] [--steps N]`: four pairs of pictures of 256
pixels, nine residual blocks, instance normalization, bfloat16 autocast. The last line is the mean step after the first third of
the steps, by this script's own clock.
"""

import argparse
import itertools
import random
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--blocks", type=int, default=9)
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
random.seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
w = args.width


class ResidualBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c), nn.ReLU(inplace=True),
            nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c),
        )  # fmt: skip

    def forward(self, x):
        return x + self.block(x)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.ReflectionPad2d(3), nn.Conv2d(3, w, 7), nn.InstanceNorm2d(w), nn.ReLU(inplace=True)]
        for c in (w, 2 * w):
            layers += [nn.Conv2d(c, 2 * c, 3, 2, 1), nn.InstanceNorm2d(2 * c), nn.ReLU(inplace=True)]
        layers += [ResidualBlock(4 * w) for _ in range(args.blocks)]
        for c in (4 * w, 2 * w):
            layers += [
                nn.Upsample(scale_factor=2),
                nn.Conv2d(c, c // 2, 3, 1, 1),
                nn.InstanceNorm2d(c // 2),
                nn.ReLU(inplace=True),
            ]
        self.model = nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(w, 3, 7), nn.Tanh())

    def forward(self, x):
        return self.model(x)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for c in (w, 2 * w, 4 * w):
            layers += [nn.Conv2d(c, 2 * c, 4, 2, 1), nn.InstanceNorm2d(2 * c), nn.LeakyReLU(0.2, inplace=True)]
        self.model = nn.Sequential(*layers, nn.ZeroPad2d((1, 0, 1, 0)), nn.Conv2d(8 * w, 1, 4, padding=1))

    def forward(self, x):
        x = self.model(x)
        return F.avg_pool2d(x, x.size()[2:]).flatten(1)


class Pool:
    """Pictures of earlier steps, of which half are handed out instead of new ones."""

    def __init__(self, size=50):
        self.size, self.held = size, []

    def __call__(self, pictures):
        out = []
        for picture in pictures.detach().split(1):
            if len(self.held) < self.size:
                self.held.append(picture)
                out.append(picture)
            elif random.random() > 0.5:
                i = random.randrange(self.size)
                out.append(self.held[i].clone())
                self.held[i] = picture
            else:
                out.append(picture)
        return torch.cat(out)


g_ab, g_ba, d_a, d_b = (kind().to(device) for kind in (Generator, Generator, Critic, Critic))
if args.channels_last:
    for m in (g_ab, g_ba, d_a, d_b):
        m.to(memory_format=torch.channels_last)
if args.compile:
    for m in (g_ab, g_ba, d_a, d_b):
        m.compile(mode=args.mode)
fused = args.fused or None
g_optimizer = torch.optim.Adam(itertools.chain(g_ab.parameters(), g_ba.parameters()), 2e-4, betas=(0.5, 0.999), fused=fused)
d_a_optimizer = torch.optim.Adam(d_a.parameters(), 2e-4, betas=(0.5, 0.999), fused=fused)
d_b_optimizer = torch.optim.Adam(d_b.parameters(), 2e-4, betas=(0.5, 0.999), fused=fused)
pool_a, pool_b = Pool(), Pool()
mse, l1 = nn.MSELoss(), nn.L1Loss()
real = torch.ones(args.batch, 1, device=device)
false = torch.zeros(args.batch, 1, device=device)
pictures = [torch.rand(2, args.batch, 3, args.size, args.size, device=device) * 2 - 1 for _ in range(4)]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


def train_critic(critic, optimizer, picture, made):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = 0.5 * (mse(critic(picture), real) + mse(critic(made), false))
    loss.backward()
    optimizer.step()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    a, b = pictures[step % 4]
    if args.channels_last:
        a, b = (x.contiguous(memory_format=torch.channels_last) for x in (a, b))
    g_optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        same_a, same_b = g_ba(a), g_ab(b)
        made_b, made_a = g_ab(a), g_ba(b)
        loss = 5.0 * (l1(same_a, a) + l1(same_b, b))
        loss = loss + mse(d_b(made_b), real) + mse(d_a(made_a), real)
        loss = loss + 10.0 * (l1(g_ba(made_b), a) + l1(g_ab(made_a), b))
    loss.backward()
    g_optimizer.step()
    train_critic(d_a, d_a_optimizer, a, pool_a(made_a))
    train_critic(d_b, d_b_optimizer, b, pool_b(made_b))
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.batch / took:.2f} images/s, {1e3 * took:.3f} ms a step")
