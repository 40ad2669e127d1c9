"""A diffusion UNet trained as people write it: bf16 autocast, AdamW, gradient clipping, an average of the weights.

`python unet_script.py [--compile [--mode MODE]] [--fused] [--channels-last] [--steps N]`: residual blocks with GroupNorm,
attention at two resolutions, on batches of 64 images of 64 pixels. The last line is the mean step after the first third of the
steps, by this script's own clock.
"""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn.functional import interpolate, mse_loss, scaled_dot_product_attention, silu

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--pixels", type=int, default=64)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
layout = torch.channels_last if args.channels_last else torch.contiguous_format


def embed(times, width):
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=times.device) / (width // 2))
    angles = times[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    def __init__(self, inner, outer, width):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inner), nn.GroupNorm(8, outer)
        self.conv1, self.conv2 = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(width, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, images, times):
        hidden = self.conv1(silu(self.norm1(images))) + self.time(silu(times))[:, :, None, None]
        return self.conv2(silu(self.norm2(hidden))) + self.skip(images)


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, images):
        rows, width, high, wide = images.shape
        q, k, v = (
            self.qkv(self.norm(images)).reshape(rows, 3, self.heads, width // self.heads, high * wide).transpose(3, 4).unbind(1)
        )
        mixed = scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(rows, width, high, wide)
        return images + self.out(mixed)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        widths, self.width = [width, 2 * width, 2 * width], width
        self.times = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, kept, now = nn.ModuleList(), nn.ModuleList(), [width], width
        for level, outer in enumerate(widths):
            for _ in range(2):
                attention = Attention(outer) if level else nn.Identity()
                self.down.append(nn.ModuleList([Block(now, outer, 4 * width), attention]))
                now = outer
                kept.append(now)
            if level < len(widths) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(now, now, 3, stride=2, padding=1)]))
                kept.append(now)
        self.middle = nn.ModuleList([Block(now, now, 4 * width), Attention(now), Block(now, now, 4 * width)])
        for level, outer in reversed(list(enumerate(widths))):
            for part in range(3):
                attention = Attention(outer) if level else nn.Identity()
                layers = [Block(now + kept.pop(), outer, 4 * width), attention]
                if part == 2 and level:
                    layers.append(nn.Conv2d(outer, outer, 3, padding=1))
                self.up.append(nn.ModuleList(layers))
                now = outer
        self.norm, self.leave = nn.GroupNorm(8, now), nn.Conv2d(now, 3, 3, padding=1)

    def forward(self, images, times):
        embedded = self.times(embed(times, self.width))
        hidden = self.enter(images)
        kept = [hidden]
        for layers in self.down:
            hidden = layers[0](hidden) if len(layers) == 1 else layers[1](layers[0](hidden, embedded))
            kept.append(hidden)
        hidden = self.middle[2](self.middle[1](self.middle[0](hidden, embedded)), embedded)
        for layers in self.up:
            hidden = layers[1](layers[0](torch.cat([hidden, kept.pop()], dim=1), embedded))
            if len(layers) == 3:
                hidden = layers[2](interpolate(hidden, scale_factor=2.0))
        return self.leave(silu(self.norm(hidden)))


model = UNet(args.width).to(device, memory_format=layout)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=args.fused or None)
kept_noise = torch.linspace(0.999, 0.01, 1000, device=device)
denoise = torch.compile(model, mode=args.mode) if args.compile else model
data = [torch.randn(args.batch, 3, args.pixels, args.pixels, device=device).to(memory_format=layout) for _ in range(6)]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    images = data[step % len(data)]
    times = torch.randint(1000, (args.batch,), device=device)
    noise = torch.randn_like(images)
    share = kept_noise[times][:, None, None, None]
    noisy = share.sqrt() * images + (1 - share).sqrt() * noise
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = mse_loss(denoise(noisy, times).float(), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update_parameters(model)
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
