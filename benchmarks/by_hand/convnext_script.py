"""A ConvNeXt trained as people write it: bf16 autocast, AdamW, label smoothing, a cosine schedule.

`python convnext_script.py [--compile [--mode MODE]] [--fused] [--channels-last] [--steps N]`: transformers' ConvNeXt-Tiny
on batches of 128 images of 224 pixels. The last line is the mean step after the first third of the steps, by this script's own
clock.
"""

import argparse
import time

import torch
from torch import nn
from transformers import ConvNextConfig, ConvNextForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--depth", type=int, default=9)
parser.add_argument("--pixels", type=int, default=224)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
layout = torch.channels_last if args.channels_last else torch.contiguous_format

config = ConvNextConfig(
    hidden_sizes=[args.width * 2**stage for stage in range(4)], depths=[3, 3, args.depth, 3], num_labels=args.classes
)
model = ConvNextForImageClassification(config).to(device, memory_format=layout)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=args.fused or None)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
if args.compile:
    model = torch.compile(model, mode=args.mode)
batches = [
    (
        torch.randn(args.batch, 3, args.pixels, args.pixels, device=device).to(memory_format=layout),
        torch.randint(args.classes, (args.batch,), device=device),
    )
    for _ in range(6)
]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    images, labels = batches[step % len(batches)]
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(pixel_values=images).logits
        loss = loss_fn(logits, labels)
    loss.backward()
    optimizer.step()
    schedule.step()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
