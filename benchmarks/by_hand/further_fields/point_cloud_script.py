"""Classification of point clouds by a DGCNN (Wang et al., 2019): neighbors found anew in each layer, batch normalization, SGD.

`python point_cloud_script.py [--compile] [--mode M] [--fused] [--tf32] [--steps N]`. The last line is the mean step
after the first third of the steps, by this script's own clock.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--points", type=int, default=1024)
parser.add_argument("--neighbors", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--tf32", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
if args.tf32:
    torch.set_float32_matmul_precision("high")
device = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 40


def edges(x, neighbors):
    """Features of each point and the way to its neighbors: (batch, 2 * channels, points, neighbors)."""
    batch, channels, points = x.shape
    squares = x.square().sum(1)
    closeness = 2 * x.transpose(1, 2) @ x - squares[:, :, None] - squares[:, None, :]
    near = closeness.topk(neighbors, dim=-1).indices
    rows = near + torch.arange(batch, device=x.device).view(-1, 1, 1) * points
    flat = x.transpose(1, 2).reshape(batch * points, channels)
    others = flat[rows.view(-1)].view(batch, points, neighbors, channels)
    own = x.transpose(1, 2)[:, :, None].expand(-1, -1, neighbors, -1)
    return torch.cat([others - own, own], dim=3).permute(0, 3, 1, 2).contiguous()


class EdgeConv(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(2 * inner, outer, 1, bias=False), nn.BatchNorm2d(outer), nn.LeakyReLU(0.2))

    def forward(self, x):
        return self.layer(edges(x, args.neighbors)).max(dim=-1).values


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width
        self.layers = nn.ModuleList(EdgeConv(*pair) for pair in pairwise([3, width, width, 2 * width, 4 * width]))
        self.mix = nn.Sequential(nn.Conv1d(8 * width, 16 * width, 1, bias=False), nn.BatchNorm1d(16 * width), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(
            nn.Linear(32 * width, 8 * width, bias=False),
            nn.BatchNorm1d(8 * width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.5),
            nn.Linear(8 * width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.5),
            nn.Linear(4 * width, CLASSES),
        )

    def forward(self, x):
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        h = self.mix(torch.cat(found, dim=1))
        return self.head(torch.cat([h.amax(-1), h.mean(-1)], dim=1))


model = Network().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=args.fused or None)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
forward = torch.compile(model, mode=args.mode) if args.compile else model


def train_step(points, labels):
    scale = torch.rand(len(points), 3, 1, device=device) * 0.5 + 0.75
    loss = F.cross_entropy(forward(points * scale), labels, label_smoothing=0.2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


batches = [
    (torch.randn(args.batch, 3, args.points, device=device), torch.randint(CLASSES, (args.batch,), device=device))
    for _ in range(16)
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
