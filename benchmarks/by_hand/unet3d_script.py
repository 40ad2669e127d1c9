"""A 3D U-Net that segments volumes, trained as people write it: bf16 autocast, Dice and cross-entropy, SGD, clipping.

`python unet3d_script.py [--compile [--mode MODE]] [--fused] [--channels-last] [--steps N]`: five levels of 32 to 320 channels
with instance norm on batches of 2 volumes of 128 voxels a side. The last line is the mean step after the first third of the
steps, by this script's own clock.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--levels", type=int, default=5)
parser.add_argument("--voxels", type=int, default=128)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--classes", type=int, default=4)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
layout = torch.channels_last_3d if args.channels_last else torch.contiguous_format


def block(inner, outer, stride=1):
    return nn.Sequential(
        nn.Conv3d(inner, outer, 3, stride=stride, padding=1),
        nn.InstanceNorm3d(outer, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
        nn.Conv3d(outer, outer, 3, padding=1),
        nn.InstanceNorm3d(outer, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
    )


class UNet3D(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [min(args.width * 2**level, 10 * args.width) for level in range(args.levels)]
        self.down = nn.ModuleList(
            block(inner, outer, 1 if level == 0 else 2)
            for level, (inner, outer) in enumerate(zip([4, *widths], widths, strict=False))
        )
        pairs = list(pairwise(widths))[::-1]
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(deep, shallow, 2, stride=2) for shallow, deep in pairs)
        self.up = nn.ModuleList(block(2 * shallow, shallow) for shallow, _ in pairs)
        self.leave = nn.Conv3d(widths[0], args.classes, 1)

    def forward(self, volumes):
        kept = []
        for down in self.down:
            volumes = down(volumes)
            kept.append(volumes)
        kept.pop()
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            volumes = up(torch.cat([enlarge(volumes), kept.pop()], dim=1))
        return self.leave(volumes)


def dice_loss(logits, labels):
    shares = logits.float().softmax(1)
    truth = one_hot(labels, args.classes).movedim(-1, 1).float()
    overlap = (shares * truth).sum((0, 2, 3, 4))
    return 1 - (2 * overlap / (shares.sum((0, 2, 3, 4)) + truth.sum((0, 2, 3, 4)) + 1e-5)).mean()


model = UNet3D().to(device, memory_format=layout)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5, fused=args.fused or None
)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, args.steps, power=0.9)
network = torch.compile(model, mode=args.mode) if args.compile else model
sides = (args.voxels,) * 3
data = [
    (
        torch.randn(args.batch, 4, *sides, device=device).to(memory_format=layout),
        torch.randint(args.classes, (args.batch, *sides), device=device),
    )
    for _ in range(4)
]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    volumes, labels = data[step % len(data)]
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = network(volumes)
        loss = cross_entropy(logits, labels) + dice_loss(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 12.0)
    optimizer.step()
    schedule.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
