"""Classification of video clips by a residual network of factored 3-D convolutions, as R(2+1)D; bf16 autocast, SGD, mixup.

`python video_script.py [--compile [--mode MODE]] [--fused] [--channels-last] [--steps N]`; the last line is the mean step after
the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--channels", type=int, default=64)
parser.add_argument("--depths", type=int, nargs=4, default=[2, 2, 2, 2])
parser.add_argument("--frames", type=int, default=16)
parser.add_argument("--pixels", type=int, default=112)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--classes", type=int, default=400)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Factored(nn.Sequential):
    def __init__(self, inputs, outputs, stride=1):
        middle = (inputs * outputs * 27) // (inputs * 9 + 3 * outputs)
        super().__init__(
            nn.Conv3d(inputs, middle, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
            nn.BatchNorm3d(middle),
            nn.ReLU(inplace=True),
            nn.Conv3d(middle, outputs, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False),
        )


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.first, self.norm1 = Factored(inputs, outputs, stride), nn.BatchNorm3d(outputs)
        self.second, self.norm2 = Factored(outputs, outputs), nn.BatchNorm3d(outputs)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv3d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm3d(outputs))

    def forward(self, x):
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        c = args.channels
        self.stem = nn.Sequential(nn.Conv3d(3, c, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(c), nn.ReLU())
        blocks, inputs = [], c
        for number, depth in enumerate(args.depths):
            for place in range(depth):
                blocks.append(Block(inputs, c * 2**number, 2 if place == 0 and number else 1))
                inputs = c * 2**number
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, args.classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3, 4)))


model = Network().to(device)
if args.channels_last:
    model = model.to(memory_format=torch.channels_last_3d)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=args.fused or None)
if args.compile:
    model.compile(mode=args.mode)
clips = torch.randint(0, 256, (64, 3, args.frames, args.pixels, args.pixels), dtype=torch.uint8, device=device)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    x = clips[torch.randint(len(clips), (args.batch,), device=device)].float() / 255
    if args.channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    labels = F.one_hot(torch.randint(args.classes, (args.batch,), device=device), args.classes).float()
    share = float(torch.distributions.Beta(0.2, 0.2).sample())
    x, labels = share * x + (1 - share) * x.flip(0), share * labels + (1 - share) * labels.flip(0)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
