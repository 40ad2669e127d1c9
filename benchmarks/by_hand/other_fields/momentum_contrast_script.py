"""Contrastive learning with a momentum encoder and a queue, as MoCo v2, on ResNet-50: bf16 autocast, SGD, a cosine schedule.

`python momentum_contrast_script.py [--compile | --compile-encoder [--mode MODE]] [--fused] [--channels-last] [--steps N]`; the
last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import copy
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=160)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--channels", type=int, default=64)
parser.add_argument("--depths", type=int, nargs=4, default=[3, 4, 6, 3])
parser.add_argument("--queue", type=int, default=65536)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--compile-encoder", action="store_true", help="compile the encoder that trains, and nothing else")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu, self.skip = nn.ReLU(inplace=True), None
        if stride > 1 or inside != outside:
            self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        return self.relu(out + (x if self.skip is None else self.skip(x)))


class ResNet(nn.Module):
    def __init__(self, dimension=128):
        super().__init__()
        w = args.channels
        self.stem = nn.Sequential(nn.Conv2d(3, w, 7, 2, 3, bias=False), nn.BatchNorm2d(w), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        layers, inside = [], w
        for number, depth in enumerate(args.depths):
            for place in range(depth):
                layers.append(Bottleneck(inside, w * 2**number, 2 if place == 0 and number else 1))
                inside = 4 * w * 2**number
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(inside, inside), nn.ReLU(), nn.Linear(inside, dimension))

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = ResNet()
        self.momentum_encoder = copy.deepcopy(self.encoder)
        for one in self.momentum_encoder.parameters():
            one.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(128, args.queue), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update(self, momentum=0.999):
        for one, other in zip(self.encoder.parameters(), self.momentum_encoder.parameters(), strict=True):
            other.data = other.data * momentum + one.data * (1 - momentum)

    @torch.no_grad()
    def enqueue(self, keys):
        place = int(self.place)
        self.queue[:, place : place + len(keys)] = keys.T
        self.place[0] = (place + len(keys)) % args.queue

    def forward(self, queries, keys):
        q = F.normalize(self.encoder(queries), dim=1)
        with torch.no_grad():
            self.update()
            order = torch.randperm(len(keys), device=keys.device)
            k = F.normalize(self.momentum_encoder(keys[order]), dim=1)[order.argsort()]
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(1)
        negative = q @ self.queue.clone().detach()
        self.enqueue(k)
        return torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(q), dtype=torch.long, device=q.device)


model = MoCo().to(device)
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4, fused=args.fused or None)
if args.compile:
    model.compile(mode=args.mode)
if args.compile_encoder:
    model.encoder.compile(mode=args.mode)
pictures = [torch.randn(2, args.batch, 3, args.size, args.size, device=device) for _ in range(4)]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = 0.03 * 0.5 * (1 + math.cos(math.pi * step / 100_000))
    queries, keys = pictures[step % 4]
    if args.channels_last:
        queries, keys = queries.contiguous(memory_format=torch.channels_last), keys.contiguous(memory_format=torch.channels_last)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits, labels = model(queries, keys)
        loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
