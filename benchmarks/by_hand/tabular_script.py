"""A small model of tables, trained as people write it: embeddings, a deep network, Adam, binary cross-entropy.

`python tabular_script.py [--compile [--mode MODE]] [--fused] [--compile-step] [--steps N]`: 26 categories and 13
numbers, batches of 2,048 rows. A step is so short that launching its kernels takes longer than running them. The last line is the
mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

parser = argparse.ArgumentParser()
parser.add_argument("--categories", type=int, default=26)
parser.add_argument("--entries", type=int, default=10_000)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--batch", type=int, default=2048)
parser.add_argument("--steps", type=int, default=900)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--compile-step", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, first, hidden):
        return first * self.mix(hidden) + hidden


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(args.entries, args.width) for _ in range(args.categories))
        width = args.categories * args.width + 13
        self.crosses = nn.ModuleList(Cross(width) for _ in range(3))
        sizes, layers = [width, 512, 256, 128], []
        for inner, outer in pairwise(sizes):
            layers += [nn.Linear(inner, outer), nn.BatchNorm1d(outer), nn.ReLU(), nn.Dropout(0.1)]
        self.deep = nn.Sequential(*layers)
        self.leave = nn.Linear(width + sizes[-1], 1)

    def forward(self, categories, numbers):
        embedded = [table(categories[:, column]) for column, table in enumerate(self.tables)]
        first = torch.cat([*embedded, numbers.log1p()], dim=1)
        hidden = first
        for cross in self.crosses:
            hidden = cross(first, hidden)
        return self.leave(torch.cat([hidden, self.deep(first)], dim=1)).squeeze(1)


model = Clicks().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=args.fused or None)
network = torch.compile(model, mode=args.mode) if args.compile else model
update = torch.compile(optimizer.step) if args.compile_step else optimizer.step
rows = 16 * args.batch
categories = torch.randint(args.entries, (rows, args.categories), device=device)
numbers = torch.rand(rows, 13, device=device) * 100
clicks = torch.randint(2, (rows,), device=device).float()


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began, seen = 0.0, torch.zeros((), device=device)
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    chosen = slice(step % 16 * args.batch, (step % 16 + 1) * args.batch)
    optimizer.zero_grad()
    loss = binary_cross_entropy_with_logits(network(categories[chosen], numbers[chosen]), clicks[chosen])
    loss.backward()
    update()
    seen += loss.detach()
    if step % 100 == 99:
        print(f"step {step}: mean loss {seen.item() / (step + 1):.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
