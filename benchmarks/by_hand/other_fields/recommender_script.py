"""A recommender: 26 tables whose rows are summed in bags of one to three, dense features, and dot products of all pairs.

`python recommender_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: 8,192 samples a step in float32, tables of
200,000 rows that Adagrad trains, the rest by Adam. The last line is the mean step after the first third of the steps, by this
script's own clock.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tables", type=int, default=26)
parser.add_argument("--rows", type=int, default=200_000)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=8192)
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


def tower(*sizes):
    """Linear layers with ReLU between them."""
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    """Tables, two towers, and products of pairs."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(args.rows, args.width, mode="sum") for _ in range(args.tables))
        self.bottom = tower(13, 512, 256, args.width)
        pairs = (args.tables + 1) * args.tables // 2
        self.top = tower(args.width + pairs, 512, 256, 1)
        rows, columns = torch.tril_indices(args.tables + 1, args.tables + 1, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, dense, ids, offsets):
        x = self.bottom(dense)
        features = torch.stack([x] + [bag(ids[k], offsets[k]) for k, bag in enumerate(self.bags)], dim=1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.rows, self.columns]], 1)).squeeze(1)


model = Recommender().to(device)
tables = torch.optim.Adagrad(model.bags.parameters(), lr=0.01)
rest = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3, fused=args.fused or None)
if args.compile:
    model.compile(mode=args.mode)
batches = []
for _ in range(4):
    lengths = torch.randint(1, 4, (args.tables, args.batch), device=device)
    offsets = [torch.cumsum(row, 0) - row for row in lengths]
    ids = [torch.randint(args.rows, (int(row.sum()),), device=device) for row in lengths]
    batches.append(
        (torch.randn(args.batch, 13, device=device), ids, offsets, torch.randint(2, (args.batch,), device=device).float())
    )


def wait():
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    dense, ids, offsets, clicked = batches[step % 4]
    logits = model(dense, ids, offsets)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked)
    tables.zero_grad()
    rest.zero_grad()
    loss.backward()
    tables.step()
    rest.step()
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.batch / took:.0f} samples/s, {1e3 * took:.3f} ms a step")
