"""A neural radiance field: rays are sampled coarsely, then finely where the first samples show something; one MLP for each.

`python radiance_field_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: 4,096 rays a step in float32, 64 coarse and
192 fine samples of each, Adam with a decaying rate. The last line is the mean step after the first third of the steps, by this
script's own clock.
"""

import argparse
import math
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rays", type=int, default=4096)
parser.add_argument("--coarse", type=int, default=64)
parser.add_argument("--fine", type=int, default=128)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


def encode(x, octaves):
    """Returns sines and cosines of the coordinates in rising frequencies."""
    parts = [x]
    for k in range(octaves):
        parts += [torch.sin(2.0**k * math.pi * x), torch.cos(2.0**k * math.pi * x)]
    return torch.cat(parts, -1)


class Field(nn.Module):
    """Density and color of points, seen from a direction."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(63, width)] + [nn.Linear(width, width) for _ in range(4)])
        self.second = nn.ModuleList([nn.Linear(width + 63, width)] + [nn.Linear(width, width) for _ in range(2)])
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    def forward(self, points, directions):
        x = encode(points, 10)
        h = x
        for layer in self.first:
            h = torch.relu(layer(h))
        h = torch.cat([h, x], -1)
        for layer in self.second:
            h = torch.relu(layer(h))
        density = self.density(h).squeeze(-1)
        d = encode(directions, 4)[:, None].expand(-1, points.shape[1], -1)
        h = torch.relu(self.view(torch.cat([self.feature(h), d], -1)))
        return torch.sigmoid(self.colour(h)), density


def render(colour, density, depth):
    """Returns the color of each ray, and how much each sample adds to it."""
    gap = torch.diff(depth, dim=-1, append=torch.full_like(depth[:, :1], 1e10))
    alpha = 1 - torch.exp(-torch.relu(density) * gap)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * through
    return (weights[..., None] * colour).sum(1), weights


def sample_fine(middle, weights, count):
    """Draws samples where the weights are large."""
    weights = weights + 1e-5
    cdf = torch.cumsum(weights / weights.sum(-1, keepdim=True), -1)
    cdf = torch.cat([torch.zeros_like(cdf[:, :1]), cdf], -1)
    u = torch.rand(cdf.shape[0], count, device=cdf.device)
    at = torch.searchsorted(cdf, u, right=True)
    low, high = (at - 1).clamp(min=0), at.clamp(max=cdf.shape[-1] - 1)
    c0, c1 = cdf.gather(1, low), cdf.gather(1, high)
    m0, m1 = middle.gather(1, low), middle.gather(1, high)
    width = torch.where(c1 - c0 < 1e-5, torch.ones_like(c0), c1 - c0)
    return m0 + (u - c0) / width * (m1 - m0)


coarse, fine = Field(args.width).to(device), Field(args.width).to(device)
optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=5e-4, fused=args.fused or None)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
if args.compile:
    coarse.compile(mode=args.mode)
    fine.compile(mode=args.mode)
origins = torch.randn(args.rays * 4, 3, device=device)
directions = nn.functional.normalize(torch.randn(args.rays * 4, 3, device=device), dim=-1)
pixels = torch.rand(args.rays * 4, 3, device=device)


def train_step():
    """Trains on random rays."""
    pick = torch.randint(len(origins), (args.rays,), device=device)
    o, d, target = origins[pick], directions[pick], pixels[pick]
    depth = torch.linspace(2, 6, args.coarse, device=device).expand(args.rays, -1)
    depth = depth + torch.rand_like(depth) * (4 / args.coarse)
    colour, density = coarse(o[:, None] + d[:, None] * depth[..., None], d)
    rgb_coarse, weights = render(colour, density, depth)
    with torch.no_grad():
        more = sample_fine(0.5 * (depth[:, 1:] + depth[:, :-1]), weights[:, 1:-1], args.fine)
    depth, _ = torch.sort(torch.cat([depth, more], -1), -1)
    colour, density = fine(o[:, None] + d[:, None] * depth[..., None], d)
    rgb_fine, _ = render(colour, density, depth)
    loss = ((rgb_coarse - target) ** 2).mean() + ((rgb_fine - target) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss


def wait():
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    loss = train_step()
    if step % 100 == 0:
        print(f"step {step} psnr {-10 * math.log10(loss.item()):.2f}")
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.rays / took:.0f} rays/s, {1e3 * took:.3f} ms a step")
