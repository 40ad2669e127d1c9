"""A normalizing flow of images as Glow: scales set from the first batch, invertible 1 × 1 convolutions, affine coupling, Adamax.

`python flow_script.py [--compile [--mode MODE]] [--steps N]`; the last line is the mean step after the first third of the steps,
by this script's own clock.
"""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--levels", type=int, default=3)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--pixels", type=int, default=32)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class ActNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.bias, self.log_scale = nn.Parameter(torch.zeros(1, channels, 1, 1)), nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.is_set = False

    def forward(self, x):
        if self.training and not self.is_set:
            with torch.no_grad():
                self.bias.copy_(-x.mean((0, 2, 3), keepdim=True))
                self.log_scale.copy_(-torch.log(x.std((0, 2, 3), keepdim=True) + 1e-6))
            self.is_set = True
        return (x + self.bias) * self.log_scale.exp(), self.log_scale.sum() * x.shape[2] * x.shape[3]


class Mixing(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])

    def forward(self, x):
        return F.conv2d(x, self.weight[..., None, None]), torch.slogdet(self.weight)[1] * x.shape[2] * x.shape[3]


class Coupling(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
            nn.Conv2d(width, channels, 3, padding=1),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        kept, changed = x.chunk(2, 1)
        shift, scale = self.net(kept).chunk(2, 1)
        scale = torch.sigmoid(scale + 2)
        return torch.cat([kept, (changed + shift) * scale], 1), scale.log().sum((1, 2, 3))


class Step(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.norm, self.mixing, self.coupling = ActNorm(channels), Mixing(channels), Coupling(channels, width)

    def forward(self, x, total):
        for layer in (self.norm, self.mixing, self.coupling):
            x, more = layer(x)
            total = total + more
        return x, total


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        channels, levels = 3, []
        for _ in range(args.levels):
            channels *= 4
            levels.append(nn.ModuleList(Step(channels, args.width) for _ in range(args.depth)))
            channels //= 2
        self.levels = nn.ModuleList(levels)

    def forward(self, x):
        total, log_chance = x.new_zeros(len(x)), x.new_zeros(len(x))
        for number, level in enumerate(self.levels):
            x = F.pixel_unshuffle(x, 2)
            for step in level:
                x, total = step(x, total)
            if number < len(self.levels) - 1:
                x, out = x.chunk(2, 1)
            else:
                out = x
            log_chance = log_chance - 0.5 * (out.square() + math.log(2 * math.pi)).sum((1, 2, 3))
        return log_chance + total


model = Glow().to(device)
optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
if args.compile:
    model.compile(mode=args.mode)
images = torch.randint(0, 256, (2048, 3, args.pixels, args.pixels), dtype=torch.uint8)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    x = images[torch.randint(len(images), (args.batch,))].to(device).float()
    x = (x + torch.rand_like(x)) / 256 - 0.5
    loss = (-model(x).mean() / (math.log(2) * x[0].numel())) + 8
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 5)
    nn.utils.clip_grad_norm_(model.parameters(), 100)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
