"""Forecasting by a transformer over patches of many series, as PatchTST: reversible normalization, AdamW, a one-cycle schedule.

`python forecasting_script.py [--compile [--mode MODE]] [--fused] [--steps N]`; the last line is the mean step after the first
third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--series", type=int, default=21)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--context", type=int, default=512)
parser.add_argument("--horizon", type=int, default=96)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width, heads=16):
        super().__init__()
        self.qkv, self.project, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.norm1, self.norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w)
        x = self.norm1((x + self.drop(self.project(attended))).transpose(1, 2)).transpose(1, 2)
        return self.norm2((x + self.drop(self.mlp(x))).transpose(1, 2)).transpose(1, 2)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = (args.context - 16) // 8 + 2
        self.embed = nn.Linear(16, args.width)
        self.position = nn.Parameter(torch.randn(self.patches, args.width) * 0.02)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.head = nn.Linear(self.patches * args.width, args.horizon)
        self.scale, self.shift = nn.Parameter(torch.ones(args.series)), nn.Parameter(torch.zeros(args.series))

    def forward(self, x):
        mean, spread = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach() + 1e-5
        x = ((x - mean) / spread * self.scale + self.shift).transpose(1, 2)
        patches = F.pad(x, (0, 8), mode="replicate").unfold(-1, 16, 8)
        h = self.embed(patches.reshape(-1, self.patches, 16)) + self.position
        for block in self.blocks:
            h = block(h)
        found = self.head(h.flatten(1)).view(len(x), args.series, -1).transpose(1, 2)
        return (found - self.shift) / self.scale * spread + mean


model = Forecaster().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.fused or None)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100_000)
if args.compile:
    model.compile(mode=args.mode)
table = torch.randn(20_000, args.series).cumsum(0).to(device)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    starts = torch.randint(len(table) - args.context - args.horizon, (args.batch,)).tolist()
    window = torch.stack([table[at : at + args.context + args.horizon] for at in starts])
    past, future = window[:, : args.context], window[:, args.context :]
    loss = F.mse_loss(model(past), future)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
