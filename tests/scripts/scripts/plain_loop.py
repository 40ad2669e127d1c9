"""A loop as people write it: accumulation, clipping, a scheduler, evaluation, checkpoints, arguments, a log."""

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

torch.manual_seed(7)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


model = Net(args.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
centers = torch.randn(4, 16)


def batch(size=32):
    labels = torch.randint(4, (size,))
    return centers[labels] + torch.randn(size, 16), labels


@torch.no_grad()
def evaluate():
    model.eval()
    x, y = batch(256)
    accuracy = (model(x).argmax(-1) == y).float().mean().item()
    model.train()
    return accuracy


os.makedirs("checkpoints", exist_ok=True)
print("before:", evaluate())
step = 0
began = time.time()
for epoch in range(args.epochs):
    for _ in range(20):
        for micro in range(2):
            x, y = batch()
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
    torch.save({"model": model.state_dict(), "step": step}, "checkpoints/last.pt")
    with open("log.jsonl", "a") as log:
        print(json.dumps({"step": step, "loss": loss.item(), "accuracy": evaluate()}), file=log)
print("keys:", *model.state_dict())
print(f"{step} steps in {time.time() - began:.1f} s")
