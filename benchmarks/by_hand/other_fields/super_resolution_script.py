"""Super-resolution as ESRGAN trains it: the generator steps first, with a perceptual loss, then the critic on what it made.

`python super_resolution_script.py [--compile [--mode MODE]] [--fused] [--channels-last] [--steps N]`: 16 patches of 48 pixels
that become 192, twelve dense residual blocks, bfloat16 autocast. The last line is the mean step after the first third of the
steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--blocks", type=int, default=12)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--grow", type=int, default=32)
parser.add_argument("--patch", type=int, default=48)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
w, g = args.width, args.grow


class Dense(nn.Module):
    """Five convolutions, each of which sees all before."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(w + k * g, g if k < 4 else w, 3, 1, 1) for k in range(5))

    def forward(self, x):
        seen = [x]
        for k, conv in enumerate(self.convs):
            y = conv(torch.cat(seen, 1))
            if k < 4:
                seen.append(F.leaky_relu(y, 0.2))
        return x + 0.2 * y


class Block(nn.Module):
    """Three of them, added to the input."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(Dense(), Dense(), Dense())

    def forward(self, x):
        return x + 0.2 * self.parts(x)


class Generator(nn.Module):
    """Blocks, then twice the size, twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, w, 3, 1, 1)
        self.body = nn.ModuleList(Block() for _ in range(args.blocks))
        self.after = nn.Conv2d(w, w, 3, 1, 1)
        self.ups = nn.Sequential(
            nn.Conv2d(w, 4 * w, 3, 1, 1), nn.PixelShuffle(2), nn.LeakyReLU(0.2), nn.Conv2d(w, 4 * w, 3, 1, 1), nn.PixelShuffle(2)
        )
        self.last = nn.Conv2d(w, 3, 3, 1, 1)

    def forward(self, x):
        first = h = self.first(x)
        for block in self.body:
            h = block(h)
        return self.last(F.leaky_relu(self.ups(first + self.after(h)), 0.2))


def stack(channels, norm):
    """Convolutions and activations."""
    layers = []
    for a, b, stride in channels:
        layers += [nn.Conv2d(a, b, 3, stride, 1), *([nn.BatchNorm2d(b)] if norm else []), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers)


class Critic(nn.Module):
    """How real an image looks."""

    def __init__(self):
        super().__init__()
        self.features = stack([(3, 64, 1), (64, 64, 2), (64, 128, 1), (128, 128, 2), (128, 256, 2), (256, 512, 2)], norm=True)
        self.head = nn.Linear(512, 1)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


generator, critic = Generator().to(device), Critic().to(device)
perceptual = stack([(3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)], norm=False).to(device)
perceptual.eval().requires_grad_(False)
if args.channels_last:
    for m in (generator, critic, perceptual):
        m.to(memory_format=torch.channels_last)
g_optimizer = torch.optim.Adam(generator.parameters(), 1e-4, betas=(0.9, 0.99), fused=args.fused or None)
c_optimizer = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.9, 0.99), fused=args.fused or None)
if args.compile:
    for m in (generator, critic, perceptual):
        m.compile(mode=args.mode)
small = [torch.rand(args.batch, 3, args.patch, args.patch, device=device) for _ in range(4)]
large = [torch.rand(args.batch, 3, 4 * args.patch, 4 * args.patch, device=device) for _ in range(4)]
if args.channels_last:
    small, large = ([x.contiguous(memory_format=torch.channels_last) for x in xs] for xs in (small, large))


def wait():
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    low, high = small[step % 4], large[step % 4]
    critic.requires_grad_(False)
    g_optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        made = generator(low)
        real, fake = critic(high).detach(), critic(made)
        adversarial = F.binary_cross_entropy_with_logits((fake - real.mean()).float(), torch.ones_like(fake).float())
        loss = (
            F.l1_loss(made.float(), high)
            + 0.1 * F.l1_loss(perceptual(made).float(), perceptual(high).float())
            + 5e-3 * adversarial
        )
    loss.backward()
    g_optimizer.step()
    critic.requires_grad_(True)
    c_optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        real, fake = critic(high), critic(made.detach())
        c_loss = F.binary_cross_entropy_with_logits((real - fake.mean()).float(), torch.ones_like(real).float())
        c_loss = c_loss + F.binary_cross_entropy_with_logits((fake - real.mean()).float(), torch.zeros_like(fake).float())
    c_loss.backward()
    c_optimizer.step()
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.batch / took:.1f} images/s, {1e3 * took:.3f} ms a step")
