"""A generative adversarial network trained as people do: residual networks on images of 64 pixels, two optimizers, hinge losses.

`python gan_script.py [--compile [--only-generator] [--mode MODE]] [--fused] [--channels-last] [--steps N]`: batches of 128, bf16
autocast, spectral norms in the discriminator, an average of the generator's weights. The last line is the mean step, of both
networks, after the first third of the steps, by this script's own clock.
"""

import argparse
import copy
import time

import torch
from torch import nn
from torch.nn.functional import interpolate, relu
from torch.nn.utils.parametrizations import spectral_norm

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--pixels", type=int, default=64)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--only-generator", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
layout = torch.channels_last if args.channels_last else torch.contiguous_format
NOISE, LEVELS = 128, 4


class Up(nn.Module):
    """Doubles an image's width and height."""

    def __init__(self, channels, wide):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, padding=1)
        self.skip = nn.Conv2d(channels, wide, 1)
        self.before, self.between = nn.BatchNorm2d(channels), nn.BatchNorm2d(wide)

    def forward(self, images):
        main = self.first(interpolate(relu(self.before(images)), scale_factor=2.0))
        return self.second(relu(self.between(main))) + self.skip(interpolate(images, scale_factor=2.0))


class Down(nn.Module):
    """Halves an image's width and height."""

    def __init__(self, channels, wide):
        super().__init__()
        self.first = spectral_norm(nn.Conv2d(channels, wide, 3, padding=1))
        self.second = spectral_norm(nn.Conv2d(wide, wide, 3, padding=1))
        self.skip = spectral_norm(nn.Conv2d(channels, wide, 1))
        self.pool = nn.AvgPool2d(2)

    def forward(self, images):
        return self.pool(self.second(relu(self.first(relu(images))))) + self.skip(self.pool(images))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [args.width * 2**level for level in reversed(range(LEVELS))]
        self.side = args.pixels // 2**LEVELS
        self.widest = 2 * widths[0]
        self.start = nn.Linear(NOISE, self.widest * self.side**2)
        self.blocks = nn.Sequential(*(Up(*pair) for pair in zip([self.widest, *widths], widths, strict=False)))
        self.norm, self.last = nn.BatchNorm2d(widths[-1]), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, noise):
        images = self.start(noise).view(-1, self.widest, self.side, self.side)
        return torch.tanh(self.last(relu(self.norm(self.blocks(images)))))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [args.width * 2**level for level in range(LEVELS)]
        self.blocks = nn.Sequential(*(Down(*pair) for pair in zip([3, *widths], widths, strict=False)))
        self.score = spectral_norm(nn.Linear(widths[-1], 1))

    def forward(self, images):
        return self.score(relu(self.blocks(images)).sum((2, 3)))


generator = Generator().to(device, memory_format=layout).train()
discriminator = Discriminator().to(device, memory_format=layout).train()
average = copy.deepcopy(generator).requires_grad_(requires_grad=False)
rates = {"lr": 2e-4, "betas": (0.0, 0.9), "fused": args.fused or None}
of_generator = torch.optim.Adam(generator.parameters(), **rates)
of_discriminator = torch.optim.Adam(discriminator.parameters(), **rates)
if args.compile:
    generator.compile(mode=args.mode)
    if not args.only_generator:  # fails: compiled code reads buffers of the spectral norms that its second call has changed
        discriminator.compile(mode=args.mode)
photos = torch.rand(8 * args.batch, 3, args.pixels, args.pixels) * 2 - 1


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    real = photos[torch.randint(len(photos), (args.batch,))].to(device, memory_format=layout)
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast(device, dtype=torch.bfloat16):
        fake = generator(torch.randn(args.batch, NOISE, device=device)).detach()
        loss = relu(1 - discriminator(real)).mean() + relu(1 + discriminator(fake)).mean()
    of_discriminator.zero_grad()
    loss.backward()
    of_discriminator.step()
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = -discriminator(generator(torch.randn(args.batch, NOISE, device=device))).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
    with torch.no_grad():
        for kept, current in zip(average.parameters(), generator.parameters(), strict=True):
            kept.lerp_(current, 0.001)
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
